package uninstall

import (
	"strings"
	"testing"
)

func TestOptions(t *testing.T) {
	tests := map[string]struct {
		args []string
		want string
	}{
		"no part":    {nil, "set either --before or --after"},
		"both parts": {[]string{"--before", "--after"}, "set either --before or --after"},
		"no namespace": {[]string{"--before", "--namespace=", "--node-hook=x"},
			"--namespace (or POD_NAMESPACE) is required for --scheduler-daemon"},
		"a daemon alone":      {[]string{"--before", "--scheduler-daemon=x"}, "--scheduler-daemon requires --scheduler-hook"},
		"a kind":              {[]string{"--before", "--remove=pod/a/b"}, `--remove: "pod/a/b": must be KIND/NAMESPACE/NAME`},
		"no namespace of one": {[]string{"--before", "--remove=lease/a"}, `--remove: "lease/a"`},
		"a namespace too many": {
			[]string{"--before", "--remove=mutatingwebhookconfiguration/a/b"}, `--remove: "mutatingwebhookconfiguration/a/b"`,
		},
		"an empty name":     {[]string{"--before", "--remove=lease/a/"}, `--remove: "lease/a/"`},
		"a native resource": {[]string{"--after", "--resources=cpu"}, "--resources: "},
		"a count":           {[]string{"--before", "--counts=cpu"}, "--counts: "},
		"a negative hold":   {[]string{"--before", "--hold=-1s"}, "--hold: "},
		"no time":           {[]string{"--before", "--timeout=1s"}, "--timeout: 1s: must be more than 5s"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			cmd := Command()
			cmd.SilenceErrors, cmd.SilenceUsage = true, true
			cmd.SetArgs(append([]string{"--namespace=x"}, tc.args...))
			if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
}
