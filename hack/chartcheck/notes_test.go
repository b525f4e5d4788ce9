package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	yaml "go.yaml.in/yaml/v3"
)

// chartWithNotes is a copy of the chart in which the notes are an object: helm
// prints them after an installation alone, and renders them without a cluster never.
func chartWithNotes(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(chartDir)); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(dir + "/templates/NOTES.txt")
	if err != nil {
		t.Fatal(err)
	}
	write(t, dir+"/templates/notes.yaml", `{{- define "notes" }}`+string(text)+`{{ end }}{"notes": {{ include "notes" . | toJson }}}`)
	return dir
}

// TestNotesSayWhatToDoNext in every mode, and nothing of what is not installed.
func TestNotesSayWhatToDoNext(t *testing.T) {
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	chart := chartWithNotes(t)
	words := map[string]string{
		"label":     "kubectl label node NODE divvy.dev/enabled=true",
		"schedconf": "kubectl rollout status daemonset/divvy-schedconf -n divvy-system",
		"switch":    "--set scheduler.mode=dedicated",
		"scheduler": "kubectl rollout status deployment/divvy-scheduler -n divvy-system",
		"by hand":   "divvy-control schedconf install",
		"entry":     "urlPrefix: http://127.0.0.1:32766/gcushare-scheduler",
		"service":   "kubectl get service divvy-extender -n divvy-system",
		"networks":  "extender.allowBindFrom",
		"none":      "no extender is installed",
		"doctor":    "kubectl divvy doctor",
		"pool":      "kubectl divvy pool import TOKEN.tar",
		"allow":     "kubectl label namespace NAMESPACE divvy.dev/pool=allowed",
		"memory":    "--set pool.totalGPUMemory=16000",
		"size":      "One GPU of the pool counts as 16000 MB",
		"operator":  "This cluster has no GPU operator",
	}
	for name, tt := range map[string]struct{ set, want []string }{
		"defaults":  {nil, []string{"label", "schedconf", "switch", "doctor"}},
		"dedicated": {[]string{"--set", "scheduler.mode=dedicated"}, []string{"label", "scheduler", "doctor"}},
		"by hand":   {[]string{"--set", "scheduler.mode=none"}, []string{"label", "by hand", "entry", "doctor"}},
		"elsewhere": {[]string{"--set", "scheduler.mode=none,extender.hostNetwork=false"},
			[]string{"label", "by hand", "entry", "service", "networks", "doctor"}},
		"no operator": {[]string{"--values", root + "/examples/values/gpu-operator.yaml"}, []string{"operator", "none", "doctor"}},
		"whole devices": {[]string{"--values", root + "/examples/values/gpu-operator.yaml", "--api-versions", "nvidia.com/v1"},
			[]string{"none", "doctor"}},
		"pool": {[]string{"--values", root + "/examples/values/pool.yaml"}, []string{"pool", "allow", "memory"}},
		"pool and cards": {[]string{"--set", "pool.enabled=true,pool.totalGPUMemory=16000"},
			[]string{"label", "schedconf", "switch", "doctor", "pool", "allow", "size"}},
		"memory unknown": {[]string{"--set", "pool.enabled=true"}, []string{"label", "schedconf", "switch", "doctor", "pool", "allow",
			"memory"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := template(t.Context(), program, chart, append([]string{"--show-only", "templates/notes.yaml"}, tt.set...))
			if err != nil {
				t.Fatal(err)
			}
			var object struct{ Notes string }
			if err := yaml.Unmarshal(out, &object); err != nil {
				t.Fatal(err)
			}
			text := object.Notes
			for word, line := range words {
				if has := strings.Contains(text, line); has != slices.Contains(tt.want, word) {
					t.Errorf("%q is in the notes: %t\n%s", line, has, text)
				}
			}
		})
	}
}
