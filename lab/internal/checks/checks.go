// Package checks compares what a show found with what was wanted, prints a line
// for each comparison, and keeps count.
package checks

import (
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
)

// Checks counts what was compared and remembers what differed.
type Checks struct {
	// Out receives the lines.
	Out io.Writer

	made   int
	failed []string
}

// Equal compares, and prints a line that says what was checked.
func (c *Checks) Equal(what string, got, want any) {
	if reflect.DeepEqual(got, want) {
		c.ok(fmt.Sprintf("%s: %v", what, got))
		return
	}
	c.fail(fmt.Sprintf("%s: wanted %v, got %v", what, want, got))
}

// Contains checks that a text has another in it.
func (c *Checks) Contains(what, got, want string) {
	if strings.Contains(got, want) {
		c.ok(fmt.Sprintf("%s says: %s", what, want))
		return
	}
	c.fail(fmt.Sprintf("%s: wanted %q in it, got %q", what, want, got))
}

// True checks a condition; detail says what was found.
func (c *Checks) True(what string, ok bool, detail string) {
	if ok {
		c.ok(what + ": " + detail)
		return
	}
	c.fail(what + ": wanted otherwise, got " + detail)
}

// NoError checks that something went well.
func (c *Checks) NoError(what string, err error) {
	if err == nil {
		c.ok(what)
		return
	}
	c.fail(fmt.Sprintf("%s: %v", what, err))
}

func (c *Checks) ok(text string) {
	c.made++
	fmt.Fprintf(c.Out, "  ok  %s\n", text)
}

func (c *Checks) fail(text string) {
	c.made++
	c.failed = append(c.failed, text)
	fmt.Fprintf(c.Out, "  DIFFERS  %s\n", text)
}

// Made is how many comparisons were made.
func (c *Checks) Made() int { return c.made }

// Failed is how many of them differed.
func (c *Checks) Failed() int { return len(c.failed) }

// Err lists what differed; nil for nothing.
func (c *Checks) Err() error {
	if len(c.failed) == 0 {
		return nil
	}
	return errors.New("differences:\n  " + strings.Join(c.failed, "\n  "))
}
