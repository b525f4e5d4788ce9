package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
)

// report prints one line per suite and the sum. The error says how many
// problems there are; each is printed.
func report(dir string, suites []string, out io.Writer) error {
	var (
		problems, slow          []string
		skipped, flaky          []outcome
		tests                   []elapsed
		passed, failed          int
		underRace, races, width = 0, 0, len("suite")
	)
	for _, name := range suites {
		width = max(width, len(name))
	}
	line := func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }
	line("%-*s  %7s  %7s  %7s  %8s  %8s", width, "suite", "passed", "failed", "skipped", "time", "CPU time")
	for _, name := range suites {
		c, err := read(file(dir, name))
		switch {
		case errors.Is(err, os.ErrNotExist):
			line("%-*s  %7s", width, name, "did not run")
			problems = append(problems, name+" did not run")
			continue
		case err != nil:
			return err
		}
		line("%-*s  %7d  %7d  %7d  %8s  %8s", width, name, c.Passed, len(c.Failed), len(c.Skipped),
			seconds(c.Seconds), seconds(c.CPUSeconds))
		passed += c.Passed
		failed += len(c.Failed)
		skipped = append(skipped, c.Skipped...)
		flaky = append(flaky, c.Flaky...)
		for _, one := range c.Tests {
			tests = append(tests, elapsed{name + ": " + one.Name, one.Seconds})
		}
		if c.Race {
			underRace += c.ran()
			races += c.Races
		}
		for _, f := range c.Failed {
			problems = append(problems, fmt.Sprintf("%s: %s failed: %s", name, f.Name, shorten(f.Text)))
		}
		if limit := c.limit(); limit > 0 && c.Longest.Seconds > nearLimit*limit.Seconds() {
			slow = append(slow, fmt.Sprintf("%s: %s took %s of its limit of %s; raise -timeout, or split the package",
				name, c.Longest.Name, seconds(c.Longest.Seconds), limit))
		}
		if c.Error != "" {
			problems = append(problems, fmt.Sprintf("%s: %s: %s", name, strings.Join(c.Command, " "), c.Error))
		}
		if c.ran() == 0 {
			problems = append(problems, name+" ran no test")
		}
	}
	line("race detector: watched %d of these tests, reported %d races", underRace, races)
	slices.SortStableFunc(tests, func(a, b elapsed) int { return cmp.Compare(b.Seconds, a.Seconds) })
	for _, one := range tests[:min(slowest, len(tests))] {
		line("%8s  %s", seconds(one.Seconds), one.Name)
	}
	for _, s := range skipped {
		line("skipped: %s: %s", s.Name, s.Text)
	}
	for _, f := range flaky {
		line("flaky: %s passed at the second try: %s", f.Name, shorten(f.Text))
	}
	for _, s := range slow {
		line("slow: %s", s)
	}
	for _, p := range problems {
		line("problem: %s", p)
	}
	line("%d passed, %d of them at the second try, %d failed, %d skipped", passed, len(flaky), failed, len(skipped))
	if len(problems) > 0 {
		return fmt.Errorf("%d problems", len(problems))
	}
	return nil
}

// slowest is how many of the tests that took longest are named.
const slowest = 10

// nearLimit is the part of its limit above which a package is reported as slow: on a
// busier machine the go command would end it.
const nearLimit = 2.0 / 3

// limit is the go command's -timeout, which holds for each package; 0 without one.
func (c counts) limit() time.Duration {
	i := slices.Index(c.Command, "-timeout")
	if i < 0 || i+1 == len(c.Command) {
		return 0
	}
	limit, err := time.ParseDuration(c.Command[i+1])
	if err != nil {
		return 0
	}
	return limit
}

func seconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second)).Round(time.Second)
}

func read(path string) (counts, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return counts{}, fmt.Errorf("read the counts: %w", err)
	}
	var c counts
	if err := json.Unmarshal(data, &c); err != nil {
		return counts{}, fmt.Errorf("read the counts in %s: %w", path, err)
	}
	return c, nil
}

// reported is how the testing package starts what a test said itself.
var reported = regexp.MustCompile(`^\w+_test\.go:\d+: `)

// crashed starts the line that says why a program ended itself.
var crashed = regexp.MustCompile(`^(panic|fatal error): `)

// summary is what the go command and the testing package say of any test that
// ends in that way.
var summary = regexp.MustCompile(`^(--- FAIL|FAIL\b|PASS$|exit status \d+$)`)

// saidLines is how many lines of what a test said stand beside its name in the report: a log may
// come before what failed, and logs of programs come after it.
const saidLines = 4

// shorten takes from what a failed test printed what stands beside its name; more
// was printed when it failed. It is what the test itself said first, else why it crashed,
// else the last that is more than a word on how it ended.
func shorten(text string) string {
	last, crash := "no output", ""
	if said := reasons(text); len(said) > 0 {
		return strings.Join(said[:min(len(said), saidLines)], " | ")
	}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if crash == "" && crashed.MatchString(line) {
			crash = line
		}
		if line != "" && (!summary.MatchString(line) || last == "no output") {
			last = line
		}
	}
	return cmp.Or(crash, last)
}
