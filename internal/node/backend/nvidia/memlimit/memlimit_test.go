package memlimit_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/memlimit"
)

const (
	gpu  = accel.DeviceID("GPU-00000000-0000-0000-0000-000000000001")
	mib  = 1 << 20
	leaf = "/sys/fs/cgroup/kubepods/pod/leaf"
)

// opened is a library with NVML's functions, one device and a limit for each of a few
// groups. Another group cannot be opened, and one that ends with "bare" has no controller.
func opened(t *testing.T, flags ...string) (*memlimit.Library, error) {
	t.Helper()
	root := t.TempDir()
	file := filepath.Join(root, "usr/lib64/libnvidia-ml.so.1")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	compiler := os.Getenv("CC")
	if compiler == "" {
		compiler = "cc"
	}
	args := append([]string{"-shared", "-fPIC", "-o", file, "testdata/limits.c"}, flags...)
	if out, err := exec.CommandContext(t.Context(), compiler, args...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	l, err := memlimit.Open(memlimit.Places(backend.Options{DriverRoot: root}))
	if err == nil {
		t.Cleanup(func() {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	return l, err
}

func TestLimitIsSetReadAndCleared(t *testing.T) {
	l, err := opened(t)
	if err != nil {
		t.Fatal(err)
	}
	if got := l.Driver(); got != "615.71.09" {
		t.Errorf("driver is %q", got)
	}
	if _, err := l.Limit(t.Context(), gpu, leaf); !errors.Is(err, backend.ErrNoLimit) {
		t.Errorf("before: %v, want none", err)
	}
	if err := l.SetLimit(t.Context(), gpu, leaf, 3000*mib); err != nil {
		t.Fatal(err)
	}
	if got, err := l.Limit(t.Context(), gpu, leaf); err != nil || got != (backend.MemoryLimit{Bytes: 3000 * mib, UsedBytes: 7 * mib}) {
		t.Errorf("limit is %+v, %v", got, err)
	}
	if err := l.ClearLimit(t.Context(), gpu, leaf); err != nil {
		t.Fatal(err)
	}
	if got, err := l.Limit(t.Context(), gpu, leaf); !errors.Is(err, backend.ErrNoLimit) {
		t.Errorf("after: %+v, %v, want none", got, err)
	}
}

func TestErrorsOfTheLibrary(t *testing.T) {
	l, err := opened(t)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		id    accel.DeviceID
		group string
		bytes uint64
		is    error
		want  string
	}{
		"another device":           {"GPU-x", leaf, mib, nil, "nvmlDeviceGetHandleByUUID(GPU-x): not found (6)"},
		"more than the device has": {gpu, leaf, 1 << 50, nil, "invalid argument (2)"},
		"no such group":            {gpu, "/gone", mib, nil, "cannot open the control group"},
		"no controller":            {gpu, "/sys/fs/cgroup/bare", mib, backend.ErrNoController, "(6)"},
		"the root":                 {gpu, "/sys/fs/cgroup", mib, nil, "keeps no limit here"},
	} {
		err := l.SetLimit(t.Context(), tt.id, tt.group, tt.bytes)
		if err == nil || tt.is != nil && !errors.Is(err, tt.is) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

func TestLibraryWithoutLimits(t *testing.T) {
	for name, tt := range map[string]struct {
		flags []string
		want  string
	}{
		"595": {[]string{"-DNO_SET", "-DNO_GET"}, "lacks nvmlDeviceSetMemoryLimits_v1 and nvmlDeviceGetMemoryLimits_v1, which driver 615"},
		"one": {[]string{"-DNO_GET"}, "driver 615.71.09 has no memory limits: its library lacks nvmlDeviceGetMemoryLimits_v1,"},
	} {
		if _, err := opened(t, tt.flags...); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
	if _, err := opened(t, "-DBROKEN"); err == nil || !strings.Contains(err.Error(), "nvmlInit_v2: driver not loaded (9)") {
		t.Errorf("without the driver: %v", err)
	}
	if _, err := memlimit.Open(memlimit.Places(backend.Options{DriverRoot: t.TempDir()})); err == nil ||
		!strings.Contains(err.Error(), "libnvidia-ml.so.1") {
		t.Errorf("without the library: %v", err)
	}
}

func TestOutcome(t *testing.T) {
	set := func(code int32) error { return &libloader.CodeError{Call: memlimit.SetFunction + "(0)", Code: code} }
	get := func(code int32) error { return &libloader.CodeError{Call: memlimit.GetFunction + "(0)", Code: code} }
	other := errors.New("other")
	for name, tt := range map[string]struct {
		err  error
		is   error
		text string
	}{
		"nothing set, or no place for limits": {get(3), backend.ErrNoLimit, "no limit"},
		"nothing found":                       {get(6), backend.ErrNoLimit, "no limit"},
		"no place for limits":                 {set(3), nil, "dmem or the misc controller"},
		"no controller in the group":          {set(6), backend.ErrNoController, "controller"},
		"a function that is missing":          {set(13), errors.ErrUnsupported, ""},
		"not root":                            {set(4), nil, "only root"},
		"another failure":                     {set(999), nil, "(999)"},
		"no code":                             {other, other, "other"},
	} {
		got := memlimit.Outcome(tt.err)
		if tt.is != nil && !errors.Is(got, tt.is) || !errors.Is(got, tt.err) || !strings.Contains(got.Error(), tt.text) {
			t.Errorf("%s: %v", name, got)
		}
		for _, not := range []error{backend.ErrNoLimit, backend.ErrNoController, errors.ErrUnsupported} {
			if !errors.Is(tt.is, not) && errors.Is(got, not) {
				t.Errorf("%s: %v is also %v", name, got, not)
			}
		}
	}
	if memlimit.Outcome(nil) != nil {
		t.Error("success is an error")
	}
}
