package devicelist

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

var kind = Kind{
	Vendor: "acme", Noun: "card", File: "dev/acme", Shared: []string{"dev/acmectl"}, CDI: "acme.example/card",
}

func device(index int, id accel.DeviceID, minor int) *Device {
	return &Device{Device: accel.Device{Index: index, ID: id}, Minor: minor}
}

func listing(devices ...*Device) Listing[*Device] { return Listing[*Device]{Devices: devices} }

// faults are the texts of faults by index.
func faults(list []backend.Fault) map[int]string {
	out := map[int]string{}
	for _, f := range list {
		out[f.Index] = fmt.Sprintf("%s: %v", f.ID, f.Err)
	}
	return out
}

func TestList(t *testing.T) {
	code := &libloader.CodeError{Call: "acmeMemory(5)", Code: 1, Text: "failure"}
	l, err := List(kind, 9, answers, func(index int) (*Device, error) {
		d := device(index, accel.DeviceID(fmt.Sprint("id-", index)), index)
		switch index {
		case 1:
			d.ID = "id-0"
		case 3:
			d.Minor = 2
		case 4:
			return d, ErrSkip
		case 5:
			return d, code
		case 6:
			return &Device{}, errors.New("no uuid")
		}
		return d, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(l.Devices) != 2 || l.Devices[0].Index != 7 || l.Devices[1].Index != 8 {
		t.Errorf("devices are %v, want 7 and 8", l.Devices)
	}
	want := map[int]string{
		0: "id-0: card 0: cards [0 1] have the same uuid id-0",
		1: "id-0: card 1: cards [0 1] have the same uuid id-0",
		2: "id-2: card 2: cards [2 3] have the same device file number 2",
		3: "id-3: card 3: cards [2 3] have the same device file number 2",
		5: "id-5: acmeMemory(5): failure (1)",
		6: ": no uuid",
	}
	if diff := cmp.Diff(want, faults(l.Faults)); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}
	for i, f := range l.Faults[1:] {
		if f.Index < l.Faults[i].Index {
			t.Errorf("faults are not in order: %v", l.Faults)
		}
	}
	if _, err := List(kind, 3, answers, func(int) (*Device, error) { return device(0, "", 0), backend.ErrClosed }); !errors.Is(err,
		backend.ErrClosed) {
		t.Errorf("an error that all calls would run into: %v", err)
	}
}

// answers is for a library in which nothing hangs.
func answers(int) *callqueue.HungError { return nil }

// TestHungDevices discovers four cards again and again, of which some hang, alone
// or with a lock that holds up the calls about all others.
func TestHungDevices(t *testing.T) {
	for name, tt := range map[string]struct {
		hangs []int
		lock  bool
		want  []string // devices, faults, those that were not asked; and the time that it took
	}{
		"none":                 {nil, false, []string{"[0 1 2 3] [] [] 0s"}},
		"the first":            {[]int{0}, false, []string{"[1 2 3] [0] [] 5s", "[1 2 3] [0] [] 0s"}},
		"the last":             {[]int{3}, false, []string{"[0 1 2] [3] [] 5s", "[0 1 2] [3] [] 0s"}},
		"two with one between": {[]int{1, 3}, false, []string{"[0 2] [1 3] [] 10s", "[0 2] [1 3] [] 0s"}},
		"two side by side":     {[]int{1, 2}, false, []string{"[0] [1] [2 3] 10s", "[0 3] [1 2] [] 0s"}},
		"all but one":          {[]int{0, 1, 2}, false, []string{"[] [0] [1 2 3] 10s", "[] [0] [1 2 3] 5s", "[3] [0 1 2] [] 0s"}},
		"all": {[]int{0, 1, 2, 3}, false, []string{"[] [0] [1 2 3] 10s", "[] [0] [1 2 3] 5s", "[] [0] [1 2 3] 5s",
			"[] [0] [1 2 3] 0s"}},
		"the first, with a lock": {[]int{0}, true, []string{"[] [0] [1 2 3] 10s", "[] [0] [1 2 3] 5s", "[] [0] [1 2 3] 5s",
			"[] [0] [1 2 3] 0s"}},
		"the second, with a lock": {[]int{1}, true, []string{"[0] [1] [2 3] 10s", "[] [1] [0 2 3] 5s", "[] [1] [0 2 3] 5s",
			"[] [1] [0 2 3] 0s"}},
		"the last, with a lock": {[]int{3}, true, []string{"[0 1 2] [3] [] 5s", "[] [3] [0 1 2] 5s", "[] [3] [0 1 2] 5s"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := callqueue.New(5*time.Second, nil)
				end := make(chan struct{})
				defer close(end)
				var locked atomic.Bool
				discover := func(hangs []int) string {
					start := time.Now()
					found, err := List(kind, 4, l.Hung, func(index int) (*Device, error) {
						d := device(index, "", 0)
						hang := slices.Contains(hangs, index)
						_, err := callqueue.Run(t.Context(), l, index, fmt.Sprintf("ask(%d)", index), func() (int, error) {
							if hang || locked.Load() {
								locked.CompareAndSwap(false, tt.lock)
								<-end
							}
							return 0, nil
						})
						d.ID, d.Minor = accel.DeviceID(fmt.Sprint(index)), index
						return d, err
					})
					if err != nil {
						t.Fatal(err)
					}
					devices, silent := []int{}, []int{}
					for _, d := range found.Devices {
						devices = append(devices, d.Index)
					}
					for _, f := range found.Unasked {
						silent = append(silent, f.Index)
					}
					return fmt.Sprint(devices, slices.Sorted(maps.Keys(faults(found.Faults))), silent, time.Since(start))
				}
				for i, want := range tt.want {
					if got := discover(tt.hangs); got != want {
						t.Errorf("discovery %d: devices, faults, not asked and time are %s, want %s", i, got, want)
					}
				}
			})
		})
	}
}

