package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// event is one line of `go test -json`; see `go doc test2json`.
type event struct {
	Action     string
	Package    string
	Test       string
	ImportPath string // of build-output and build-fail, in place of Package
	Elapsed    float64
	Output     string
	Key, Value string // of attr
}

// counts is what became of the tests of one suite. Tests that have subtests are
// not counted themselves, their subtests are.
type counts struct {
	Suite string `json:"suite"`
	// Command is what ran.
	Command []string `json:"command"`
	// Error says that the command itself failed, "" otherwise.
	Error string `json:"error,omitempty"`
	// Seconds is how long the command took.
	Seconds float64 `json:"seconds"`
	// CPUSeconds is how much processor time it took, without daemons that it left running. Two
	// suites of one command share it.
	CPUSeconds float64 `json:"cpuSeconds"`
	Passed     int     `json:"passed"`
	// Failed and Skipped name tests and say why.
	Failed  []outcome `json:"failed"`
	Skipped []outcome `json:"skipped"`
	// Flaky are those of Passed that failed at first and passed when they ran again by themselves.
	Flaky []outcome `json:"flaky,omitempty"`
	// Race is true when the race detector was on, and Races is how often it
	// reported.
	Race  bool `json:"race"`
	Races int  `json:"races"`
	// Longest is the package that took longest.
	Longest elapsed `json:"longest"`
	// Tests is how long each test took, without its subtests' own entries.
	Tests []elapsed `json:"tests"`
}

// elapsed is how many seconds a package or a test took.
type elapsed struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
}

// ran is how many tests ran to an end, good or bad.
func (c counts) ran() int { return c.Passed + len(c.Failed) }

// outcome is a test that did not pass.
type outcome struct {
	Name string `json:"name"`
	Text string `json:"text"`
	// Test is what to run for a second try; empty where the test did not finish, or a package failed
	// as a whole.
	Test testName `json:"test,omitzero"`
}

// testName is a test, not one of its subtests, and the path of its package.
type testName struct {
	Package string `json:"package"`
	Name    string `json:"name"`
}

// recorder turns events into counts and prints what a person wants to see
// meanwhile: a line per package, and the output of what failed.
type recorder struct {
	out io.Writer
	// module is cut off package names.
	module string

	tests map[key]*test
	// packages maps import paths to the output outside of tests.
	packages map[string]*strings.Builder
	// broken names packages that failed as a whole.
	broken  map[string]bool
	races   int
	longest elapsed
}

type key struct{ pkg, name string }

type test struct {
	action string // pass, fail, skip, or "" while it runs
	parent bool   // it has subtests
	output strings.Builder
	once   bool // it is not tried again
	// seconds is how long it took.
	seconds float64
}

func newRecorder(out io.Writer, module string) *recorder {
	return &recorder{
		out: out, module: module, tests: map[key]*test{}, packages: map[string]*strings.Builder{}, broken: map[string]bool{},
	}
}

// maxLine bounds one line of JSON; a test's output comes line by line.
const maxLine = 16 << 20

// read handles all lines of r. Lines that are not JSON are printed as they are.
func (r *recorder) read(in io.Reader) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		var e event
		if line := bytes.TrimSpace(lines.Bytes()); len(line) == 0 || line[0] != '{' || json.Unmarshal(line, &e) != nil {
			fmt.Fprintln(r.out, lines.Text())
			continue
		}
		r.handle(e)
	}
	return lines.Err()
}

func (r *recorder) handle(e event) {
	if e.Action == "output" && strings.Contains(e.Output, "WARNING: DATA RACE") {
		r.races++
	}
	switch {
	case e.Action == "build-output":
		fmt.Fprint(r.out, e.Output)
	case e.Package == "":
		// build-fail: the package's own fail follows.
	case e.Test == "":
		r.handlePackage(e)
	default:
		r.handleTest(e)
	}
}

func (r *recorder) handlePackage(e event) {
	log, ok := r.packages[e.Package]
	if !ok {
		log = &strings.Builder{}
		r.packages[e.Package] = log
	}
	switch e.Action {
	case "output":
		log.WriteString(e.Output)
	case "pass", "fail":
		if e.Action == "fail" {
			r.broken[e.Package] = true
		}
		if e.Elapsed > r.longest.Seconds {
			r.longest = elapsed{r.short(e.Package), e.Elapsed}
		}
		n := r.count(e.Package)
		if n == 0 && e.Action == "pass" {
			return // A package without tests has nothing to say.
		}
		fmt.Fprintf(r.out, "%-5s %-50s %5d tests %8.1fs\n", strings.ToUpper(e.Action), r.short(e.Package), n, e.Elapsed)
		if e.Action == "fail" {
			r.printFailures(e.Package, log.String())
		}
	}
}

func (r *recorder) handleTest(e event) {
	k := key{e.Package, e.Test}
	t, ok := r.tests[k]
	if !ok {
		t = &test{}
		r.tests[k] = t
		if i := strings.LastIndexByte(e.Test, '/'); i >= 0 {
			// Subtest names may hold slashes of their own; every prefix that is
			// a test is a parent.
			for ; i >= 0; i = strings.LastIndexByte(e.Test[:i], '/') {
				if p, ok := r.tests[key{e.Package, e.Test[:i]}]; ok {
					p.parent = true
				}
			}
		}
	}
	switch e.Action {
	case "output":
		t.output.WriteString(e.Output)
	case "attr":
		t.once = t.once || e.Key == attrSecondTry && e.Value == "no"
	case "pass", "fail", "skip":
		t.action, t.seconds = e.Action, e.Elapsed
		if e.Action == "pass" {
			t.output.Reset() // Long runs print a lot that nobody reads.
		}
	}
}

