package nvidia_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// inOwnProcess runs the test in a process in which no other test has loaded anything, and
// reports whether this is it.
func inOwnProcess(t *testing.T) bool {
	t.Helper()
	const own = "DIVVY_TEST_OWN_PROCESS"
	if os.Getenv(own) != "" {
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), own+"=1")
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

// mapped returns what this process has mapped of NVML.
func mapped(t *testing.T) []string {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "libnvidia-ml") {
			out = append(out, strings.TrimSpace(line))
		}
	}
	return out
}

var upgrading = accel.Health{Unhealthy: true, Cause: "driver-upgrade", Reason: "the driver is being replaced"}

func TestPauseTakesTheLibraryOutOfTheProcess(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	root := t.TempDir()
	folder := filepath.Join(root, libraryFolder)
	pause := backend.NewPause(upgrading)
	m := newMachine(t, backend.Options{DriverRoot: root, Pause: pause, CallTimeout: time.Second}, vendorsim.GPUs(2, 1024)...)
	install := func(version string) {
		t.Helper()
		if _, err := vendorsim.Build(t.Context(), vendorsim.NVIDIA, folder); err != nil {
			t.Fatal(err)
		}
		m.topology.Drivers = map[string]vendorsim.Driver{vendorsim.NVIDIA: {Version: version}}
		if err := m.topology.Write(filepath.Join(folder, vendorsim.TopologyName)); err != nil {
			t.Fatal(err)
		}
	}
	wantPaused := func() {
		t.Helper()
		found, err := m.Discover(t.Context())
		var paused *backend.PausedError
		if !errors.As(err, &paused) || backend.Unavailable(err) == nil || paused.Unreleased != nil {
			t.Fatalf("Discover = %v, %v, want a PausedError", found, err)
		}
		if lines := mapped(t); len(lines) > 0 {
			t.Fatalf("mapped while paused:\n%s", strings.Join(lines, "\n"))
		}
	}

	install("550.1")
	wantPaused() // before it was ever loaded
	listening := m.await()
	for _, version := range []string{"550.1", "570.2", "535.3"} {
		install(version)
		pause.Set(accel.Health{})
		if found := m.found(); len(found.Devices) != 2 || found.Driver != version {
			t.Fatalf("found %+v of driver %s", found, version)
		}
		if len(mapped(t)) == 0 {
			t.Fatal("nothing is mapped while NVML is in use: this test looks in the wrong place")
		}
		id := m.found().Devices[0].ID
		time.Sleep(100 * time.Millisecond) // so that a call waits for an event
		pause.Set(upgrading)
		wantPaused()
		if _, err := m.Edits(id); err != nil {
			t.Errorf("Edits while paused: %v", err)
		}
	}

	// The driver is gone already, so NVML cannot be shut down.
	pause.Set(accel.Health{})
	m.found()
	m.topology.Library.Fail = vendorsim.Failures{"nvmlShutdown": 999}
	if err := m.topology.Write(filepath.Join(folder, vendorsim.TopologyName)); err != nil {
		t.Fatal(err)
	}
	pause.Set(upgrading)
	wantPaused()

	select {
	case err := <-listening:
		t.Errorf("AwaitChange = %v without a change", err)
	default:
	}
}

// A call that hangs keeps the library; it is released when the call returns.
func TestPauseDuringACallThatHangs(t *testing.T) {
	pause := backend.NewPause(accel.Health{})
	m := newMachine(t, backend.Options{Pause: pause, CallTimeout: time.Second}, vendorsim.GPUs(2, 1024)...)
	m.found()
	m.change(func(topology *vendorsim.Topology) {
		topology.Cards[0].Calls.Slow = vendorsim.Delays{"nvmlDeviceGetMemoryInfo": time.Hour}
	})
	m.found()
	pause.Set(upgrading)
	const hangs = "; the library is still in use: nvmlDeviceGetMemoryInfo(0) did not answer"
	if got := m.reason(); !strings.Contains(got, upgrading.Reason+hangs) {
		t.Errorf("reason is %q", got)
	}
	m.change(func(topology *vendorsim.Topology) { topology.Cards[0].Calls.Slow = nil })
	for start := time.Now(); m.reason() != upgrading.Reason; time.Sleep(50 * time.Millisecond) {
		if time.Since(start) > patience {
			t.Fatalf("reason is %q", m.reason())
		}
	}
	if lines := mapped(t); len(lines) > 0 {
		t.Errorf("mapped while paused: %q", lines)
	}
	pause.Set(accel.Health{})
	m.wantCauses("after the pause", "- -")
}
