package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// busy is a package with tests that fail at the first try, always, or in a way that is not tried
// again.
const busy = `package busy

import (
	"os"
	"testing"
)

func TestBusy(t *testing.T) {
	t.Run("sub test", func(t *testing.T) {
		if os.Mkdir("tried", 0o755) == nil {
			t.Error("too late")
		}
	})
}

func TestBroken(t *testing.T) {
	if os.Getenv("BROKEN") != "" {
		t.Error("broken")
	}
}

func TestOnce(t *testing.T) {
	t.Attr("second-try", "no")
	if os.Getenv("ONCE") != "" {
		t.Error("too late")
	}
}

func TestPanics(t *testing.T) {
	if os.Getenv("PANICS") != "" {
		panic("boom")
	}
}
`

func TestAgain(t *testing.T) {
	tests := map[string]struct {
		env  string
		good bool
		want []string
		not  string
	}{
		"a test that passes by itself": {
			good: true,
			want: []string{"flaky: busy.TestBusy/sub_test passed at the second try: busy_test.go:11: too late",
				"4 passed, 1 of them at the second try, 0 failed, 0 skipped"},
			not: "problem:",
		},
		"one that fails again": {
			env:  "BROKEN",
			want: []string{"flaky: busy.TestBusy/sub_test", "problem: unit: busy.TestBroken failed: busy_test.go:18: broken"},
			not:  "problem: unit: busy.TestBusy",
		},
		"beside a test that means nothing by itself": {
			env:  "ONCE",
			want: []string{"problem: unit: busy.TestBusy/sub_test", "problem: unit: busy.TestOnce"},
			not:  "flaky:",
		},
		"after a panic": {
			env:  "PANICS",
			want: []string{"problem: unit: busy.TestBusy/sub_test", "problem: unit: busy.TestPanics"},
			not:  "flaky:",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			t.Chdir(dir)
			t.Setenv("GOFLAGS", "-mod=mod")
			if tt.env != "" {
				t.Setenv(tt.env, "yes")
			}
			for path, text := range map[string]string{"go.mod": "module example.com/m\n", "busy/busy_test.go": busy} {
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			var out strings.Builder
			for _, verb := range []string{"run", "again"} {
				err := run(t.Context(), []string{verb, "-out", dir, "-suite", "unit", "go", "test", "-json", "-vet=off", "./..."}, &out)
				if (err == nil) != (verb == "again") {
					t.Fatalf("%s: %v\n%s", verb, err, &out)
				}
			}
			var got strings.Builder
			if err := run(t.Context(), []string{"report", "-out", dir, "unit"}, &got); (err == nil) != tt.good {
				t.Errorf("report: %v", err)
			}
			for _, want := range tt.want {
				if !strings.Contains(got.String(), want) {
					t.Errorf("the report does not say %q", want)
				}
			}
			if strings.Contains(got.String(), tt.not) {
				t.Errorf("the report says %q", tt.not)
			}
			if t.Failed() {
				t.Logf("%s\n%s", &out, &got)
			}
		})
	}
}
