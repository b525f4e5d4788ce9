package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// stream makes the lines of `go test -json` from short ones: action, test and
// output, apart by "|".
func stream(lines ...string) string {
	var b strings.Builder
	for _, l := range lines {
		f := strings.SplitN(l, "|", 3)
		b.WriteString(`{"Action":"` + f[0] + `","Package":"example.com/m/p"`)
		if f[1] != "" {
			b.WriteString(`,"Test":"` + f[1] + `"`)
		}
		if len(f) > 2 {
			b.WriteString(`,"Output":"` + f[2] + `\n"`)
		}
		b.WriteString("}\n")
	}
	return b.String()
}

func TestCounts(t *testing.T) {
	tests := map[string]struct {
		in    string
		want  counts
		seeds counts
	}{
		"subtests are counted, not their parent": {
			in:   stream("run|TestA", "run|TestA/x", "run|TestA/y", "pass|TestA/x", "pass|TestA/y", "pass|TestA", "pass|"),
			want: counts{Passed: 2},
		},
		"a subtest whose name holds a slash": {
			in:   stream("run|TestA", "run|TestA/x/y", "pass|TestA/x/y", "pass|TestA", "pass|"),
			want: counts{Passed: 1},
		},
		"a failed subtest is one failure": {
			in:   stream("run|TestA", "run|TestA/x", "output|TestA/x|boom", "fail|TestA/x", "fail|TestA", "fail|"),
			want: counts{Failed: []outcome{{"p.TestA/x", "boom", testName{"example.com/m/p", "TestA"}}}},
		},
		"a parent that fails by itself is a failure": {
			in:   stream("run|TestA", "run|TestA/x", "pass|TestA/x", "output|TestA|leaked", "fail|TestA", "fail|"),
			want: counts{Passed: 1, Failed: []outcome{{"p.TestA", "leaked", testName{"example.com/m/p", "TestA"}}}},
		},
		"skips keep their reason": {
			in: stream("run|TestA", "output|TestA|=== RUN   TestA", "output|TestA|    a_test.go:7: needs a card: none here",
				"output|TestA|--- SKIP: TestA (0.00s)", "skip|TestA", "pass|"),
			want: counts{Skipped: []outcome{{Name: "p.TestA", Text: "needs a card: none here"}}},
		},
		"fuzz seeds are counted apart": {
			in: stream("run|TestA", "pass|TestA", "run|FuzzA", "run|FuzzA/seed#0", "run|FuzzA/seed#1", "pass|FuzzA/seed#0",
				"pass|FuzzA/seed#1", "pass|FuzzA", "pass|"),
			want:  counts{Passed: 1},
			seeds: counts{Passed: 2},
		},
		"a package that does not build is a failure": {
			in: `{"ImportPath":"example.com/m/p","Action":"build-output","Output":"x.go:1: bad\n"}` + "\n" +
				stream("output||FAIL [build failed]", "fail|"),
			want: counts{Failed: []outcome{{Name: "p", Text: "FAIL [build failed]"}}},
		},
		"a test that never ended is a failure": {
			in:   stream("run|TestA", "output|TestA|panic: test timed out", "fail|"),
			want: counts{Failed: []outcome{{Name: "p.TestA", Text: "did not finish"}}},
		},
		"after a panic there is no second try": {
			in:   stream("run|TestA", "output|TestA|panic: boom [recovered]", "fail|TestA", "fail|"),
			want: counts{Failed: []outcome{{Name: "p.TestA", Text: "panic: boom [recovered]"}}},
		},
		"races are counted": {
			in:   stream("run|TestA", "output|TestA|WARNING: DATA RACE", "fail|TestA", "fail|"),
			want: counts{Failed: []outcome{{"p.TestA", "WARNING: DATA RACE", testName{"example.com/m/p", "TestA"}}}, Races: 1},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			r := newRecorder(&strings.Builder{}, "example.com/m")
			if err := r.read(strings.NewReader(tt.in)); err != nil {
				t.Fatal(err)
			}
			got, seeds := r.split(true)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("tests (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.seeds, seeds); diff != "" {
				t.Errorf("seeds (-want +got):\n%s", diff)
			}
		})
	}
}

