package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
)

// maxAgain is how many failed tests of a suite get a second try. Where more fail, it is no
// matter of a busy machine.
const maxAgain = 3

// runAgain gives the tests that failed in the last run of a suite a second try, each by itself and
// with the flags of the command. A test that passes moves from the failed ones to the flaky ones of
// the suite's counts; the report names it.
//
// There is no second try after a data race, which shows itself in few runs, and none where a test
// panicked or did not finish or a package failed as a whole, since other tests of the package may
// not have run, nor where one of the failed tests has the attribute second-try=no.
func runAgain(ctx context.Context, dir string, suites, command []string, out io.Writer) error {
	for _, suite := range suites {
		c, err := read(file(dir, suite))
		if err != nil {
			return err
		}
		names := c.secondTries()
		if len(names) == 0 {
			continue
		}
		module := modulePath(ctx)
		for _, name := range names {
			passed, err := tryAgain(ctx, name, module, command, out)
			if err != nil {
				return err
			}
			if passed {
				c.flaky(name)
			}
		}
		if err := save(file(dir, suite), c); err != nil {
			return err
		}
	}
	return nil
}

// secondTries names the tests to run again, without subtests, or none where the failure is of
// another kind.
func (c counts) secondTries() []testName {
	var names []testName
	for _, failed := range c.Failed {
		if failed.Test == (testName{}) {
			return nil
		}
		if !slices.Contains(names, failed.Test) {
			names = append(names, failed.Test)
		}
	}
	if c.Races > 0 || c.Error != "" || len(names) > maxAgain {
		return nil
	}
	return names
}

// flaky moves a test, with its subtests, from the failed ones to the flaky ones.
func (c *counts) flaky(name testName) {
	var failed []outcome
	for _, o := range c.Failed {
		if o.Test == name {
			c.Flaky = append(c.Flaky, o)
			c.Passed++
		} else {
			failed = append(failed, o)
		}
	}
	c.Failed = failed
}

// tryAgain runs one test and reports whether it passed.
func tryAgain(ctx context.Context, name testName, module string, command []string, out io.Writer) (bool, error) {
	command = onlyTest(command, name)
	fmt.Fprintf(out, "== again: %s\n", strings.Join(command, " "))
	rec := newRecorder(out, module)
	err := pipe(ctx, command, rec)
	if err := ctx.Err(); err != nil {
		return false, errors.Join(errors.New("stopped in a second try"), err)
	}
	ran := rec.tests[key{name.Package, name.Name}]
	return err == nil && rec.races == 0 && ran != nil && ran.action == "pass", nil
}

// onlyTest changes a command of the form `go test -json FLAG... PACKAGE...` to run one test, and
// not from the go command's cache.
func onlyTest(command []string, name testName) []string {
	end := len(command)
	for end > 0 && isPackage(command[end-1]) {
		end--
	}
	return append(slices.Clone(command[:end]), "-count=1", "-run", "^"+regexp.QuoteMeta(name.Name)+"$", name.Package)
}

// isPackage reports whether an argument of the go command is the path of a package.
func isPackage(arg string) bool {
	return arg == "." || strings.HasPrefix(arg, "./") || strings.HasPrefix(arg, "github.com/")
}
