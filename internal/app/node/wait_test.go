package node

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// lateBackend is a driver that answers at one of its attempts.
type lateBackend struct {
	backend.Backend
	found backend.Found
	err   error
}

func (*lateBackend) Close() error { return nil }

func (b *lateBackend) Discover(context.Context) (backend.Found, error) { return b.found, b.err }

// steps makes the backends of a wait: each attempt takes the next, the last
// stays.
func steps(t *testing.T, backends ...*lateBackend) func(bool) (backend.Backend, error) {
	t.Helper()
	n := 0
	return func(bool) (backend.Backend, error) {
		b := backends[min(n, len(backends)-1)]
		n++
		return &lateBackend{found: b.found, err: b.err}, nil
	}
}

var twoCards = backend.Found{Driver: "550.1", Devices: []accel.Device{{ID: "a"}, {Index: 1, ID: "b"}}}

func TestWaitTellsWhatItWaitsForEachTimeThatChanges(t *testing.T) {
	missing := &lateBackend{err: &backend.UnavailableError{Err: errors.New("libnvidia-ml.so.1 is nowhere")}}
	empty := &lateBackend{found: backend.Found{Faults: []backend.Fault{{Err: errors.New("device 0 is lost")}}}}
	w := waiting{vendor: "nvidia", every: time.Millisecond, open: steps(t, missing, missing, missing, empty, empty,
		&lateBackend{found: twoCards})}
	var out bytes.Buffer
	if err := w.wait(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 4 {
		t.Errorf("%d lines:\n%s", len(lines), out.String())
	}
	hasAll(t, out.String(), "libnvidia-ml.so.1 is nowhere", "waiting: device 0 is lost\nthe driver of nvidia answers and lists no device",
		"nvidia: 2 devices, driver 550.1")
}

func TestWaitEndsWhenItsTimeIsOver(t *testing.T) {
	w := waiting{vendor: "nvidia", every: time.Millisecond, open: steps(t, &lateBackend{err: errors.New("no driver")})}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	var out bytes.Buffer
	err := w.wait(ctx, &out)
	if ExitCode(err) != ExitTimeout {
		t.Errorf("exit code %d", ExitCode(err))
	}
	hasAll(t, err.Error(), "the time is over", "no driver")
}

func TestWaitEndsWhereOnlyAnotherProcessCanGoOn(t *testing.T) {
	needed := &backend.UnavailableError{Vendor: "nvidia", Err: &backend.RestartNeededError{Reason: "the driver changed"}}
	w := waiting{vendor: "nvidia", every: time.Millisecond, open: steps(t, &lateBackend{err: needed})}
	var out bytes.Buffer
	err := w.wait(t.Context(), &out)
	if ExitCode(err) != ExitFailure || !errors.Is(err, needed) {
		t.Errorf("exit code %d, %v", ExitCode(err), err)
	}
}

func TestWaitForWhatTheGPUOperatorSays(t *testing.T) {
	dir := t.TempDir()
	opened := false
	w := waiting{vendor: "nvidia", toolkit: true, validations: dir, every: time.Millisecond, open: func(bool) (backend.Backend, error) {
		opened = true
		return &lateBackend{found: twoCards}, nil
	}}
	for _, name := range []string{"driver-ready", "toolkit-ready"} {
		_, err := w.attempt(t.Context())
		if err == nil || !strings.Contains(err.Error(), name+" is not there yet") {
			t.Errorf("before %s: %v", name, err)
		}
		// While there is no sign of an operator, the error says what a node without
		// one needs.
		if hint := strings.Contains(err.Error(), "node.gpuOperator.enabled=false"); hint != (name == "driver-ready") {
			t.Errorf("before %s: %v", name, err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.attempt(t.Context()); err != nil {
		t.Error(err)
	}
	w.toolkit = false
	if err := os.Remove(filepath.Join(dir, "toolkit-ready")); err != nil {
		t.Fatal(err)
	}
	if _, err := w.attempt(t.Context()); err != nil {
		t.Errorf("without --toolkit: %v", err)
	}
	if opened {
		t.Error("the library was loaded, while the operator may need the driver")
	}
}

func TestWaitLooksAtItsOwnContainer(t *testing.T) {
	root := t.TempDir()
	w := waiting{vendor: "nvidia", toolkit: true, root: root, every: time.Millisecond, open: func(inContainer bool) (backend.Backend,
		error) {
		if !inContainer {
			t.Error("the host is looked at, and not the container")
		}
		return &lateBackend{found: twoCards}, nil
	}}
	if _, err := w.attempt(t.Context()); err == nil || !strings.Contains(err.Error(), "nvidiactl is not there yet") {
		t.Errorf("without device nodes: %v", err)
	}
	if err := os.MkdirAll(filepath.Join(root, "dev"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "dev/nvidiactl"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := w.attempt(t.Context()); err != nil {
		t.Error(err)
	}
	c := config.Default()
	c.DriverRoot = "/host"
	if diff := cmp.Diff(backend.Options{DriverRoot: root}, w.options(c, true)); diff != "" {
		t.Errorf("options inside (-want +got):\n%s", diff)
	}
	if got := w.options(c, false).DriverRoot; got != "/host" {
		t.Errorf("the driver root on the host is %q", got)
	}
}

func TestWaitRefusesWrongUse(t *testing.T) {
	for name, args := range map[string][]string{
		"no vendor":             nil,
		"an unknown vendor":     {"--vendor=acme"},
		"another's toolkit":     {"--vendor=enflame", "--toolkit"},
		"another's validations": {"--vendor=enflame", "--validations=/x"},
		"no duration":           {"--vendor=enflame", "--timeout=soon"},
		"a negative duration":   {"--vendor=enflame", "--enflame-library=/nowhere/libefml.so", "--timeout=-3s"},
		"an argument":           {"--vendor=enflame", "now"},
	} {
		if _, code, err := execute(t, append([]string{"wait"}, args...)...); code != ExitUsage {
			t.Errorf("%s: exit code %d, %v", name, code, err)
		}
	}
	out, code, err := execute(t, "wait", "--vendor=enflame", "--timeout=100ms", "--enflame-library=/nowhere/libefml.so")
	if code != ExitTimeout {
		t.Errorf("exit code %d, %v", code, err)
	}
	hasAll(t, out, "waiting:", "/nowhere/libefml.so")
}
