// Testsum runs suites of Go tests and says how many tests of each ran.
//
//	testsum run -out DIR -suite NAME [-seeds NAME] COMMAND ARG...
//
// runs a command that prints the output of `go test -json`, shows it in short
// and writes the counts to a file in DIR. With -seeds, fuzz targets run as
// tests are counted as a suite of their own. The exit status is that of the
// command.
//
//	testsum again -out DIR -suite NAME [-seeds NAME] COMMAND ARG...
//
// runs up to three tests that failed in that suite a second time, each by itself. One that
// passes counts as flaky.
//
//	testsum report -out DIR NAME...
//
// prints a table of the named suites. It fails when a test failed, when a suite
// did not run, or when it ran no test: a suite that is silently empty must not
// look like one that passed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		os.Exit(1) //nolint:gocritic // nothing that the deferred stop would free outlives the process
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return errors.New("say run, again or report")
	}
	flags := flag.NewFlagSet("testsum "+args[0], flag.ContinueOnError)
	dir := flags.String("out", "", "folder for the counts")
	switch args[0] {
	case "run", "again":
		suite := flags.String("suite", "", "name of the suite")
		seeds := flags.String("seeds", "", "name under which fuzz targets are counted")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		if *dir == "" || *suite == "" || flags.NArg() == 0 {
			return fmt.Errorf("%s needs -out, -suite and a command", args[0])
		}
		if args[0] == "again" {
			suites := slices.DeleteFunc([]string{*suite, *seeds}, func(s string) bool { return s == "" })
			return runAgain(ctx, *dir, suites, flags.Args(), out)
		}
		return runSuite(ctx, *dir, *suite, *seeds, flags.Args(), out)
	case "report":
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		if *dir == "" || flags.NArg() == 0 {
			return errors.New("report needs -out and names of suites")
		}
		return report(*dir, flags.Args(), out)
	default:
		return fmt.Errorf("%q is not known; say run, again or report", args[0])
	}
}

// file is where the counts of a suite are kept.
func file(dir, suite string) string { return filepath.Join(dir, suite+".json") }
