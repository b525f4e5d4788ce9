package control

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"

	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// TestVersionTellsTheAPIs that others have to agree with divvy-control about, also
// to those who ask a subcommand.
func TestVersionTellsTheAPIs(t *testing.T) {
	cmd := Command()
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"version", "-o", "json"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	var info version.Info
	if err := json.Unmarshal(out.Bytes(), &info); err != nil {
		t.Fatal(err)
	}
	has := func(use version.Use, name, v string) bool {
		return slices.ContainsFunc(info.APIs, func(a version.API) bool {
			return a.Use == use && a.Name == name && slices.Contains(a.Versions, v)
		})
	}
	for _, want := range []struct {
		use     version.Use
		name, v string
	}{
		{version.Serves, "kube-scheduler extender", "v1"},
		{version.Serves, "admission.k8s.io", "v1"},
		{version.Writes, "kubescheduler.config.k8s.io", "v1"},
		{version.Writes, "divvy.dev/grant", "1"},
	} {
		if !has(want.use, want.name, want.v) {
			t.Errorf("it does not tell that it %s %s %s: %+v", want.use, want.name, want.v, info.APIs)
		}
	}
	for _, sub := range Command().Commands() {
		if sub.Name() == "version" {
			continue
		}
		t.Run(sub.Name(), func(t *testing.T) {
			cmd := Command()
			var out bytes.Buffer
			cmd.SetOut(&out)
			cmd.SetArgs([]string{sub.Name(), "--version"})
			if err := cmd.Execute(); err != nil {
				t.Fatal(err)
			}
			if out.String() != info.Text() {
				t.Errorf("--version prints %q, want %q", out.String(), info.Text())
			}
		})
	}
}
