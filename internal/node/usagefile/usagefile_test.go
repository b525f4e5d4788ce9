package usagefile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

func TestRead(t *testing.T) {
	start := time.Date(2026, 11, 26, 14, 0, 0, 0, time.UTC)
	used := uint64(5)
	report := wire.UsageReport{Node: "n", Time: start.Add(time.Minute), Devices: []wire.DeviceUsage{
		{Vendor: "nvidia", Device: "GPU-1", MemoryBytes: 10, UsedBytes: 5, Containers: []wire.ContainerUsage{{Pod: "p", UsedBytes: &used}}},
	}}
	tests := map[string]struct {
		do    func(dir string, f *File) error
		after time.Duration
		err   string
	}{
		"a report":                 {func(_ string, f *File) error { return f.Write(report) }, 75 * time.Second, ""},
		"a report of three passes": {func(_ string, f *File) error { return f.Write(report) }, 105 * time.Second, ""},
		"a stale report": {func(_ string, f *File) error { return f.Write(report) }, 106 * time.Second,
			"the last report is 46s old, and a pass is due every 15s"},
		"no pass yet":    {func(string, *File) error { return nil }, 5 * time.Second, "has not ended; divvy-node began to measure 5s ago"},
		"no pass at all": {func(string, *File) error { return nil }, 5 * time.Minute, "no pass over the devices has ended in 5m0s"},
		"off":            {func(_ string, f *File) error { return f.Remove() }, 0, "usage.enabled is false"},
		"removed twice":  {func(_ string, f *File) error { return errors.Join(f.Remove(), f.Remove()) }, 0, "usage.enabled is false"},
		"damaged": {func(dir string, _ *File) error {
			return os.WriteFile(filepath.Join(dir, name), []byte("{"), 0o600)
		}, 0, "read the usage report: "},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "made", "here")
			f, err := Create(dir, 15*time.Second, start)
			must(t, err)
			must(t, tt.do(dir, f))
			got, err := Read(dir, start.Add(tt.after))
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want %q", err, tt.err)
				}
				return
			}
			must(t, err)
			if diff := cmp.Diff(report, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			info, err := os.Stat(filepath.Join(dir, name))
			must(t, err)
			if info.Mode().Perm() != 0o600 {
				t.Errorf("mode %v", info.Mode())
			}
		})
	}
}

func TestCreateFails(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	if _, err := Create(filepath.Join(dir, "file"), time.Second, time.Now()); err == nil {
		t.Error("created in a file")
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
