package sharing

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

func share(index int, id string, units int) accel.Share {
	return accel.Share{Device: accel.Device{Index: index, ID: accel.DeviceID(id)}, Units: accel.Units(units)}
}

func nobody(accel.DeviceID) int { return 0 }

func place1(t *testing.T, l *Layout, held func(accel.DeviceID) int, shares ...accel.Share) *Layout {
	t.Helper()
	next, err := l.Place(shares, held)
	if err != nil {
		t.Fatal(err)
	}
	return next
}

func TestIDs(t *testing.T) {
	seen := map[string]bool{}
	longest := 0
	for n := range int64(256000) {
		id := formatID(n)
		if seen[id] {
			t.Fatalf("id %q is given out twice", id)
		}
		seen[id] = true
		longest = max(longest, len(id))
		if back, ok := parseID(id); !ok || back != n {
			t.Fatalf("%q reads as %d, %v; it was made from %d", id, back, ok, n)
		}
	}
	if longest != 3 {
		t.Errorf("8 cards of 32 GB in units of 0.001 GB have ids of up to %d characters, want 3", longest)
	}
	for _, bad := range []string{"", "ü", "a b", "aaaaaa", "_____", "a\x00"} {
		if n, ok := parseID(bad); ok {
			t.Errorf("%q was read as %d", bad, n)
		}
	}
}

func FuzzParseID(f *testing.F) {
	f.Add("0")
	f.Add("-_a")
	f.Fuzz(func(t *testing.T, id string) {
		if n, ok := parseID(id); ok && formatID(n) != id {
			t.Errorf("%q reads as %d, which is written %q", id, n, formatID(n))
		}
	})
}

func TestLayoutKeepsIDs(t *testing.T) {
	first := place1(t, &Layout{}, nobody, share(0, "a", 16), share(1, "b", 16), share(2, "c", 32))
	idsOfC := first.IDs(nil, "c")

	t.Run("when a card is lost and indexes shift", func(t *testing.T) {
		l := place1(t, first, nobody, share(0, "a", 16), share(1, "c", 32))
		if diff := cmp.Diff(idsOfC, l.IDs(nil, "c")); diff != "" {
			t.Errorf("ids of c changed:\n%s", diff)
		}
		if got := len(l.IDs(nil, "b")); got != 16 {
			t.Errorf("the lost card has %d ids left, want 16: it may return", got)
		}
	})
	t.Run("when the order changes", func(t *testing.T) {
		l := place1(t, first, nobody, share(0, "c", 32), share(1, "b", 16), share(2, "a", 16))
		if diff := cmp.Diff(idsOfC, l.IDs(nil, "c")); diff != "" {
			t.Errorf("ids of c changed:\n%s", diff)
		}
	})
	t.Run("and gives those of a card that is gone to a new one", func(t *testing.T) {
		l := place1(t, first, nobody, share(0, "a", 16), share(1, "new", 8), share(2, "c", 32))
		if diff := cmp.Diff(first.IDs(nil, "b")[:8], l.IDs(nil, "new")); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		if l.IDs(nil, "b") != nil {
			t.Error("the card that is gone still has ids")
		}
	})
	t.Run("but not while containers hold them", func(t *testing.T) {
		holdB := func(d accel.DeviceID) int { return map[accel.DeviceID]int{"b": 1}[d] }
		l := place1(t, first, holdB, share(0, "a", 16), share(1, "new", 8), share(2, "c", 32))
		for _, id := range l.IDs(nil, "new") {
			if d, _ := first.Device(id); d != "" {
				t.Errorf("id %q of %s was given to another card", id, d)
			}
		}
	})
	t.Run("when a card's memory changes under a pod, and says so", func(t *testing.T) {
		holdC := func(d accel.DeviceID) int { return map[accel.DeviceID]int{"c": 5}[d] }
		l, err := first.Place([]accel.Share{share(0, "a", 16), share(1, "b", 16), share(2, "c", 64)}, holdC)
		if err == nil || !strings.Contains(err.Error(), "device c would change from 32 to 64 units while containers hold 5") {
			t.Errorf("error is %v", err)
		}
		if diff := cmp.Diff(idsOfC, l.IDs(nil, "c")); diff != "" {
			t.Errorf("ids of c changed:\n%s", diff)
		}
	})
}

