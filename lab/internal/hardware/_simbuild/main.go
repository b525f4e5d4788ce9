// Command simbuild compiles the stand-in for Enflame's library and checks a
// topology file. It is part of the product's module, whose simulated hardware
// is internal to it, and only lies here: package hardware runs it there.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/internal/vendorsim"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("want a folder and a topology file, got %d arguments", len(args))
	}
	if _, err := vendorsim.Read(args[1]); err != nil {
		return fmt.Errorf("topology: %w", err)
	}
	_, err := vendorsim.Build(context.Background(), args[0])
	return err
}
