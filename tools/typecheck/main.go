// Typecheck reports the errors for which Go packages would not compile.
//
//	typecheck PACKAGE...
//
// It reads the sources of all that the packages import, and of their dependencies no more than
// declarations: a program as large as kube-scheduler takes seconds, which take minutes to compile.
package main

import (
	"fmt"
	"os"

	"golang.org/x/tools/go/packages"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "typecheck:", err)
		os.Exit(1)
	}
}

func run(patterns []string) error {
	mode := packages.NeedName | packages.NeedFiles | packages.NeedCompiledGoFiles | packages.NeedImports | packages.NeedDeps |
		packages.NeedTypes | packages.NeedSyntax | packages.NeedTypesSizes
	loaded, err := packages.Load(&packages.Config{Mode: mode}, patterns...)
	if err != nil {
		return err
	}
	if n := packages.PrintErrors(loaded); n > 0 {
		return fmt.Errorf("%d errors", n)
	}
	fmt.Printf("%d packages have correct types\n", len(loaded))
	return nil
}
