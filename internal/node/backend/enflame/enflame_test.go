package enflame

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// libraryName is the file of the stand-in.
var libraryName = vendorsim.LibraryName(vendorsim.Enflame)

// installFolder is where the vendor's package puts the library.
const installFolder = "/usr/local/efsmi/efsmi-1.14.0/lib"

// root is a driver root.
type root struct{ backendtest.Root }

func newRoot(t *testing.T) root {
	t.Helper()
	return root{backendtest.NewRoot(t, vendorsim.Enflame)}
}

// install puts the stand-in where the vendor's package puts the library, with
// the link that the guide tells to check.
func (r root) install(topology vendorsim.Topology) (topologyPath string) {
	path := r.Install(installFolder, topology)
	r.Link("/usr/lib/libefml.so", installFolder+"/"+libraryName)
	return path
}

func (r root) open(o backend.Options) *Backend {
	return backendtest.Open(r.Root, New, o)
}

// harness is what the tests of all vendors must know of this one.
var harness = backendtest.Harness{
	Cards:    vendorsim.GCUs,
	ID:       func(uuid string) accel.DeviceID { return accel.DeviceID("GCU-" + uuid) },
	CardCall: "EfmlGetDevMem",
	FailCode: 254,
	Open: func(t *testing.T, first vendorsim.Topology, o backend.Options) (backend.Backend, string) {
		t.Helper()
		r := newRoot(t)
		path := r.install(first)
		return r.open(o), path
	},
}

func TestConformance(t *testing.T) { backendtest.Run(t, harness) }

func reason(t *testing.T, b *Backend) string {
	t.Helper()
	return backendtest.Reason(t, b)
}

// uuids discovers and returns the uuids found, without their prefix.
func uuids(t *testing.T, b *Backend) string {
	t.Helper()
	return strings.ReplaceAll(backendtest.IDs(t, b), "GCU-", "")
}

func one(uuid string) vendorsim.Topology {
	cards := vendorsim.GCUs(1, 1024)
	cards[0].UUID = uuid
	return vendorsim.Topology{Cards: cards}
}

func TestReasons(t *testing.T) {
	backendtest.RunBroken(t, harness, map[string]backendtest.Broken{
		"no driver": {
			func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverAbsent },
			"EfmlInit: driver not loaded (6)",
		},
		"broken driver": {
			func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverBroken },
			"EfmlInit: failure (254)",
		},
		"count fails": {
			func(topology *vendorsim.Topology) {
				topology.Library.Fail = vendorsim.Failures{"EfmlGetDevCount": 253}
			},
			"EfmlGetDevCount: timeout (253)",
		},
		"a code of its own": {
			func(topology *vendorsim.Topology) { topology.Library.Fail = vendorsim.Failures{"EfmlInit": 77} },
			"EfmlInit: unknown error (77)",
		},
		"too many cards": {
			func(topology *vendorsim.Topology) { topology.Cards = vendorsim.GCUs(129, 1024) },
			"EfmlGetDevCount says 129 cards, more than the 128 that libefml allows",
		},
	})
}

func TestHungReason(t *testing.T) {
	r := newRoot(t)
	topology := one("a")
	path := r.install(topology)
	b := r.open(backend.Options{CallTimeout: 300 * time.Millisecond})
	uuids(t, b)
	topology.Library.Delay = time.Hour
	if err := topology.Write(path); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if got, want := reason(t, b), "EfmlGetDevCount did not answer within 300ms"; got != want {
			t.Errorf("reason is %q, want %q", got, want)
		}
	}
	if err := one("a").Write(path); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		_, err := b.Discover(t.Context()) // works once the call that hung has returned
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("after the repair: %v", err)
		}
	}
}

