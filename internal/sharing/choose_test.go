package sharing

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
)

func slot(index int, id string, free int) place.Slot {
	return place.Slot{Index: index, ID: accel.DeviceID(id), Total: 16, Free: accel.Units(free)}
}

func sick(s place.Slot) place.Slot { s.Unhealthy = true; return s }

// pod is a waiting pod with app containers of these sizes.
func pod(name, granted string, at int, sizes ...int) Waiting {
	w := Waiting{Pod: accel.PodRef{UID: name, Namespace: "ns", Name: name}, Granted: accel.DeviceID(granted), At: time.Unix(int64(at), 0)}
	for _, s := range sizes {
		w.Request.Containers = append(w.Request.Containers, accel.ContainerRequest{Kind: accel.AppContainer, Units: accel.Units(s)})
	}
	return w
}

// served marks the first n containers as served on a device.
func (w Waiting) served(n int, device string) Waiting {
	w.Next, w.Held = n, accel.DeviceID(device)
	for _, c := range w.Request.Containers[:n] {
		w.HeldUnits += c.Units
	}
	return w
}

func (w Waiting) admitting() Waiting { w.Admitting = true; return w }

func TestChoose(t *testing.T) {
	two := []place.Slot{slot(0, "a", 16), slot(1, "b", 16)}
	tests := map[string]struct {
		size    int
		must    string
		reused  int
		slots   []place.Slot
		waiting []Waiting
		want    string
		pod     int
		refused string
	}{
		"the granted device": {
			size: 4, slots: two, waiting: []Waiting{pod("p", "b", 1, 4)}, want: "b", pod: 0,
		},
		"the one that kubelet has taken up": {
			size: 4, slots: two, waiting: []Waiting{pod("old", "a", 1, 4), pod("now", "b", 2, 4).admitting(), pod("next", "a", 0, 4)}, want: "b", pod: 1,
		},
		"the one that kubelet has taken up, though it has no grant": {
			size: 4, slots: []place.Slot{slot(0, "a", 16), slot(1, "b", 11)},
			waiting: []Waiting{pod("old", "a", 1, 4), pod("now", "", 2, 4).admitting()}, want: "b", pod: 1,
		},
		"the oldest grant of that size": {
			size: 4, slots: two, waiting: []Waiting{pod("young", "a", 2, 4), pod("old", "b", 1, 4), pod("other", "a", 0, 8)}, want: "b", pod: 1,
		},
		"equal age: the uid decides": {
			size: 4, slots: two, waiting: []Waiting{pod("y", "a", 1, 4), pod("x", "b", 1, 4)}, want: "b", pod: 1,
		},
		"units to be reused name the device": {
			size: 6, must: "b", reused: 4, slots: two, waiting: []Waiting{pod("p", "a", 1, 6)}, want: "b", pod: -1,
		},
		"units to be reused, but no room for more": {
			size: 6, must: "b", reused: 4, slots: []place.Slot{slot(0, "a", 16), slot(1, "b", 1)},
			refused: "has 1 of the 2 more",
		},
		"a pod that is being admitted goes before older grants": {
			size: 4, slots: two, waiting: []Waiting{pod("old", "a", 1, 4), pod("now", "b", 2, 8, 4).served(1, "b")}, want: "b", pod: 1,
		},
		"a pod stays on its device even if that is unhealthy": {
			size: 4, slots: []place.Slot{slot(0, "a", 16), sick(slot(1, "b", 16))},
			waiting: []Waiting{pod("now", "b", 2, 8, 4).served(1, "b")}, want: "b", pod: 0,
		},
		"a pod is never split": {
			size: 4, slots: []place.Slot{slot(0, "a", 16), slot(1, "b", 3)},
			waiting: []Waiting{pod("now", "b", 2, 8, 4).served(1, "b")}, refused: "share device b, which has 3 of the 4 units",
		},
		"a pod that kubelet dropped half way does not hold up the next": {
			size: 4, slots: []place.Slot{slot(0, "a", 16), slot(1, "b", 3)},
			waiting: []Waiting{pod("dropped", "b", 1, 8, 4).served(1, "b"), pod("next", "a", 2, 4)}, want: "a", pod: 1,
		},
		"the granted device must hold all containers": {
			size: 4, slots: []place.Slot{slot(0, "a", 7), slot(1, "b", 16)},
			waiting: []Waiting{pod("p", "a", 1, 4, 4)}, want: "b", pod: 0,
		},
		"the granted device is unhealthy now": {
			size: 4, slots: []place.Slot{sick(slot(0, "a", 16)), slot(1, "b", 8), slot(2, "c", 5)},
			waiting: []Waiting{pod("p", "a", 1, 4)}, want: "c", pod: 0,
		},
		"the granted device is gone": {
			size: 4, slots: []place.Slot{slot(1, "b", 8)}, waiting: []Waiting{pod("p", "a", 1, 4)}, want: "b", pod: 0,
		},
		"without a grant: best fit": {
			size: 4, slots: []place.Slot{slot(0, "a", 16), slot(1, "b", 5)}, waiting: []Waiting{pod("p", "", 1, 4)}, want: "b", pod: 0,
		},
		"without a grant: best fit for all containers": {
			size: 4, slots: []place.Slot{slot(0, "a", 16), slot(1, "b", 5)}, waiting: []Waiting{pod("p", "", 1, 4, 4)}, want: "a", pod: 0,
		},
		"without a grant: not what was promised to others": {
			size: 4, slots: []place.Slot{slot(0, "a", 16), slot(1, "b", 5)},
			waiting: []Waiting{pod("p", "", 1, 4), pod("q", "b", 2, 3)}, want: "a", pod: 0,
		},
		"without a grant and all is promised": {
			size: 4, slots: []place.Slot{slot(0, "a", 5)},
			waiting: []Waiting{pod("p", "", 1, 4), pod("q", "a", 2, 3)}, refused: "ns/p needs 4 units of one device, at most 2 are free and not promised",
		},
		"granted goes before not granted": {
			size: 4, slots: two, waiting: []Waiting{pod("p", "", 1, 4), pod("q", "b", 2, 4)}, want: "b", pod: 1,
		},
		"nobody known: the most room": {
			size: 4, slots: []place.Slot{slot(0, "a", 8), slot(1, "b", 12)}, want: "b", pod: -1,
		},
		"nobody known and no room": {
			size: 4, slots: []place.Slot{slot(0, "a", 3)}, pod: -1, refused: "does not know needs 4 units",
		},
		"a refusal does not count the pod's own promise": {
			size: 4, slots: []place.Slot{slot(0, "a", 3)}, waiting: []Waiting{pod("p", "a", 1, 4)}, refused: "ns/p needs 4 units of one device, at most 3 are free",
		},
		"fits in sum, not on one": {
			size: 20, slots: two, waiting: []Waiting{pod("p", "a", 1, 20)}, refused: "at most 16",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := Choose(accel.Units(tt.size), accel.DeviceID(tt.must), accel.Units(tt.reused), tt.slots, tt.waiting)
			if tt.refused != "" {
				if !errors.Is(err, ErrNoRoom) || !strings.Contains(err.Error(), tt.refused) {
					t.Fatalf("want a refusal with %q, got %v, %v", tt.refused, got, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if want := (Choice{Device: accel.DeviceID(tt.want), Pod: tt.pod}); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// FuzzChoose checks what must hold for any input: the device has room for what
// is asked, pods stay together, and nothing panics.
func FuzzChoose(f *testing.F) {
	f.Add([]byte{4, 16, 16, 1, 4, 0})
	f.Add([]byte{1, 2, 3, 4, 5, 6, 7, 8, 9})
	f.Fuzz(func(t *testing.T, in []byte) {
		next := func(n int) int {
			if len(in) == 0 {
				return 0
			}
			v := int(in[0]) % n
			in = in[1:]
			return v
		}
		names := []string{"", "a", "b", "c"}
		size := 1 + next(12)
		var slots []place.Slot
		for i := range 3 {
			s := slot(i, names[i+1], next(17))
			s.Unhealthy = next(5) == 0
			slots = append(slots, s)
		}
		var waiting []Waiting
		for range next(6) {
			w := pod(string(rune('p'+next(9))), names[next(4)], next(5), 1+next(12), 1+next(12))
			w.Admitting = next(4) == 0
			if next(3) == 0 {
				w = w.served(1, names[1+next(3)])
			}
			waiting = append(waiting, w)
		}
		must, reused := accel.DeviceID(names[next(4)]), accel.Units(0)
		if must != "" {
			reused = accel.Units(next(size))
		}
		c, err := Choose(accel.Units(size), must, reused, slots, waiting)
		if err != nil {
			if !errors.Is(err, ErrNoRoom) {
				t.Errorf("unexpected error %v", err)
			}
			return
		}
		for _, s := range slots {
			if s.ID == c.Device && s.Free < accel.Units(size)-reused {
				t.Errorf("device %s has %d free, %d were asked", s.ID, s.Free, size)
			}
			if s.ID == c.Device && s.Unhealthy && must == "" && (c.Pod < 0 || waiting[c.Pod].Held != c.Device) {
				t.Errorf("a new pod went to the unhealthy device %s", s.ID)
			}
		}
		if must != "" && c.Device != must {
			t.Errorf("kubelet wants units of %s reused and gets %s", must, c.Device)
		}
		if must == "" && c.Pod >= 0 && waiting[c.Pod].Held != "" && waiting[c.Pod].Held != c.Device {
			t.Errorf("pod %s is split between %s and %s", waiting[c.Pod].Pod, waiting[c.Pod].Held, c.Device)
		}
	})
}