// count returns how many tests of a package are done.
func (r *recorder) count(pkg string) int {
	n := 0
	for k, t := range r.tests {
		if k.pkg == pkg && !t.parent && t.action != "skip" {
			n++
		}
	}
	return n
}

// How many lines are shown of what was printed: readers of a long log see what
// follows a FAIL first, and what ended a run is at the end of its output.
const (
	packageLines = 25
	testLines    = 200
)

// How much of what a test that failed said stands beside its name, in lines and bytes.
const (
	reasonLines  = 8
	reasonLength = 300
)

// printFailures prints the names of the tests that failed and why, what they printed,
// and how the package's own output ends.
func (r *recorder) printFailures(pkg, log string) {
	var inner, outer []key
	for _, k := range r.sorted() {
		switch t := r.tests[k]; {
		case k.pkg != pkg || t.action == "pass" || t.action == "skip":
		case t.parent && r.failedBelow(k):
			outer = append(outer, k)
		default:
			inner = append(inner, k)
			what := "failed"
			if t.action == "" {
				what = "did not finish"
			}
			fmt.Fprintf(r.out, "    %s: %s\n", what, k.name)
			// What the test said may be far above what is shown of its output below.
			for _, reason := range reasons(t.output.String()) {
				fmt.Fprintf(r.out, "        %s\n", reason)
			}
		}
	}
	for _, k := range append(inner, outer...) {
		fmt.Fprint(r.out, indent(lastLines(r.tests[k].output.String(), testLines)))
	}
	fmt.Fprint(r.out, indent(lastLines(log, packageLines)))
}

// reasons returns the first lines that a test itself said, cut off where they are long.
func reasons(text string) []string {
	var said []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); reported.MatchString(line) && len(said) < reasonLines {
			said = append(said, strings.ToValidUTF8(line[:min(len(line), reasonLength)], ""))
		}
	}
	return said
}

// lastLines returns the last n lines of a text, after one that says how many
// others there are.
func lastLines(text string, n int) string {
	lines := slices.Collect(strings.Lines(text))
	if len(lines) <= n {
		return text
	}
	return fmt.Sprintf("(%d lines left out)\n", len(lines)-n) + strings.Join(lines[len(lines)-n:], "")
}

// split returns the counts of the tests, and those of fuzz targets when they
// are wanted apart.
func (r *recorder) split(apart bool) (tests, seeds counts) {
	blamed := map[string]bool{} // packages with a test that explains the failure
	for _, k := range r.sorted() {
		c := &tests
		if apart && strings.HasPrefix(k.name, "Fuzz") {
			c = &seeds
		}
		t := r.tests[k]
		name := r.short(k.pkg) + "." + k.name
		if t.seconds > 0 && !strings.Contains(k.name, "/") {
			c.Tests = append(c.Tests, elapsed{name, t.seconds})
		}
		switch {
		case t.action == "" && !(t.parent && r.failedBelow(k)):
			blamed[k.pkg] = true
			c.Failed = append(c.Failed, outcome{Name: name, Text: "did not finish"})
		case t.action == "fail" && !(t.parent && r.failedBelow(k)):
			blamed[k.pkg] = true
			c.Failed = append(c.Failed, failure(name, k, t))
		case t.action == "skip":
			c.Skipped = append(c.Skipped, outcome{Name: name, Text: skipReason(t.output.String())})
		case t.action == "pass" && !t.parent:
			c.Passed++
		}
	}
	for _, pkg := range slices.Sorted(maps.Keys(r.broken)) {
		if !blamed[pkg] {
			text := strings.TrimSpace(r.packages[pkg].String())
			tests.Failed = append(tests.Failed, outcome{Name: r.short(pkg), Text: text})
		}
	}
	tests.Races, tests.Longest = r.races, r.longest
	return tests, seeds
}

// attrSecondTry is the attribute by which a test says that it means nothing by itself, with the
// value "no".
const attrSecondTry = "second-try"

// failure describes a test that failed. After a panic, other tests of the package did not run, so
// there is nothing to try again.
func failure(name string, k key, t *test) outcome {
	text := t.output.String()
	o := outcome{Name: name, Text: strings.TrimSpace(text)}
	if !t.once && !slices.ContainsFunc(strings.Split(text, "\n"), crashed.MatchString) {
		o.Test.Package = k.pkg
		o.Test.Name, _, _ = strings.Cut(k.name, "/")
	}
	return o
}

// failedBelow reports whether a subtest of k failed or did not finish, which
// then explains why k did not pass.
func (r *recorder) failedBelow(k key) bool {
	for sub, t := range r.tests {
		if sub.pkg == k.pkg && strings.HasPrefix(sub.name, k.name+"/") && (t.action == "fail" || t.action == "") {
			return true
		}
	}
	return false
}

func (r *recorder) sorted() []key {
	return slices.SortedFunc(maps.Keys(r.tests), func(a, b key) int {
		return strings.Compare(a.pkg+"\x00"+a.name, b.pkg+"\x00"+b.name)
	})
}

func (r *recorder) short(pkg string) string {
	if pkg == r.module {
		return "."
	}
	return strings.TrimPrefix(pkg, r.module+"/")
}

// skipReason finds what a test said when it skipped itself.
func skipReason(output string) string {
	reason := "no reason given"
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "=== ") || strings.HasPrefix(line, "--- ") {
			continue
		}
		// file_test.go:12: reason
		if _, after, ok := strings.Cut(line, ".go:"); ok {
			if _, text, ok := strings.Cut(after, ": "); ok {
				line = text
			}
		}
		reason = line
	}
	return reason
}

func indent(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString("    " + line)
	}
	if text != "" && !strings.HasSuffix(text, "\n") {
		b.WriteByte('\n')
	}
	return b.String()
}
