package node

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// execute runs the program with arguments.
func execute(t *testing.T, args ...string) (out string, code int, err error) {
	t.Helper()
	cmd := Command("divvy-node")
	var text bytes.Buffer
	cmd.SetOut(&text)
	cmd.SetArgs(args)
	err = cmd.ExecuteContext(t.Context())
	return text.String(), ExitCode(err), err
}

const ixText = "version: \"4.2.0\"\nflags: {splitboard: true, usevolcano: true}\nsharing: {timeSlicing: {replicas: 4}}\n"

func TestConvertPrintsTheNewFormWithItsWarnings(t *testing.T) {
	file := write(t, "ix-config", ixText)
	out, code, err := execute(t, "config", "convert", file)
	if code != 0 {
		t.Fatal(err)
	}
	warning := "# Warning: " + file + ": flags.usevolcano: volcano chooses no devices here"
	hasAll(t, out, "# Converted from "+file+".\n", warning)
	var rest []string
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, "#") {
			rest = append(rest, line)
		}
	}
	want := head + `resources:
    - name: iluvatar.com/gpu
      vendor: iluvatar
      mode: timeSlicing
      splitBoards: true
      replicas: 4
`
	if diff := cmp.Diff(want, strings.Join(rest, "")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// What was printed is itself a configuration without warnings.
	again := write(t, "node.yaml", out)
	if out, code, err := execute(t, "config", "check", "--strict", again); code != 0 {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestCheckPrintsAllMistakesAndWarnings(t *testing.T) {
	good := write(t, "node.yaml", head)
	warned := write(t, "ix-config", ixText)
	bad := write(t, "bad.yaml", head+"colour: blue\nlogLevel: loud\n")
	tests := map[string]struct {
		args []string
		code int
		want []string
	}{
		"no mistakes": {[]string{good}, 0, []string{"enflame.com/gcu-memory: enflame devices, memory", "no mistakes"}},
		"warnings": {[]string{warned}, 0, []string{"warning: " + warned + ": flags.usevolcano",
			"iluvatar.com/gpu: iluvatar devices, timeSlicing"}},
		"warnings are mistakes":  {[]string{"--strict", warned}, ExitFailure, []string{"flags.usevolcano", "and there are 1"}},
		"mistakes":               {[]string{bad}, ExitFailure, []string{"2 mistakes", `line 3: unknown key "colour"`, `logLevel: "loud"`}},
		"mistakes of one of two": {[]string{good, bad}, ExitFailure, []string{bad + `: line 3: unknown key "colour"`}},
		"no such file":           {[]string{"/nowhere"}, ExitUsage, []string{"/nowhere"}},
		"no file":                {nil, ExitUsage, []string{"name at least one configuration file"}},
		"an unknown flag":        {[]string{"--colour"}, ExitUsage, []string{"--colour"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			out, code, err := execute(t, append([]string{"config", "check"}, tt.args...)...)
			if code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if err != nil {
				out += err.Error()
			}
			hasAll(t, out, tt.want...)
		})
	}
}

func TestCommandsThatThereAreNotAreWrongUse(t *testing.T) {
	for _, args := range [][]string{{"config", "foo"}, {"config", "check"}, {"foo"}, {"config", "check", "--strickt", "x"}} {
		if _, code, err := execute(t, args...); code != ExitUsage {
			t.Errorf("%v: exit code %d, %v", args, code, err)
		}
	}
}

func TestExamplesAreGood(t *testing.T) {
	const folder = "../../../examples/config"
	files, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	examples := 0
	for _, f := range files {
		if filepath.Ext(f.Name()) == ".md" {
			continue
		}
		examples++
		args := []string{"config", "check", "--strict", filepath.Join(folder, f.Name())}
		if f.Name() == "ix-config" || f.Name() == "nvidia-v1.yaml" {
			args = []string{"config", "check", filepath.Join(folder, f.Name())}
		}
		if out, code, err := execute(t, args...); code != 0 {
			t.Errorf("%s: %v\n%s", f.Name(), err, out)
		}
	}
	if examples < 5 {
		t.Errorf("%d examples", examples)
	}
}
