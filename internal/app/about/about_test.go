package about

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// program has a subcommand with a subcommand that wants an argument and a flag.
func program(t *testing.T, ran *bool) *cobra.Command {
	t.Helper()
	root := &cobra.Command{Use: "divvy-x", SilenceUsage: true, SilenceErrors: true}
	sub := &cobra.Command{Use: "sub"}
	leaf := &cobra.Command{Use: "leaf FILE", Args: cobra.ExactArgs(1), RunE: func(*cobra.Command, []string) error {
		*ran = true
		return nil
	}}
	leaf.Flags().String("needed", "", "")
	if err := leaf.MarkFlagRequired("needed"); err != nil {
		t.Fatal(err)
	}
	sub.AddCommand(leaf)
	root.AddCommand(sub)
	Version(root, version.API{Use: version.Serves, Name: "api.example", Versions: []string{"v1"}})
	return root
}

func TestVersion(t *testing.T) {
	text := version.String("divvy-x") + "\n  serves api.example v1\n"
	tests := map[string]struct {
		args []string
		want string
		err  string
	}{
		"flag":                 {args: []string{"--version"}, want: text},
		"flag of a subcommand": {args: []string{"sub", "--version"}, want: text},
		"flag of the last one, without what it needs": {args: []string{"sub", "leaf", "--version"}, want: text},
		"subcommand":     {args: []string{"version"}, want: text},
		"unknown format": {args: []string{"version", "-o", "xml"}, err: `--output: no output format "xml"`},
		"argument":       {args: []string{"version", "x"}, err: "unknown command"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var ran bool
			cmd := program(t, &ran)
			var out bytes.Buffer
			cmd.SetOut(&out)
			cmd.SetArgs(tt.args)
			err := cmd.Execute()
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("error is %v, want one with %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, out.String()); diff != "" || ran {
				t.Errorf("it ran: %t; output (-want +got):\n%s", ran, diff)
			}
		})
	}
}

func TestVersionForMachines(t *testing.T) {
	var ran bool
	cmd := program(t, &ran)
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"version", "--output", "json"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	var got version.Info
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	want := version.Of("divvy-x", version.API{Use: version.Serves, Name: "api.example", Versions: []string{"v1"}})
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