func TestPrintFailures(t *testing.T) {
	long := func(test string, n int) []string {
		var lines []string
		for i := range n {
			lines = append(lines, fmt.Sprintf("output|%s|line %d.", test, i+1))
		}
		return lines
	}
	tests := map[string]struct {
		in    []string
		want  []string // in this order
		first string   // the line after FAIL
		not   []string
	}{
		"a package that fails after its tests passed": {
			in: slices.Concat(long("", 200), []string{"run|TestA", "pass|TestA", "output||e2e: a mount is left",
				"output||exit status 1", "output||FAIL", "fail|"}),
			first: "    (178 lines left out)",
			want:  []string{"line 179.", "line 200.", "e2e: a mount is left", "exit status 1"},
			not:   []string{"line 178.", "failed:"},
		},
		"names before output": {
			in: slices.Concat([]string{"run|TestA", "run|TestA/x", "run|TestB", "run|TestC", "pass|TestC", "output|TestA|outer",
				"output|TestA/x|inner",
				"fail|TestA/x", "fail|TestA"}, long("TestB", 300), long("", 30), []string{"output||FAIL", "fail|"}),
			first: "    failed: TestA/x",
			want: []string{"did not finish: TestB", "inner", "(100 lines left out)", "line 101.", "line 300.",
				"outer", "(6 lines left out)", "line 7."},
			not: []string{"failed: TestA\n", "TestC", "line 100."},
		},
		"the reason beside the name": {
			in: slices.Concat([]string{"run|TestA", "output|TestA|    a_test.go:12: want 1, got 2",
				"output|TestA|    a_test.go:14: and " + strings.Repeat("x", 2000)}, long("TestA", 300),
				[]string{"fail|TestA", "output||FAIL", "fail|"}),
			first: "    failed: TestA",
			want:  []string{"a_test.go:12: want 1, got 2", "a_test.go:14: and " + strings.Repeat("x", 282) + "\n", "lines left out"},
		},
		"a short log as a whole": {
			in:    []string{"run|TestA", "fail|TestA", "output||FAIL", "fail|"},
			first: "    failed: TestA",
			not:   []string{"left out"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			if err := newRecorder(&out, "example.com/m").read(strings.NewReader(stream(tt.in...))); err != nil {
				t.Fatal(err)
			}
			head, rest, _ := strings.Cut(out.String(), "\n")
			if !strings.HasPrefix(head, "FAIL  p ") || !strings.HasPrefix(rest, tt.first+"\n") {
				t.Errorf("begins with\n%s\n%.100s\nwant FAIL and\n%s", head, rest, tt.first)
			}
			for _, n := range tt.not {
				if strings.Contains(rest, n) {
					t.Errorf("holds %q", n)
				}
			}
			for _, w := range tt.want {
				_, after, ok := strings.Cut(rest, w)
				if !ok {
					t.Fatalf("lacks %q, or has it too early:\n%s", w, out.String())
				}
				rest = after
			}
		})
	}
}

