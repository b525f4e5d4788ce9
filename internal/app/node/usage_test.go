package node

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/usagefile"
)

func TestUsage(t *testing.T) {
	report := wire.UsageReport{Node: "n", Devices: []wire.DeviceUsage{
		{Vendor: "nvidia", Device: "GPU-1", MemoryBytes: 2 << 30, UsedBytes: 1 << 30},
	}}
	tests := map[string]struct {
		age  time.Duration // of the report, 0 for none
		args []string
		code int
		want []string
	}{
		"table":            {time.Second, nil, 0, []string{"NODE n: measured at", "nvidia 0 GPU-1: total 2.00 GiB, used 1.00 GiB"}},
		"a stale report":   {time.Minute, nil, ExitFailure, []string{"the last report is 1m", "and a pass is due every 15s"}},
		"off":              {0, nil, ExitFailure, []string{"use is not measured on this node: usage.enabled is false"}},
		"off, for scripts": {0, []string{"--output", "json"}, ExitFailure, []string{"usage.enabled is false"}},
		"another format":   {time.Second, []string{"-o", "yaml"}, ExitUsage, []string{`output format "yaml": must be one of table, json`}},
		"an argument":      {time.Second, []string{"n"}, ExitUsage, []string{"unknown command"}},
		"json":             {time.Second, []string{"-o", "json"}, 0, []string{`"node": "n"`}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if tt.age > 0 {
				f, err := usagefile.Create(dir, 15*time.Second, time.Now())
				if err != nil {
					t.Fatal(err)
				}
				report.Time = time.Now().Add(-tt.age).UTC()
				if err := f.Write(report); err != nil {
					t.Fatal(err)
				}
			}
			var out bytes.Buffer
			cmd := usageCommand(dir)
			cmd.SilenceErrors, cmd.SilenceUsage = true, true
			cmd.SetOut(&out)
			cmd.SetArgs(append([]string{}, tt.args...))
			err := cmd.ExecuteContext(t.Context())
			if ExitCode(err) != tt.code {
				t.Errorf("exit code %d, want %d", ExitCode(err), tt.code)
			}
			if err != nil {
				out.WriteString(err.Error())
			}
			hasAll(t, out.String(), tt.want...)
			if name != "json" {
				return
			}
			var again wire.UsageReport
			if err := json.Unmarshal(out.Bytes(), &again); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(report, again); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