func TestLibraryThatCannotBeUsed(t *testing.T) {
	const source = "/usr/lib/libefml.so"
	t.Run("not there", func(t *testing.T) {
		r := newRoot(t)
		b := r.open(backend.Options{})
		want := "libefml.so not found; looked in ROOT/usr/lib, ROOT/usr/lib64, ROOT/usr/lib/x86_64-linux-gnu, " +
			"ROOT/usr/lib/aarch64-linux-gnu, ROOT/usr/local/efsmi/efsmi-*/lib for libefml.so, libefml.so.1, " +
			"libefml.so.2, libefml.so.2.1, libefml.so.2.0, libefml.so.1.0.0"
		if got := strings.ReplaceAll(reason(t, b), r.Dir, "ROOT"); got != want {
			t.Errorf("reason is\n%s\nwant\n%s", got, want)
		}
		r.install(one("late"))
		if got := uuids(t, b); got != "late" {
			t.Errorf("after it was installed: %q, want late", got)
		}
	})
	t.Run("not there by its path", func(t *testing.T) {
		r := newRoot(t)
		r.install(one("a"))
		b := r.open(backend.Options{LibraryPath: "/opt/libefml.so"})
		if got, want := reason(t, b), "/opt/libefml.so not found"; got != want {
			t.Errorf("reason is %q, want %q", got, want)
		}
	})
	t.Run("no library at all", func(t *testing.T) {
		r := newRoot(t)
		r.Put(source, []byte("this is text, not a library, however long it may be"))
		b := r.open(backend.Options{})
		got := strings.ReplaceAll(reason(t, b), r.Dir, "ROOT")
		if want := "libefml.so cannot be loaded: ROOT/usr/lib/libefml.so: "; !strings.HasPrefix(got, want) || len(got) == len(want) {
			t.Errorf("reason is %q, want %s...", got, want)
		}
		r.Install("/usr/lib64", one("another"))
		if got := uuids(t, b); got != "another" {
			t.Errorf("with a good one in another place: %q, want another", got)
		}
	})
	t.Run("functions missing", func(t *testing.T) {
		r := newRoot(t)
		dir := t.TempDir()
		path, err := vendorsim.Build(t.Context(), vendorsim.Enflame, dir,
			vendorsim.Without("EfmlGetDevUuid", "EfmlGetDevMem", "EfmlGetEvent"))
		if err != nil {
			t.Fatal(err)
		}
		b := r.open(backend.Options{LibraryPath: path})
		if got, want := reason(t, b), "libefml.so cannot be loaded: "+path+" lacks EfmlGetDevUuid, EfmlGetDevMem"; got != want {
			t.Errorf("reason is %q, want %q", got, want)
		}
	})
	t.Run("a dependency missing", func(t *testing.T) {
		r := newRoot(t)
		dir := t.TempDir()
		for _, args := range [][]string{
			{"-shared", "-o", "libgone.so", "-x", "c", "/dev/null"},
			{"-shared", "-Wl,--no-as-needed", "-o", "libefml.so", "-x", "c", "/dev/null", "-x", "none", "-L.", "-lgone"},
		} {
			cc := exec.CommandContext(t.Context(), "cc", args...)
			cc.Dir = dir
			if out, err := cc.CombinedOutput(); err != nil {
				t.Fatalf("cc: %v\n%s", err, out)
			}
		}
		data, err := os.ReadFile(filepath.Join(dir, "libefml.so"))
		if err != nil {
			t.Fatal(err)
		}
		r.Put(source, data)
		got := reason(t, r.open(backend.Options{}))
		if want := "libefml.so cannot be loaded: libgone.so: "; !strings.HasPrefix(got, want) {
			t.Errorf("reason is %q, want %s...", got, want)
		}
	})
}

