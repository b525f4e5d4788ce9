package node

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
)

const head = "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\n"

// write puts a file into a folder of its own.
func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// hasAll fails the test for each part that the text lacks.
func hasAll(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("missing %q in:\n%s", p, text)
		}
	}
}

func TestRunRefusesBadSettings(t *testing.T) {
	broken := write(t, "node.yaml", head+"colour: blue\nresources:\n- {name: enflame.com/gcu-memory, vendor: acme, memoryUnit: \"3\"}\n")
	tests := map[string]struct {
		options Options
		want    []string
	}{
		"no node name": {Options{}, []string{"--node-name", "NODE_NAME"}},
		"no such file": {Options{NodeName: "n", Places: nodeconfig.Places{Files: []string{"/nowhere/node.yaml"}}},
			[]string{"/nowhere/node.yaml"}},
		"all mistakes of a file": {
			Options{NodeName: "n", Places: nodeconfig.Places{Files: []string{broken}}},
			[]string{broken, "3 mistakes", `line 3: unknown key "colour"`, `vendor: "acme" is not known; use one of enflame`,
				`memoryUnit: "3"`},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := Run(t.Context(), tt.options)
			if err == nil {
				t.Fatal("accepted")
			}
			hasAll(t, err.Error(), tt.want...)
			if ExitCode(err) == 0 {
				t.Error("the exit code says that all is well")
			}
		})
	}
}

func TestVersion(t *testing.T) {
	cmd := Command("divvy-node")
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--version"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(out.String(), "divvy-node ") {
		t.Errorf("--version prints %q", out.String())
	}
}
