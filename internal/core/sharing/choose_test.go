package sharing

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

func slot(index int, id string, free int) place.Slot {
	return place.Slot{Index: index, ID: accel.DeviceID(id), Total: 16, Free: accel.Units(free)}
}

func sick(s place.Slot) place.Slot { s.Unhealthy = true; return s }

// pod is a waiting pod with app containers of these sizes.
func pod(name, granted string, at int, sizes ...int) Waiting {
	w := Waiting{Pod: accel.PodRef{UID: name, Namespace: "ns", Name: name}, At: time.Unix(int64(at), 0)}
	for _, d := range strings.Fields(granted) {
		w.Granted = append(w.Granted, accel.DeviceID(d))
	}
	for _, s := range sizes {
		w.Request.Containers = append(w.Request.Containers, accel.ContainerRequest{Kind: accel.AppContainer, Units: accel.Units(s)})
	}
	return w
}

// served marks the first n containers as served on devices, in equal parts.
func (w Waiting) served(n int, devices string) Waiting {
	var units accel.Units
	for _, c := range w.Request.Containers[:n] {
		units += c.Units
	}
	w.Next = n
	all := strings.Fields(devices)
	for _, d := range all {
		w.Held = append(w.Held, Part{accel.DeviceID(d), units / accel.Units(len(all))})
	}
	return w
}

// on makes the pod ask for a number of devices.
func (w Waiting) on(devices int) Waiting { w.Request.Devices = devices; return w }

func (w Waiting) only(models ...string) Waiting {
	w.Request.Selection = &accel.Selection{UseModels: models}
	return w
}

// parts renders parts as "a:4 b:4".
func parts(all []Part) string {
	var out []string
	for _, p := range all {
		out = append(out, fmt.Sprintf("%s:%d", p.Device, p.Units))
	}
	return strings.Join(out, " ")
}