func TestFindsLibrary(t *testing.T) {
	tests := map[string]struct {
		prepare func(root)
		want    string
	}{
		"by the vendor's link": {func(r root) { r.install(one("a")) }, "a"},
		"a link by another name": {func(r root) {
			r.Install("/opt/enflame", one("a"))
			r.Link("/usr/lib/x86_64-linux-gnu/libefml.so.2.1", "../../../opt/enflame/"+libraryName)
		}, "a"},
		"through a linked folder": {func(r root) {
			r.Install("/data/libraries", one("a"))
			r.Link("/usr/lib64", "/data/libraries")
		}, "a"},
		"a link that leads out of the root stays in": {func(r root) {
			r.Install("/usr/local", one("inside"))
			r.Link("/usr/lib/libefml.so", "../../../../../../../../usr/local/"+libraryName)
		}, "inside"},
		"a dead link is passed over": {func(r root) {
			r.Link("/usr/lib/libefml.so", "/nowhere/libefml.so")
			r.Install("/usr/lib/aarch64-linux-gnu", one("a"))
		}, "a"},
		"without a link, the newest tools": {func(r root) {
			r.Install("/usr/local/efsmi/efsmi-1.9.0/lib", one("old"))
			r.Install("/usr/local/efsmi/efsmi-1.14.0/lib", one("new"))
			r.Install("/usr/local/efsmi/efsmi-1.14.0-beta/lib", one("beta"))
		}, "new"},
		"the link before the tools": {func(r root) {
			r.Install("/usr/local/efsmi/efsmi-1.14.0/lib", one("new"))
			r.Install("/usr/local/efsmi/efsmi-1.9.0/lib", one("old"))
			r.Link("/usr/lib/libefml.so", "/usr/local/efsmi/efsmi-1.9.0/lib/"+libraryName)
		}, "old"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			r := newRoot(t)
			tt.prepare(r)
			if got := uuids(t, r.open(backend.Options{})); got != tt.want {
				t.Errorf("found the library of %q, want %q", got, tt.want)
			}
		})
	}
}

// A driver is replaced by a newer release while the daemon runs: a library that was
// never initialised is too, another one is kept until a restart.
func TestLibraryReplaced(t *testing.T) {
	r := newRoot(t)
	topology := one("first")
	topology.Driver.State = vendorsim.DriverAbsent
	r.install(topology)
	b := r.open(backend.Options{})
	reason(t, b)
	path := r.Install("/usr/local/efsmi/efsmi-1.15.0/lib", one("old"))
	r.Link("/usr/lib/libefml.so", "/usr/local/efsmi/efsmi-1.15.0/lib/"+libraryName)
	if got := uuids(t, b); got != "old" {
		t.Fatalf("found %q, want old", got)
	}
	topology = one("old")
	topology.Driver.State = vendorsim.DriverAbsent
	if err := topology.Write(path); err != nil {
		t.Fatal(err)
	}
	reason(t, b)
	r.Install("/usr/local/efsmi/efsmi-1.16.0/lib", one("new"))
	r.Link("/usr/lib/libefml.so", "/usr/local/efsmi/efsmi-1.16.0/lib/"+libraryName)
	backendtest.WantRestart(t, b)
	// And it is taken away.
	if err := os.RemoveAll(filepath.Join(r.Dir, "usr")); err != nil {
		t.Fatal(err)
	}
	if got := reason(t, b); !strings.HasPrefix(got, "libefml.so not found") {
		t.Errorf("reason is %q, want that it is not found", got)
	}
}

func TestLibraryStaysLoaded(t *testing.T) {
	r := newRoot(t)
	r.install(one("a"))
	backendtest.StaysLoaded(t, r.Root, New)
}

