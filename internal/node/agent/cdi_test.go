package agent

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// lateBackend knows no device until it was found, like the real one.
type lateBackend struct {
	fakeBackend
	seen map[accel.DeviceID]bool
}

func (b *lateBackend) Edits(ids ...accel.DeviceID) (backend.Edits, error) {
	if !b.seen[ids[0]] {
		return backend.Edits{}, errors.New("never found")
	}
	return b.fakeBackend.Edits(ids...)
}

// cdiWriterIn returns a writer of files in a folder, in which kubelet's checkpoint is as well.
func cdiWriterIn(dir string) *cdiWriter {
	w := newCDIWriter(config.NodeConfig{CDIDir: dir}, LimitOptions{})
	w.checkpoint = filepath.Join(dir, kubeletCheckpoint)
	return w
}

// The daemon starts before the driver, as after a reboot: the layout is known,
// the devices are not. Once they are, the specification must be there.
func TestCDISpecificationOfADriverThatComesLate(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	w = w.restart("1")
	b := &lateBackend{seen: map[accel.DeviceID]bool{}}
	w.backend = b
	dir := t.TempDir()
	c := cdiWriterIn(dir)
	c.wanted[w.pool] = nil
	w.specify = func(devices []accel.Device) map[accel.DeviceID]error { return c.specify(w.pool, b, devices) }
	w.update(t.Context(), backend.Found{}, errors.New("the driver is not loaded"))
	b.seen["a"] = true
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("CDI files: %v, want one", files)
	}
	if text, err := os.ReadFile(files[0]); err != nil || !strings.Contains(string(text), "/dev/a") {
		t.Errorf("%s, %v", text, err)
	}
}

// cdiDevicesIn returns the names of the devices that a file describes.
func cdiDevicesIn(t *testing.T, path string) string {
	t.Helper()
	var out []string
	for name := range readCDI(path).devices {
		out = append(out, name)
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// devicesNamed makes devices of these ids.
func devicesNamed(ids ...string) []accel.Device {
	var out []accel.Device
	for i, id := range ids {
		out = append(out, gpuDevice(i, id))
	}
	return out
}

// TestCDIOfSeveralParts: the file has the devices of all parts, and what an
// earlier run wrote until all parts have said what they are made of.
func TestCDIOfSeveralParts(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "divvy-nvidia.com-gpu.yaml")
	b := &gpuBackend{}
	before := cdiWriterIn(dir)
	if failed := before.specify(&pool{}, b, devicesNamed("a", "b", "c")); len(failed) > 0 {
		t.Fatal(failed)
	}
	w, one, two := cdiWriterIn(dir), &pool{}, &pool{}
	w.wanted[one], w.wanted[two] = nil, nil
	for _, step := range []struct {
		part    *pool
		devices []string
		want    string
	}{
		{one, []string{"a"}, "a b c"},
		{two, []string{"b", "d"}, "a b d"},
		{one, nil, "a b d"}, // containers may have been given its names
		{two, []string{"b"}, "b"},
	} {
		if failed := w.specify(step.part, b, devicesNamed(step.devices...)); len(failed) > 0 {
			t.Error(failed)
		}
		if got := cdiDevicesIn(t, file); got != step.want {
			t.Errorf("after %v: the file has %q, want %q", step.devices, got, step.want)
		}
	}
}

// TestCDIFolderThatCannotBeWritten: devices that the file of an earlier run
// describes are described, others are not; and all are once the folder can be
// written.
func TestCDIFolderThatCannotBeWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	file := filepath.Join(dir, "divvy-nvidia.com-gpu.yaml")
	b := &gpuBackend{}
	if failed := cdiWriterIn(dir).specify(&pool{}, b, devicesNamed("a", "b")); len(failed) > 0 {
		t.Fatal(failed)
	}
	// The name of the file beside it is taken, whoever the test runs as.
	blocked := filepath.Join(file+atomicfile.Suffix, "folder")
	if err := os.MkdirAll(blocked, 0o700); err != nil {
		t.Fatal(err)
	}
	w := cdiWriterIn(dir)
	for range 2 {
		failed := w.specify(&pool{}, b, devicesNamed("a", "c"))
		if len(failed) != 1 || failed["c"] == nil ||
			!strings.Contains(failed["c"].Error(), "write the CDI specification of nvidia.com/gpu") {
			t.Errorf("not described are %v, want c alone", failed)
		}
	}
	if err := os.RemoveAll(file + atomicfile.Suffix); err != nil {
		t.Fatal(err)
	}
	if failed := w.specify(&pool{}, b, devicesNamed("a", "c")); len(failed) > 0 {
		t.Error(failed)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if failed := w.specify(&pool{}, b, devicesNamed("a", "c")); len(failed) > 0 {
		t.Error(failed)
	}
	if got := cdiDevicesIn(t, file); got != "a c" {
		t.Errorf("the file that was lost has %q, want %q", got, "a c")
	}
}

// A name that CDI does not allow takes its own device out, and no other.
func TestCDINameThatIsNotValid(t *testing.T) {
	w := cdiWriterIn(t.TempDir())
	failed := w.specify(&pool{}, &gpuBackend{}, devicesNamed("a", "b/c"))
	if len(failed) != 1 || failed["b/c"] == nil {
		t.Errorf("not described are %v, want b/c alone", failed)
	}
}