func nodeOf(slots []place.Slot) place.Node {
	return place.Node{Slots: slots, CPU: place.Unlimited, Memory: place.Unlimited}
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
			size: 4, slots: two, waiting: []Waiting{pod("old", "a", 1, 4), pod("now", "b", 2, 4).admitting(), pod("next", "a", 0, 4)},
			want: "b", pod: 1,
		},
		"the one that kubelet has taken up, though it has no grant": {
			size: 4, slots: []place.Slot{slot(0, "a", 16), slot(1, "b", 11)},
			waiting: []Waiting{pod("old", "a", 1, 4), pod("now", "", 2, 4).admitting()}, want: "b", pod: 1,
		},
		"the oldest grant of that size": {
			size: 4, slots: two, waiting: []Waiting{pod("young", "a", 2, 4), pod("old", "b", 1, 4), pod("other", "a", 0, 8)},
			want: "b", pod: 1,
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
			waiting: []Waiting{pod("now", "b", 2, 8, 4).served(1, "b")}, refused: "share device b, and device b has 3 of the 4 units",
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
			waiting: []Waiting{pod("p", "", 1, 4), pod("q", "a", 2, 3)},
			refused: "ns/p needs 4 units of one device, at most 2 are free and not promised",
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
			size: 4, slots: []place.Slot{slot(0, "a", 3)}, waiting: []Waiting{pod("p", "a", 1, 4)},
			refused: "ns/p needs 4 units of one device, at most 3 are free",
		},
		"fits in sum, not on one": {
			size: 20, slots: two, waiting: []Waiting{pod("p", "a", 1, 20)}, refused: "at most 16",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var must []Part
			if tt.must != "" {
				must = []Part{{accel.DeviceID(tt.must), accel.Units(tt.reused)}}
			}
			got, err := Choose(accel.Units(tt.size), must, nodeOf(tt.slots), tt.waiting)
			if tt.refused != "" {
				if !errors.Is(err, ErrNoRoom) || !strings.Contains(err.Error(), tt.refused) {
					t.Fatalf("want a refusal with %q, got %v, %v", tt.refused, got, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want := Choice{Parts: []Part{{accel.DeviceID(tt.want), accel.Units(tt.size - tt.reused)}}, Pod: tt.pod}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

func TestChooseSeveral(t *testing.T) {
	three := []place.Slot{slot(0, "a", 16), slot(1, "b", 16), slot(2, "c", 16)}
	models := slices.Clone(three)
	models[0].Model, models[1].Model, models[2].Model = "S60", "T20", "S60"
	tests := map[string]struct {
		size    int
		must    []Part
		slots   []place.Slot
		waiting []Waiting
		want    string
		pod     int
		refused string
	}{
		"the granted devices, in equal parts": {
			size: 12, slots: three, waiting: []Waiting{pod("p", "a c", 1, 12).on(2)}, want: "a:6 c:6",
		},
		"the grant counts, not what the annotation says by now": {
			size: 12, slots: three, waiting: []Waiting{pod("p", "a b c", 1, 12).on(2)}, want: "a:4 b:4 c:4",
		},
		"the next container stays on the devices": {
			size: 4, slots: three, waiting: []Waiting{pod("p", "a c", 1, 12, 4).on(2).served(1, "b c")}, want: "b:2 c:2",
		},
		"one of the granted devices has no room for its part of the peak": {
			size: 8, slots: []place.Slot{slot(0, "a", 16), slot(1, "b", 5), slot(2, "c", 16)},
			waiting: []Waiting{pod("p", "a b", 1, 8, 8).on(2)}, want: "a:4 c:4",
		},
		"one of the granted devices is unhealthy": {
			size: 8, slots: []place.Slot{slot(0, "a", 16), sick(slot(1, "b", 16)), slot(2, "c", 16)},
			waiting: []Waiting{pod("p", "a b", 1, 8).on(2)}, want: "a:4 c:4",
		},
		"without a grant": {
			size: 24, slots: three, waiting: []Waiting{pod("p", "", 1, 24).on(2)}, want: "a:12 b:12",
		},
		"without a grant: of the models that the pod takes": {
			size: 24, slots: models, waiting: []Waiting{pod("p", "", 1, 24).on(2).only("S60")}, want: "a:12 c:12",
		},
		"without a grant: not what was promised to others": {
			size: 20, slots: three, waiting: []Waiting{pod("p", "", 1, 20).on(2), pod("q", "a b", 2, 16).on(2)},
			refused: "ns/p needs 10 units of each of 2 devices, at most 16 are free",
		},
		"what others still take is their part alone": {
			size: 14, slots: three, waiting: []Waiting{pod("p", "", 1, 14).on(2), pod("q", "a b", 2, 18).on(2)}, want: "a:7 b:7",
		},
		"no equal parts": {
			size: 5, slots: three, waiting: []Waiting{pod("p", "", 1, 5).on(2)},
			refused: "ns/p asks for 5 units on 2 devices, which is no equal part",
		},
		"more than one device has": {
			size: 40, slots: three, waiting: []Waiting{pod("p", "a b", 1, 40).on(2)},
			refused: "needs 20 units of each of 2 devices, at most 16",
		},
		"a device of the pod is full": {
			size: 4, slots: []place.Slot{slot(0, "a", 16), slot(1, "b", 1)},
			waiting: []Waiting{pod("p", "a b", 1, 8, 4).on(2).served(1, "a b")},
			refused: "share devices a and b, and device b has 1 of the 2",
		},
		"units to be reused, and more": {
			size: 12, must: []Part{{"a", 4}, {"b", 4}}, slots: three, want: "a:2 b:2", pod: -1,
		},
		"units to be reused of one device alone: the pod's other one gets more": {
			size: 8, must: []Part{{"a", 4}}, slots: three,
			waiting: []Waiting{pod("p", "a b", 1, 4, 8).on(2).with(1, Part{"a", 4}, Part{"b", 2})}, want: "a:1 b:3",
		},
		"units to be reused, and no room for more": {
			size: 12, must: []Part{{"a", 4}, {"b", 4}}, slots: []place.Slot{slot(0, "a", 16), slot(1, "b", 1)},
			refused: "device b, which has 1 of the 2 more",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := Choose(accel.Units(tt.size), tt.must, nodeOf(tt.slots), tt.waiting)
			if tt.refused != "" {
				if !errors.Is(err, ErrNoRoom) || !strings.Contains(err.Error(), tt.refused) {
					t.Fatalf("want a refusal with %q, got %v, %v", tt.refused, got, err)
				}
				return
			}
			if err != nil || parts(got.Parts) != tt.want || got.Pod != tt.pod {
				t.Errorf("got %s for pod %d, %v; want %s for pod %d", parts(got.Parts), got.Pod, err, tt.want, tt.pod)
			}
		})
	}
}

// with marks the first n containers as served with these parts.
func (w Waiting) with(n int, held ...Part) Waiting { w.Next, w.Held = n, held; return w }

func TestLevel(t *testing.T) {
	for _, tt := range []struct {
		held []Part
		more accel.Units
		want string
	}{
		{[]Part{{"a", 0}}, 5, "a:5"},
		{[]Part{{"a", 0}, {"b", 0}}, 5, "a:3 b:2"},
		{[]Part{{"a", 3}, {"b", 2}}, 5, "a:2 b:3"},
		{[]Part{{"a", 9}, {"b", 0}, {"c", 2}}, 4, "a:0 b:3 c:1"},
		{[]Part{{"a", 9}, {"b", 0}, {"c", 2}}, 0, "a:0 b:0 c:0"},
		{[]Part{{"a", 1}, {"b", 1}}, 0, "a:0 b:0"},
		{nil, 5, ""},
	} {
		if got := parts(level(tt.held, tt.more)); got != tt.want {
			t.Errorf("%d more beside %v: got %s, want %s", tt.more, tt.held, got, tt.want)
		}
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
			granted := []string{"", "a", "b", "c", "a b", "b c", "a b c"}[next(7)]
			w := pod(string(rune('p'+next(9))), granted, next(5), 1+next(12), 1+next(12)).on(next(3))
			w.Admitting = next(4) == 0
			if next(3) == 0 {
				w = w.served(1, []string{"a", "b", "c", "a c"}[next(4)])
			}
			waiting = append(waiting, w)
		}
		var must []Part
		for _, name := range names[1:] {
			if next(4) == 0 {
				must = append(must, Part{accel.DeviceID(name), accel.Units(next(size))})
			}
		}
		var reused accel.Units
		for _, m := range must {
			reused += m.Units
		}
		c, err := Choose(accel.Units(size), must, nodeOf(slots), waiting)
		if err != nil {
			if !errors.Is(err, ErrNoRoom) {
				t.Errorf("unexpected error %v", err)
			}
			return
		}
		got := -max(accel.Units(size)-reused, 0)
		chosen := map[accel.DeviceID]bool{}
		for _, part := range c.Parts {
			got += part.Units
			if chosen[part.Device] || part.Units < 0 {
				t.Errorf("a bad part: %v", c.Parts)
			}
			chosen[part.Device] = true
			for _, s := range slots {
				if s.ID != part.Device {
					continue
				}
				if s.Free < part.Units {
					t.Errorf("device %s has %d free, %d were chosen", s.ID, s.Free, part.Units)
				}
				if s.Unhealthy && len(must) == 0 && (c.Pod < 0 || len(waiting[c.Pod].Held) == 0) {
					t.Errorf("a new pod went to the unhealthy device %s", s.ID)
				}
			}
		}
		if got != 0 {
			t.Errorf("%v besides %v for %d units", c.Parts, must, size)
		}
		if !has(c.Parts, must) {
			t.Errorf("kubelet wants units of %v reused and gets %v", must, c.Parts)
		}
		if c.Pod >= 0 && len(waiting[c.Pod].Held) > 0 && (!has(c.Parts, waiting[c.Pod].Held) || !has(waiting[c.Pod].Held, c.Parts)) {
			t.Errorf("pod %s is split between %v and %v", waiting[c.Pod].Pod, waiting[c.Pod].Held, c.Parts)
		}
	})
}