// Releases of the library differ in which functions they have.
func TestOlderLibraries(t *testing.T) {
	unhealthy := func(topology *vendorsim.Topology) { topology.Cards[1].Unhealthy = true }
	tests := map[string]struct {
		without []string
		change  func(*vendorsim.Topology)
		want    string // the second card's reason after the change
	}{
		"the newer function for health": {[]string{"EfmlGetDevHealth"}, unhealthy, "EfmlGetDevIsHealth says that the card is unhealthy"},
		"the older function for health": {[]string{"EfmlGetDevIsHealth"}, unhealthy, "EfmlGetDevHealth says that the card is unhealthy"},
		"no events": {[]string{"EfmlGetEvent", "EfmlGetEventV2"}, unhealthy,
			"EfmlGetDevHealth says that the card is unhealthy"},
		"events instead of health": {
			[]string{"EfmlGetDevHealth", "EfmlGetDevIsHealth"}, unhealthy,
			"event 3 of the library: card 1 suspended: unhealthy",
		},
		"health is not supported": {
			nil,
			func(topology *vendorsim.Topology) {
				topology.Library.Fail = vendorsim.Failures{"EfmlGetDevHealth": 3}
				topology.Cards[1].Unhealthy = true
			},
			"event 3 of the library: card 1 suspended: unhealthy",
		},
		"health fails": {
			nil,
			func(topology *vendorsim.Topology) {
				topology.Cards[1].Calls.Fail = vendorsim.Failures{"EfmlGetDevHealth": 253}
			},
			"EfmlGetDevHealth(1): timeout (253)",
		},
		"the bare minimum": {
			[]string{
				"EfmlErrorString", "EfmlGetDriverVer", "EfmlGetDevName", "EfmlGetNumaNode", "EfmlGetEvent",
				"EfmlGetDevHealth", "EfmlGetDevIsHealth",
			}, unhealthy, "",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file, err := vendorsim.Build(t.Context(), vendorsim.Enflame, dir, vendorsim.Without(tt.without...))
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, vendorsim.TopologyName)
			topology := vendorsim.Topology{Cards: vendorsim.GCUs(2, 1024)}
			if err := topology.Write(path); err != nil {
				t.Fatal(err)
			}
			b := newRoot(t).open(backend.Options{LibraryPath: file})
			reasonOfSecond := func() string {
				t.Helper()
				found, err := b.Discover(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if len(found.Devices) != 2 || found.Devices[0].Health.Unhealthy {
					t.Fatalf("devices are %+v, want two with a healthy first", found.Devices)
				}
				return found.Devices[1].Health.Reason
			}
			awaitChange := func() {
				t.Helper()
				if !strings.HasPrefix(tt.want, "event") {
					return
				}
				if err := b.AwaitChange(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if got := reasonOfSecond(); got != "" {
				t.Fatalf("card 1 is unhealthy from the start: %s", got)
			}
			next := topology.Clone()
			tt.change(&next)
			if err := next.Write(path); err != nil {
				t.Fatal(err)
			}
			awaitChange()
			if got := reasonOfSecond(); got != tt.want {
				t.Errorf("reason of card 1 is %q, want %q", got, tt.want)
			}
			if err := topology.Write(path); err != nil {
				t.Fatal(err)
			}
			awaitChange()
			if got := reasonOfSecond(); got != "" {
				t.Errorf("reason of card 1 after recovery is %q", got)
			}
		})
	}
}

func TestAwaitChangeWithoutEvents(t *testing.T) {
	r := newRoot(t)
	b := r.open(backend.Options{})
	if err := b.AwaitChange(t.Context()); err == nil {
		t.Error("AwaitChange without a library")
	}
	file, err := vendorsim.Build(t.Context(), vendorsim.Enflame, t.TempDir(), vendorsim.Without("EfmlGetEvent"))
	if err != nil {
		t.Fatal(err)
	}
	if err := one("a").Write(filepath.Join(filepath.Dir(file), vendorsim.TopologyName)); err != nil {
		t.Fatal(err)
	}
	b = r.open(backend.Options{LibraryPath: file})
	uuids(t, b)
	if err := b.AwaitChange(t.Context()); err == nil || !strings.Contains(err.Error(), "lacks EfmlGetEvent") {
		t.Errorf("AwaitChange with a library without events: %v", err)
	}
}

func TestEdits(t *testing.T) {
	r := newRoot(t)
	topology := vendorsim.Topology{Cards: vendorsim.GCUs(3, 1024)}
	topology.Cards[1].Minor = new(7)
	r.install(topology)
	b := r.open(backend.Options{HostDriverRoot: "/run/enflame", DevRoot: t.TempDir()})
	uuids(t, b)
	id := func(i int) accel.DeviceID { return accel.DeviceID("GCU-" + topology.Cards[i].UUID) }
	got, err := b.Edits(id(1), id(0))
	if err != nil {
		t.Fatal(err)
	}
	want := backend.Edits{
		Env: map[string]string{"ENFLAME_VISIBLE_DEVICES": "0,1"},
		DeviceNodes: []backend.DeviceNode{
			{Path: "/dev/gcu0", HostPath: "/run/enflame/dev/gcu0", Permissions: "rw"},
			{Path: "/dev/gcu7", HostPath: "/run/enflame/dev/gcu7", Permissions: "rw"},
		},
		CDIDevices: []backend.CDIDevice{
			{Kind: "enflame.com/gcu", Name: "GCU-U53000090100"},
			{Kind: "enflame.com/gcu", Name: "GCU-U53000090101"},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("edits (-want +got):\n%s", diff)
	}
}

func TestLabels(t *testing.T) {
	r := newRoot(t)
	topology := vendorsim.Topology{
		Driver: vendorsim.Driver{Version: "1.14.0 beta"},
		Cards:  append(vendorsim.GCUs(1, 1024), vendorsim.GCUs(3, 49152)[1:]...),
	}
	topology.Cards[1].Model, topology.Cards[2].Model = "S 90", "S 90"
	r.install(topology)
	b := r.open(backend.Options{})
	uuids(t, b)
	want := map[string]string{
		"enflame.com/gcu.present":        "true",
		"enflame.com/gcu.count":          "3",
		"enflame.com/gcu.product":        "S-90",
		"enflame.com/gcu.memory":         "49152",
		"enflame.com/gcu.driver-version": "1.14.0-beta",
	}
	if diff := cmp.Diff(want, b.Labels(backend.Sharing{Replicas: 1})); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
}

func TestCauses(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*vendorsim.Card)
		want   string
	}{
		"the library says so":     {func(c *vendorsim.Card) { c.Unhealthy = true }, "library"},
		"the library cannot tell": {func(c *vendorsim.Card) { c.Calls.Fail = vendorsim.Failures{"EfmlGetDevHealth": 253} }, "unreachable"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoot(t)
			topology := vendorsim.Topology{Cards: vendorsim.GCUs(1, 1024)}
			tt.change(&topology.Cards[0])
			r.install(topology)
			found, err := r.open(backend.Options{}).Discover(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if got := found.Devices[0].Health; got.Cause != tt.want || !got.Unhealthy {
				t.Errorf("health is %+v, want unhealthy by %s", got, tt.want)
			}
			found, err = r.open(backend.Options{Ignore: []string{tt.want}}).Discover(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if got := found.Devices[0].Health; got.Unhealthy {
				t.Errorf("with this cause ignored, health is %+v", got)
			}
		})
	}
}

func TestSameDeviceFile(t *testing.T) {
	r := newRoot(t)
	topology := vendorsim.Topology{Cards: vendorsim.GCUs(3, 1024)}
	topology.Cards[2].Minor = new(0)
	r.install(topology)
	found, err := r.open(backend.Options{}).Discover(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(found.Devices) != 1 || len(found.Faults) != 2 {
		t.Fatalf("devices %v, faults %v; want one and two", found.Devices, found.Faults)
	}
	if got, want := found.Faults[1].Err.Error(), "card 2: cards [0 2] have the same device file number 0"; got != want {
		t.Errorf("fault is %q, want %q", got, want)
	}
}

func ExampleBackend_Edits() {
	b, err := New(backend.Options{DriverRoot: "/nowhere"})
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = b.Edits("GCU-U53000090104")
	fmt.Println(err)
	// Output: enflame: device GCU-U53000090104 was never found on this node
}
