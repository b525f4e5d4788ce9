package vendorsim_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/ebitengine/purego"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// standIn is a copy of the stand-in for a vendor's library, loaded, with a
// topology of its own. The copy is what keeps one test's cards apart from
// another's.
type standIn struct{ dir string }

// loadStandIn copies a stand-in beside the topology, loads it with these flags of
// dlopen and binds functions: pointers to variables, by the function's name.
func loadStandIn(t testing.TB, vendor string, flags int, topology vendorsim.Topology, functions map[string]any) standIn {
	t.Helper()
	data, err := vendorsim.Compiled(vendor)
	if err != nil {
		t.Fatal(err)
	}
	s := standIn{t.TempDir()}
	s.write(t, topology)
	file := filepath.Join(s.dir, vendorsim.LibraryName(vendor))
	if err := os.WriteFile(file, data, 0o755); err != nil {
		t.Fatal(err)
	}
	handle, err := purego.Dlopen(file, flags)
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range functions {
		purego.RegisterLibFunc(f, handle, name)
	}
	return s
}

func (s standIn) topologyPath() string { return filepath.Join(s.dir, vendorsim.TopologyName) }

func (s standIn) write(t testing.TB, topology vendorsim.Topology) {
	t.Helper()
	if err := topology.Write(s.topologyPath()); err != nil {
		t.Fatal(err)
	}
}

// text is what C wrote before the first NUL.
func text(b []byte) string {
	before, _, _ := bytes.Cut(b, []byte{0})
	return string(before)
}

func wantCode(t testing.TB, call string, got, want int32) {
	t.Helper()
	if got != want {
		t.Fatalf("%s = %d, want %d", call, got, want)
	}
}
