package main

import (
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
)

// checks counts what was compared and remembers what differed.
type checks struct {
	made   int
	failed []string
}

// equal compares, and prints a line that says what was checked.
func (c *checks) equal(out io.Writer, what string, got, want any) {
	c.made++
	if reflect.DeepEqual(got, want) {
		fmt.Fprintf(out, "  ok  %s: %v\n", what, got)
		return
	}
	c.fail(out, fmt.Sprintf("%s: wanted %v, got %v", what, want, got))
}

// contains checks that a text has another in it.
func (c *checks) contains(out io.Writer, what, got, want string) {
	c.made++
	if strings.Contains(got, want) {
		fmt.Fprintf(out, "  ok  %s says: %s\n", what, want)
		return
	}
	c.fail(out, fmt.Sprintf("%s: wanted %q in it, got %q", what, want, got))
}

func (c *checks) fail(out io.Writer, text string) {
	c.failed = append(c.failed, text)
	fmt.Fprintf(out, "  DIFFERS  %s\n", text)
}

// verdict says in one line what was checked.
func (c *checks) verdict() string {
	const what = "cards that the pods see, events, and inspect's books over two units of memory"
	if len(c.failed) == 0 {
		return fmt.Sprintf("demo: %d checks of %s: all are as the guide says", c.made, what)
	}
	return fmt.Sprintf("demo: %d checks of %s: %d DIFFER", c.made, what, len(c.failed))
}

// err lists what differed; nil for nothing.
func (c *checks) err() error {
	if len(c.failed) == 0 {
		return nil
	}
	return errors.New("differences:\n  " + strings.Join(c.failed, "\n  "))
}
