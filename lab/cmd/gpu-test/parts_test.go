package main

import (
	"fmt"
	"os"
	"testing"
)

// TestMain lets the test's program do the parts, as the program does.
func TestMain(m *testing.M) {
	if isPart, err := runPart(os.Args[1:]); isPart {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(exitFailed)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}
