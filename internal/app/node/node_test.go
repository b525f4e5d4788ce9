package node

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

func TestRunRefusesBadSettings(t *testing.T) {
	broken := filepath.Join(t.TempDir(), "node.yaml")
	text := "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\ncolour: blue\nresources:\n- {name: enflame.com/gcu-memory, vendor: acme, memoryUnit: \"3\"}\n"
	if err := os.WriteFile(broken, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		options Options
		want    []string
	}{
		"no node name": {Options{}, []string{"--node-name", "NODE_NAME"}},
		"no such file": {Options{NodeName: "n", ConfigFile: "/nowhere/node.yaml"}, []string{"/nowhere/node.yaml"}},
		"all mistakes of a file": {
			Options{NodeName: "n", ConfigFile: broken},
			[]string{broken, "3 mistakes", `line 3: unknown key "colour"`, `vendor: "acme" is not known; use one of enflame`, `memoryUnit: "3"`},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := Run(t.Context(), tt.options)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("missing %q in: %v", w, err)
				}
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

func TestClaimLetsOneDaemonRun(t *testing.T) {
	dir := t.TempDir()
	release, err := claim(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := claim(short, dir); err == nil || !strings.Contains(err.Error(), "another divvy-node runs on this node") {
		t.Errorf("a second daemon: %v", err)
	}
	second := make(chan error, 1)
	go func() {
		done, err := claim(t.Context(), dir)
		if err == nil {
			done()
		}
		second <- err
	}()
	release()
	if err := <-second; err != nil {
		t.Errorf("after the first ended: %v", err)
	}
}

func TestOpenMakesEachBackendOnce(t *testing.T) {
	cfg := config.Default()
	cfg.Resources = append(cfg.Resources, cfg.Resources[0])
	got, err := open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got["enflame"] == nil {
		t.Errorf("backends: %v", got)
	}
	cfg.Resources[0].Vendor = "acme"
	if _, err := open(cfg); err == nil {
		t.Error("an unknown vendor was opened")
	}
	for _, b := range got {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
}
