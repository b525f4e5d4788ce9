package doctor

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares with a file in testdata, or writes it.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

// ill is an installation with faults of all severities.
func ill(t *testing.T) *world {
	t.Helper()
	w := healthy(t)
	w.Objects.Secrets[0].Data["key"] = []byte("short")
	w.Nodes[0].Labels[enabledLabel] = "yes"
	w.Waiting = []Waits{{Namespace: "team", Name: "train", Code: "noDeviceFits", Problem: "no device has 20 units free",
		Change: "uncordon node-b", Commands: []string{"kubectl uncordon node-b"}}}
	w.Failed[SourceReviews] = "needs create of subjectaccessreviews"
	return w
}

func printed(t *testing.T, r Report, format Format, verbose bool) string {
	t.Helper()
	var b strings.Builder
	if err := Print(&b, r, format, verbose); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestPrint(t *testing.T) {
	report := Examine(ill(t).Snapshot)
	golden(t, "ill.txt", printed(t, report, Text, false))
	golden(t, "ill-verbose.txt", printed(t, report, Text, true))
	golden(t, "ill.json", printed(t, report, JSON, false))
	golden(t, "well.txt", printed(t, Examine(healthy(t).Snapshot), Text, false))
	golden(t, "none.txt", printed(t, Examine(&Snapshot{Tool: "v0.1.0", Kubernetes: "v1.37.0"}), Text, false))

	var fromJSON, fromYAML Report
	if err := json.Unmarshal([]byte(printed(t, report, JSON, false)), &fromJSON); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal([]byte(printed(t, report, YAML, false)), &fromYAML); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(fromJSON, fromYAML); diff != "" {
		t.Errorf("JSON and YAML differ (-JSON +YAML):\n%s", diff)
	}
}

// Commands name the cluster that was examined.
func TestAt(t *testing.T) {
	commands := []string{
		"helm get manifest divvy -n x | kubectl apply -f -", "kubectl label node helm a-", "kubectl annotate node kubectl x-",
	}
	report := Report{Results: []Result{{Findings: []Finding{{Commands: commands}}}}}
	got := report.At("of $1", "/home/a b").Findings()[0].Commands
	want := []string{
		"helm --kubeconfig='/home/a b' --kube-context='of $1' get manifest divvy -n x | kubectl --kubeconfig='/home/a b' --context='of " +
			"$1' apply -f -",
		"kubectl --kubeconfig='/home/a b' --context='of $1' label node helm a-",
		"kubectl --kubeconfig='/home/a b' --context='of $1' annotate node kubectl x-",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(commands, report.At("", "").Findings()[0].Commands); diff != "" {
		t.Errorf("without flags (-want +got):\n%s", diff)
	}
	if report.Results[0].Findings[0].Commands[1] != "kubectl label node helm a-" {
		t.Error("the report itself was changed")
	}
}

func TestParseFormat(t *testing.T) {
	for _, name := range []string{"text", "json", "yaml"} {
		if f, err := ParseFormat(name); err != nil || string(f) != name {
			t.Errorf("%s: %s, %v", name, f, err)
		}
	}
	if _, err := ParseFormat("xml"); err == nil || !strings.Contains(err.Error(), `"xml": must be text, json or yaml`) {
		t.Errorf("error %v", err)
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestPrintTellsFailures(t *testing.T) {
	if err := Print(full{}, Report{}, Text, false); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("error %v", err)
	}
}
