package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFindFile(t *testing.T) {
	repository, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	if err := os.WriteFile("mine.ini", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"mine.ini":                         filepath.Join(here, "mine.ini"),
		filepath.Join(here, "mine.ini"):    filepath.Join(here, "mine.ini"),
		defaultTopology:                    filepath.Join(repository, "lab/topologies", defaultTopology),
		"lab/topologies/gcu-mixed.ini":     filepath.Join(repository, "lab/topologies/gcu-mixed.ini"),
		filepath.Join("..", "no-such.ini"): "",
	} {
		got, err := findFile(repository, "topologies", name)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("findFile(%s) = %q, %v; want %q", name, got, err, want)
		}
	}
}

// Every command that needs root says so in one sentence.
func TestWithoutRoot(t *testing.T) {
	original := geteuid
	t.Cleanup(func() { geteuid = original })
	geteuid = func() int { return 1000 }
	for _, args := range [][]string{
		{"build"}, {"up"}, {"install"}, {"down"}, {"status"}, {"restart", "kubelet"}, {"kill", "etcd"}, {"start", "etcd"}, {"stop", "etcd"},
	} {
		root := newRootCommand()
		root.SetArgs(args)
		var out bytes.Buffer
		root.SetOut(&out)
		err := root.ExecuteContext(t.Context())
		if err == nil || !strings.Contains(err.Error(), "needs root") || strings.Contains(err.Error(), "\n") {
			t.Errorf("lab %s: %v", strings.Join(args, " "), err)
		}
	}
}

func TestUnknownComponentAndArguments(t *testing.T) {
	for _, args := range [][]string{{"restart"}, {"up", "now"}, {"sideways"}} {
		root := newRootCommand()
		root.SetArgs(args)
		var out bytes.Buffer
		root.SetOut(&out)
		root.SetErr(&out)
		if err := root.ExecuteContext(t.Context()); err == nil {
			t.Errorf("lab %s: no error", strings.Join(args, " "))
		}
	}
}
