package nodeagent

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
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

// The daemon starts before the driver, as after a reboot: the layout is known,
// the devices are not. Once they are, the specification must be there.
func TestCDISpecificationOfADriverThatComesLate(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	w = w.restart("1")
	b := &lateBackend{seen: map[accel.DeviceID]bool{}}
	w.backend = b
	dir := t.TempDir()
	a := &Agent{
		o: Options{
			Config:   config.NodeConfig{Injection: config.InjectCDI, CDIDir: dir},
			Backends: map[string]backend.Backend{"enflame": b},
		},
		offerings: []*offering{{name: gcuMemory, vendor: "enflame", parts: []part{w.memoryPool}, configured: true}},
		cdi:       newCDIWriter(dir),
	}
	specify := func() {
		t.Helper()
		if err := a.specify(); err != nil {
			t.Fatal(err)
		}
	}
	w.update(t.Context(), backend.Found{}, errors.New("the driver is not loaded"))
	specify()
	b.seen["a"] = true
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	specify()
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("CDI files: %v, want one", files)
	}
	if text, err := os.ReadFile(files[0]); err != nil || !strings.Contains(string(text), "/dev/a") {
		t.Errorf("%s, %v", text, err)
	}
}