func TestUnanswered(t *testing.T) {
	code := backend.Fault{Err: fmt.Errorf("card 0: %w", &libloader.CodeError{})}
	other := backend.Fault{Err: errors.New("no memory")}
	for name, tt := range map[string]struct {
		l    Listing[*Device]
		want bool
	}{
		"no devices":           {Listing[*Device]{}, false},
		"all fail":             {Listing[*Device]{Faults: []backend.Fault{code, code}}, true},
		"one says nonsense":    {Listing[*Device]{Faults: []backend.Fault{code, other}}, false},
		"one can be described": {Listing[*Device]{Devices: []*Device{device(0, "a", 0)}, Faults: []backend.Fault{code}}, false},
	} {
		if got := tt.l.Unanswered(); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

func TestRecordRemembersWhoWasWhere(t *testing.T) {
	r := New(kind, backend.Options{})
	if last := r.Last(); last.Round != 0 {
		t.Errorf("round is %d before anything was found", last.Round)
	}
	round := func(want uint64, l Listing[*Device]) backend.Found {
		t.Helper()
		found := Record(r, l)
		if got := r.Last(); got.Round != want || !cmp.Equal(got.Devices, found.Devices) {
			t.Errorf("last is %+v, want round %d with %v", got, want, found.Devices)
		}
		return found
	}
	round(1, listing(device(0, "a", 0), device(1, "b", 1)))
	round(1, listing(device(0, "a", 0), device(1, "b", 1)))
	lost := listing(device(0, "a", 0))
	lost.Faults = []backend.Fault{{Index: 1, Err: errors.New("lost")}, {Index: 2, Err: errors.New("new")}}
	if diff := cmp.Diff(map[int]string{1: "b: lost", 2: ": new"}, faults(round(2, lost).Faults)); diff != "" {
		t.Errorf("faults (-want +got):\n%s", diff)
	}
	// b is elsewhere, so that what is wrong at its old place is not b's.
	moved := listing(device(0, "b", 1))
	moved.Faults = []backend.Fault{{Index: 1, Err: errors.New("lost")}}
	if diff := cmp.Diff(map[int]string{1: ": lost"}, faults(round(3, moved).Faults)); diff != "" {
		t.Errorf("faults after a move (-want +got):\n%s", diff)
	}
}

func TestEdits(t *testing.T) {
	root := t.TempDir()
	options := backend.Options{DriverRoot: root, HostDriverRoot: "/run/acme"}
	r := New(kind, options)
	Record(r, listing(device(0, "b", 5), device(1, "a", 6)))
	edits := func() (backend.Edits, []string) {
		t.Helper()
		e, names, err := r.Edits("a", "b", "a")
		if err != nil {
			t.Fatal(err)
		}
		return e, names
	}
	if got, _ := edits(); got.DeviceNodes[0].HostPath != "/dev/acme5" {
		t.Errorf("below a driver root without dev, device files are %v, want the host's own", got.DeviceNodes)
	}
	if err := os.MkdirAll(filepath.Join(root, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	got, names := edits()
	want := backend.Edits{
		DeviceNodes: []backend.DeviceNode{
			{Path: "/dev/acme5", HostPath: "/run/acme/dev/acme5", Permissions: "rw"},
			{Path: "/dev/acme6", HostPath: "/run/acme/dev/acme6", Permissions: "rw"},
		},
		CDIDevices: []backend.CDIDevice{{Kind: "acme.example/card", Name: "b"}, {Kind: "acme.example/card", Name: "a"}},
	}
	if diff := cmp.Diff(want, got); diff != "" || !cmp.Equal(names, []string{"b", "a"}) {
		t.Errorf("names are %q, edits (-want +got):\n%s", names, diff)
	}
	if err := os.WriteFile(filepath.Join(root, "dev/acmectl"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if got, _ := edits(); len(got.DeviceNodes) != 3 || got.DeviceNodes[2].Path != "/dev/acmectl" {
		t.Errorf("with a shared file, device files are %v", got.DeviceNodes)
	}
	options.IndexInEnv, options.CDIKind = true, "example.com/other"
	r = New(kind, options)
	Record(r, listing(device(0, "b", 5), device(1, "a", 6)))
	if got, names := edits(); !cmp.Equal(names, []string{"0", "1"}) || got.CDIDevices[0].Kind != "example.com/other" {
		t.Errorf("by the options, names are %q and CDI devices %v", names, got.CDIDevices)
	}
}

func TestEditsRefuse(t *testing.T) {
	r := New(kind, backend.Options{})
	Record(r, listing(device(0, "a", 0), device(1, "b", 1), device(2, "c", 2)))
	Record(r, listing(device(0, "c", 2), device(3, "d", 1)))
	for want, ids := range map[string][]accel.DeviceID{
		"acme: no device is asked for":                   nil,
		"acme: device e was never found on this node":    {"c", "e"},
		"acme: device a was card 0, which is c now":      {"a"},
		"acme: device b had /dev/acme1, which d has now": {"b"},
	} {
		if e, _, err := r.Edits(ids...); err == nil || err.Error() != want {
			t.Errorf("Edits(%v) = %v, %v; want %s", ids, e, err, want)
		}
	}
	if _, _, err := r.Edits("c", "d"); err != nil {
		t.Errorf("Edits of those that are there: %v", err)
	}
}

func TestCheckUUID(t *testing.T) {
	for uuid, want := range map[string]string{
		"GPU-1_a.B": "",
		"":          "its uuid is empty",
		"a:b":       `its uuid "a:b" has characters other than letters, digits and -_. in it`,
		"a b":       `its uuid "a b" has characters other than letters, digits and -_. in it`,
		"ä":         `its uuid "ä" has characters other than letters, digits and -_. in it`,
	} {
		got := ""
		if err := CheckUUID(uuid, "-_."); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("CheckUUID(%q) = %q, want %q", uuid, got, want)
		}
	}
}

func TestMemory(t *testing.T) {
	if got, err := Memory("acmeMemory", 16<<30); got != 16<<30 || err != nil {
		t.Errorf("Memory = %d, %v", got, err)
	}
	for bytes, want := range map[uint64]string{
		0:       "it has no memory, acmeMemory says 0 bytes",
		1 << 63: "acmeMemory says 9223372036854775808 bytes, which cannot be",
	} {
		if _, err := Memory("acmeMemory", bytes); err == nil || err.Error() != want {
			t.Errorf("of %d bytes: %v, want %s", bytes, err, want)
		}
	}
}
