// Package checks compares what a show found with what was wanted, prints a line
// for each comparison, and keeps count.
package checks

import (
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
)

// Checks counts what was compared and remembers what differed.
type Checks struct {
	// Out receives the lines.
	Out io.Writer

	results []Result
}

// Result is the outcome of one comparison.
type Result struct {
	// OK is false for a difference.
	OK bool
	// Text says what was checked and found.
	Text string
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
	c.results = append(c.results, Result{OK: true, Text: text})
	fmt.Fprintf(c.Out, "  ok  %s\n", text)
}

func (c *Checks) fail(text string) {
	c.results = append(c.results, Result{Text: text})
	fmt.Fprintf(c.Out, "  DIFFERS  %s\n", text)
}

// Made is how many comparisons were made.
func (c *Checks) Made() int { return len(c.results) }

// Failed is how many of them differed.
func (c *Checks) Failed() int { return len(c.differences()) }

// Results are the outcomes, in the order of the comparisons.
func (c *Checks) Results() []Result { return slices.Clone(c.results) }

func (c *Checks) differences() (texts []string) {
	for _, r := range c.results {
		if !r.OK {
			texts = append(texts, r.Text)
		}
	}
	return texts
}

// Err lists what differed; nil for nothing.
func (c *Checks) Err() error {
	differences := c.differences()
	if len(differences) == 0 {
		return nil
	}
	return errors.New("differences:\n  " + strings.Join(differences, "\n  "))
}