func TestRunAndReport(t *testing.T) {
	dir := t.TempDir()
	input := filepath.Join(dir, "stream")
	write := func(lines ...string) {
		t.Helper()
		if err := os.WriteFile(input, []byte(stream(lines...)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	testsum := func(args ...string) (string, error) {
		t.Helper()
		var out strings.Builder
		err := run(t.Context(), args, &out)
		return out.String(), err
	}

	write("run|TestA", "pass|TestA", "run|FuzzB", "run|FuzzB/seed#0", "pass|FuzzB/seed#0", "pass|FuzzB", "pass|")
	if out, err := testsum("run", "-out", dir, "-suite", "unit", "-seeds", "seeds", "cat", input); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := testsum("report", "-out", dir, "unit", "seeds")
	if err != nil || !strings.HasSuffix(out, "\n2 passed, 0 of them at the second try, 0 failed, 0 skipped\n") {
		t.Errorf("report of two good suites: %v\n%s", err, out)
	}

	out, err = testsum("report", "-out", dir, "unit", "absent")
	if err == nil || !strings.Contains(out, "problem: absent did not run") {
		t.Errorf("report with a suite that did not run: %v\n%s", err, out)
	}

	if err := os.WriteFile(input, []byte(stream("run|TestQuick", "run|TestSlow", "run|TestSlow/x", "pass|TestSlow/x")+
		`{"Action":"pass","Package":"example.com/m/p","Test":"TestQuick","Elapsed":2.1}`+"\n"+
		`{"Action":"pass","Package":"example.com/m/p","Test":"TestSlow","Elapsed":61}`+"\n"+stream("pass|")), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := testsum("run", "-out", dir, "-suite", "took", "cat", input); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if out, err = testsum("report", "-out", dir, "took"); err != nil ||
		!strings.Contains(out, "\n    1m1s  took: example.com/m/p.TestSlow\n      2s  took: example.com/m/p.TestQuick\n") {
		t.Errorf("report of tests that took long: %v\n%s", err, out)
	}

	write("run|TestA", "skip|TestA", "pass|")
	if out, err := testsum("run", "-out", dir, "-suite", "empty", "cat", input); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err = testsum("report", "-out", dir, "unit", "empty")
	if err == nil || !strings.Contains(out, "problem: empty ran no test") || !strings.Contains(out, "skipped: ") {
		t.Errorf("report with a suite in which all was skipped: %v\n%s", err, out)
	}

	for limit, want := range map[string]string{
		"10m":  "\nslow: timed: example.com/m/p took 7m0s of its limit of 10m0s",
		"11m":  "",
		"none": "",
	} {
		passed := `{"Action":"pass","Package":"example.com/m/p","Elapsed":420}` + "\n"
		if err := os.WriteFile(input, []byte(stream("run|TestA", "pass|TestA")+passed), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := testsum("run", "-out", dir, "-suite", "timed", "sh", "-c", "cat "+input, "-timeout", limit); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		out, err := testsum("report", "-out", dir, "timed")
		if err != nil || !strings.Contains(out, want) || strings.Contains(out, "slow: ") != (want != "") {
			t.Errorf("report of a package that took 7 minutes with a limit of %s: %v\n%s", limit, err, out)
		}
	}

	if out, err := testsum("run", "-out", dir, "-suite", "crashed", "false"); err == nil {
		t.Errorf("a command that fails: no error\n%s", out)
	}
	out, err = testsum("report", "-out", dir, "crashed")
	if err == nil || !strings.Contains(out, "exit status 1") {
		t.Errorf("report of a command that failed without a test: %v\n%s", err, out)
	}
}

func TestShorten(t *testing.T) {
	tests := map[string]struct{ in, want string }{
		"what the test said, not what a program logged": {
			in: "=== RUN   TestA\nI1120 starting\n    a_test.go:12: want 1, got 2\n    a_test.go:13: and more\nI1120 stopping\n--- " +
				"FAIL: TestA (0.1s)\n",
			want: "a_test.go:12: want 1, got 2 | a_test.go:13: and more",
		},
		"a panic": {in: "panic: no\n\ngoroutine 1\nFAIL\texample.com/m 0.1s\n", want: "panic: no"},
		"what the program said last, not how it ended": {
			in:   "PASS\nTaking the lab down.\ne2e: a mount is left\nexit status 1\nFAIL\texample.com/m 0.1s\n",
			want: "e2e: a mount is left",
		},
		"no more than FAIL": {in: "FAIL\texample.com/m [build failed]\n", want: "FAIL\texample.com/m [build failed]"},
		"nothing":           {want: "no output"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := shorten(tt.in); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
