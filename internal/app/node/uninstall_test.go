package node

import (
	"strings"
	"testing"
)

func TestUninstallOptions(t *testing.T) {
	tests := map[string]struct {
		args []string
		want string
	}{
		"a relative folder":     {[]string{"--state-dir=divvy"}, `--state-dir: "divvy": must be an absolute path`},
		"no host":               {[]string{"--host="}, `--host: "": must be an absolute path`},
		"a relative log folder": {[]string{"--log-dirs=/a,b"}, `--log-dirs: "b": must be an absolute path`},
		"a native resource":     {[]string{"--resources=memory"}, `--resources: "memory": must be an extended resource`},
		"kubelet's socket":      {[]string{"--pool-socket=kubelet.sock"}, "--pool-socket"},
		"an address":            {[]string{"--listen=9404"}, "--listen"},
		"a negative time":       {[]string{"--lock-timeout=-1s"}, "--lock-timeout"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			cmd := Command("divvy-node")
			cmd.SetArgs(append([]string{"uninstall", "--host=" + t.TempDir()}, tc.args...))
			err := cmd.ExecuteContext(t.Context())
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("error %v, want %q", err, tc.want)
			}
			if code := ExitCode(err); code != ExitUsage {
				t.Errorf("exit code %d, want %d", code, ExitUsage)
			}
		})
	}
}