// TestLayoutUnderRandomChange checks, after each of many random changes, that
// ids of devices that stay did not change and that no id has two devices.
func TestLayoutUnderRandomChange(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	l := &Layout{}
	for step := range 2000 {
		var shares []accel.Share
		for i := range 10 {
			if rnd.IntN(3) > 0 {
				shares = append(shares, share(len(shares), fmt.Sprint("d", i), 1+rnd.IntN(40)*rnd.IntN(2)))
			}
		}
		holds := map[accel.DeviceID]int{}
		for _, r := range l.Ranges() {
			if rnd.IntN(2) == 0 {
				holds[r.Device] = 1
			}
		}
		next, _ := l.Place(shares, func(d accel.DeviceID) int { return holds[d] })
		owner := map[string]accel.DeviceID{}
		for _, r := range next.Ranges() {
			for _, id := range next.IDs(nil, r.Device) {
				if other, twice := owner[id]; twice {
					t.Fatalf("step %d: id %q belongs to %s and %s", step, id, other, r.Device)
				}
				owner[id] = r.Device
				if d, ok := next.Device(id); !ok || d != r.Device {
					t.Fatalf("step %d: id %q of %s is looked up as %s", step, id, r.Device, d)
				}
			}
		}
		for d := range holds {
			if before, after := l.IDs(nil, d), next.IDs(nil, d); !cmp.Equal(before, after) {
				t.Fatalf("step %d: ids of %s changed while held: %v to %v", step, d, before, after)
			}
		}
		for _, s := range shares {
			if _, ok := next.Range(s.ID); !ok {
				t.Fatalf("step %d: device %s has no ids", step, s.ID)
			}
		}
		l = next
	}
}

func TestRecover(t *testing.T) {
	ids := func(numbers ...int64) []string {
		var out []string
		for _, n := range numbers {
			out = append(out, formatID(n))
		}
		return out
	}
	shares := []accel.Share{share(0, "a", 16), share(1, "b", 16), share(2, "c", 8)}
	tests := map[string]struct {
		claims map[accel.DeviceID][]string
		wrong  string
	}{
		"nothing is held":               {claims: nil},
		"as laid out at first":          {claims: map[accel.DeviceID][]string{"a": ids(0, 15), "b": ids(16), "c": ids(39)}},
		"in another order":              {claims: map[accel.DeviceID][]string{"b": ids(3), "a": ids(16, 20), "c": ids(32)}},
		"with gaps":                     {claims: map[accel.DeviceID][]string{"c": ids(500), "a": ids(900)}},
		"held apart as far as possible": {claims: map[accel.DeviceID][]string{"a": ids(100, 115), "b": ids(116, 131)}},
		"too far apart":                 {claims: map[accel.DeviceID][]string{"a": ids(0, 16)}, wrong: "do not fit its 16 units"},
		"across each other":             {claims: map[accel.DeviceID][]string{"a": ids(0, 10), "b": ids(5)}, wrong: "do not fit"},
		"of a device that is away":      {claims: map[accel.DeviceID][]string{"z": ids(1)}, wrong: "device z, which is not there now"},
		"of another program":            {claims: map[accel.DeviceID][]string{"a": {"GCU-_-1"}}, wrong: "is none of this program's"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l, err := Recover(shares, tt.claims)
			if tt.wrong != "" {
				if err == nil || !strings.Contains(err.Error(), tt.wrong) {
					t.Errorf("want an error with %q, got %v", tt.wrong, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := NewLayout(l.Ranges()); err != nil {
				t.Error(err)
			}
			for d, held := range tt.claims {
				for _, id := range held {
					if got, _ := l.Device(id); got != d {
						t.Errorf("id %q belongs to %q, want %s", id, got, d)
					}
				}
			}
			for _, s := range shares {
				if got := len(l.IDs(nil, s.ID)); got != int(s.Units) {
					t.Errorf("device %s has %d ids, want %d", s.ID, got, s.Units)
				}
			}
		})
	}
}

func TestNewLayoutRefuses(t *testing.T) {
	for name, ranges := range map[string][]Range{
		"overlap":      {{Device: "a", Start: 0, Units: 2}, {Device: "b", Start: 1, Units: 2}},
		"two ranges":   {{Device: "a", Start: 0, Units: 2}, {Device: "a", Start: 5, Units: 2}},
		"no device":    {{Start: 0, Units: 2}},
		"negative":     {{Device: "a", Start: -1, Units: 2}},
		"out of range": {{Device: "a", Start: 1 << 62, Units: 1 << 62}},
	} {
		if l, err := NewLayout(ranges); err == nil {
			t.Errorf("%s: accepted as %v", name, l.Ranges())
		}
	}
}

func TestRuns(t *testing.T) {
	l, err := (&Layout{}).Place([]accel.Share{
		{Units: 100, Device: accel.Device{ID: "a"}}, {Units: 100, Device: accel.Device{ID: "b", Index: 1}},
	}, func(accel.DeviceID) int { return 0 })
	if err != nil {
		t.Fatal(err)
	}
	a, b := l.IDs(nil, "a"), l.IDs(nil, "b")
	held := []string{b[99], a[3], b[0], a[99], b[7], a[70]}
	runs, err := Runs(held, 2)
	if err != nil || !slices.Equal(runs[0], []string{a[3], a[70], a[99]}) || !slices.Equal(runs[1], []string{b[0], b[7], b[99]}) {
		t.Errorf("runs %q, %v", runs, err)
	}
	if runs, err := Runs(held, 4); err == nil {
		t.Errorf("6 units of 4 devices: %q", runs)
	}
	if runs, err := Runs([]string{"!", a[0]}, 2); err == nil {
		t.Errorf("an id of somebody else: %q", runs)
	}
}
