package overuse

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// row returns a container's row; used is in MiB, allocated in GiB.
func row(container string, allocated, used uint64) wire.ContainerUsage {
	return wire.ContainerUsage{Namespace: "team", Pod: "train", PodUID: "u", Container: container, Resource: "v/memory",
		AllocatedBytes: new(allocated * gib), UsedBytes: new(used * mib), Processes: 1}
}

// whole and rest have no allocation: a whole device, and processes of which only the pod
// is known.
func whole(used uint64) wire.ContainerUsage {
	r := row("main", 0, used)
	r.AllocatedBytes = nil
	return r
}

func rest(used uint64) wire.ContainerUsage {
	r := whole(used)
	r.Container = ""
	return r
}

// device returns a device of which as much is used as its rows say.
func device(rows ...wire.ContainerUsage) wire.DeviceUsage {
	d := wire.DeviceUsage{Vendor: "v", Device: "d", Containers: rows}
	for _, r := range rows {
		if r.UsedBytes != nil {
			d.UsedBytes += *r.UsedBytes
		}
	}
	return d
}

// with returns a changed copy.
func with[T any](value T, change func(*T)) T {
	change(&value)
	return value
}

// play makes a pass each 15 s over containers that started some time before the first one, and
// returns what each has shown: "+" for a beginning, "-" for an end, and then the current
// episodes with the age of each, "?" while it is not proven.
func play(w *Watch, start time.Time, age time.Duration, passes ...wire.DeviceUsage) (out []string) {
	for i, d := range passes {
		now := start.Add(time.Duration(i) * 15 * time.Second)
		changes := w.Look(Pass{
			Time: now, Devices: []wire.DeviceUsage{d}, Model: func(accel.DeviceID) string { return "m" },
			Started: func(wire.ContainerUsage) (time.Time, bool) { return start.Add(-age), true },
		})
		var text []string
		for _, e := range changes.Began {
			text = append(text, "+"+e.Container.Container)
		}
		for _, e := range changes.Ended {
			text = append(text, fmt.Sprint("-", e.Container.Container, " ", *e.Container.UsedBytes/mib))
		}
		for _, e := range changes.Current {
			since := "?"
			if !e.Since.IsZero() {
				since = fmt.Sprint(now.Sub(e.Since).Seconds())
			}
			text = append(text, e.Container.Container+" "+since)
		}
		out = append(out, strings.Join(text, " "))
	}
	return out
}

// times repeats a pass.
func times(n int, d wire.DeviceUsage) []wire.DeviceUsage {
	var out []wire.DeviceUsage
	for range n {
		out = append(out, d)
	}
	return out
}

func TestLook(t *testing.T) {
	over := device(row("main", 4, 6<<10))
	quiet, began := []string{"", "", "", ""}, []string{"", "", "", "+main main 45"}
	for name, tt := range map[string]struct {
		passes [][]wire.DeviceUsage
		want   []string
	}{
		"four passes in a row": {[][]wire.DeviceUsage{times(5, over)}, []string{"", "", "", "+main main 45", "main 60"}},
		"within the allocation": {[][]wire.DeviceUsage{times(5, device(row("main", 4, 4<<10)))},
			[]string{"", "", "", "", ""}},
		"within the tolerance of 2 %": {[][]wire.DeviceUsage{times(4, device(row("main", 10, 10<<10+204)))}, quiet},
		"beyond 2 %":                  {[][]wire.DeviceUsage{times(4, device(row("main", 10, 10<<10+205)))}, began},
		"within the least tolerance":  {[][]wire.DeviceUsage{times(4, device(row("main", 1, 1<<10+64)))}, quiet},
		"beyond the least tolerance":  {[][]wire.DeviceUsage{times(4, device(row("main", 1, 1<<10+65)))}, began},
		"three passes and a good one": {[][]wire.DeviceUsage{times(3, over), {device(row("main", 4, 10))}, times(3, over)},
			[]string{"", "", "", "", "", "", ""}},
		"three passes and a failed call": {
			[][]wire.DeviceUsage{times(3, over), {with(over, func(d *wire.DeviceUsage) { d.Problem = "lost" })}, times(4, over)},
			[]string{"", "", "", "", "", "", "", "+main main 45"}},
		"three passes and a sum above what is in use": {
			[][]wire.DeviceUsage{times(3, over), {with(over, func(d *wire.DeviceUsage) { d.SystemBytes = 4 << 10 * mib / 10 })},
				times(3, over)},
			[]string{"", "", "", "", "", "", ""}},
		"a sum a little above what is in use": {
			[][]wire.DeviceUsage{times(4, with(over, func(d *wire.DeviceUsage) { d.SystemBytes = 6 << 10 * mib / 20 }))},
			began},
		"three passes and an unknown amount": {
			[][]wire.DeviceUsage{times(3, over), {device(with(row("main", 4, 0), func(c *wire.ContainerUsage) { c.UsedBytes = nil }))},
				times(3, over)},
			[]string{"", "", "", "", "", "", ""}},
		"three passes and another allocation": {
			[][]wire.DeviceUsage{times(3, over), times(4, device(row("main", 3, 6<<10)))},
			[]string{"", "", "", "", "", "", "+main main 45"}},
		"an episode ends": {[][]wire.DeviceUsage{times(4, over), {device(row("main", 4, 4<<10))}, times(1, over)},
			[]string{"", "", "", "+main main 45", "-main 4096", ""}},
		"an episode goes on within the tolerance": {[][]wire.DeviceUsage{times(4, over), {device(row("main", 4, 4<<10+1))}},
			[]string{"", "", "", "+main main 45", "main 60"}},
		"an episode that a failed call interrupts": {
			[][]wire.DeviceUsage{times(4, over), {with(over, func(d *wire.DeviceUsage) { d.Problem = "lost" })}, times(2, over)},
			[]string{"", "", "", "+main main 45", "main ?", "main 0", "main 15"}},
		"an episode whose container ends": {[][]wire.DeviceUsage{times(4, over), {device()}},
			[]string{"", "", "", "+main main 45", "-main 0"}},
		"a whole device": {[][]wire.DeviceUsage{times(4, device(whole(9<<10)))}, quiet},
		"each container by itself": {[][]wire.DeviceUsage{times(4, device(row("main", 4, 6<<10), row("side", 4, 10)))},
			began},
		"the pod's sum is over": {[][]wire.DeviceUsage{times(4, device(rest(3<<10), row("main", 4, 3<<10)))},
			[]string{"", "", "", "+  45"}},
		"a container is over and the pod's sum is not": {
			[][]wire.DeviceUsage{times(4, device(rest(100), row("main", 4, 5<<10), row("side", 4, 1<<10)))}, began},
		"the pod's sum is not over": {[][]wire.DeviceUsage{times(4, device(rest(3<<10), row("main", 4, 3<<10), row("side", 4, 1<<10)))},
			quiet},
		"a pod with a container without bounds": {[][]wire.DeviceUsage{times(4, device(rest(9<<10), whole(0)))}, quiet},
		"an episode while only the pod is known of its processes": {
			[][]wire.DeviceUsage{times(4, over), {device(rest(6<<10), row("main", 4, 0))}, times(2, over)},
			[]string{"", "", "", "+main main 45", "main ?", "main 0", "main 15"}},
		"a process of which only the pod is known now and then": {
			[][]wire.DeviceUsage{times(2, over), {device(rest(10), row("main", 4, 6<<10))}, times(1, over)}, began},
		"a container is over beside others' processes, and the pod is not accused twice": {
			[][]wire.DeviceUsage{times(5, device(rest(3<<10), row("main", 4, 6<<10)))}, []string{"", "", "", "+main main 45", "main 60"}},
		"the pod's sum goes on without a rest": {
			[][]wire.DeviceUsage{times(4, device(rest(3<<10), row("a", 4, 3<<10), row("b", 1, 10))),
				{device(row("a", 4, 4<<10), row("b", 1, 1100))}, {device(row("a", 4, 4<<10), row("b", 1, 10))}},
			[]string{"", "", "", "+  45", " 60", "- 4106"}},
		"an episode that ends beside a rest": {
			[][]wire.DeviceUsage{times(4, over), {device(rest(10), row("main", 4, 1<<10))}},
			[]string{"", "", "", "+main main 45", "-main 1024"}},
		"a device that fails and whose container ended": {
			[][]wire.DeviceUsage{times(4, over), {{Vendor: "v", Device: "d", Problem: "lost"}}},
			[]string{"", "", "", "+main main 45", "-main 0"}},
	} {
		t.Run(name, func(t *testing.T) {
			var passes []wire.DeviceUsage
			for _, some := range tt.passes {
				passes = append(passes, some...)
			}
			got := play(New(map[string]uint64{"v": 0}), time.Unix(1000, 0), time.Hour, passes...)
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("passes (-want +got):\n%s", diff)
			}
		})
	}
}

// TestContextAllowance covers one context of each process, and no container is over while it
// is not known.
func TestContextAllowance(t *testing.T) {
	two := func(used, least uint64) wire.DeviceUsage {
		r := row("main", 4, used)
		r.Processes = 2
		d := device(r)
		if least > 0 {
			d.LeastProcessBytes = new(least * mib)
		}
		return d
	}
	began := []string{"", "", "", "+main main 45"}
	quiet := []string{"", "", "", ""}
	for name, tt := range map[string]struct {
		allowance map[string]uint64
		passes    []wire.DeviceUsage
		want      []string
	}{
		"configured, within":  {map[string]uint64{"v": 500 * mib}, times(4, two(5<<10, 1)), quiet},
		"configured, beyond":  {map[string]uint64{"v": 100 * mib}, times(4, two(5<<10, 4096)), began},
		"measured, within":    {nil, times(4, two(5<<10, 500)), quiet},
		"measured, beyond":    {nil, times(4, two(5<<10, 100)), began},
		"not known":           {map[string]uint64{"other": 0}, times(4, two(9<<10, 0)), quiet},
		"the least that was":  {nil, append(times(1, two(10, 100)), times(4, two(5<<10, 2000))...), append([]string{""}, began...)},
		"known after a while": {nil, append(times(2, two(9<<10, 0)), times(4, two(9<<10, 100))...), append([]string{"", ""}, began...)},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, play(New(tt.allowance), time.Unix(1000, 0), time.Hour, tt.passes...)); diff != "" {
				t.Errorf("passes (-want +got):\n%s", diff)
			}
		})
	}
}

// TestYoungContainers are not judged in their first minute, nor one whose start is not known.
func TestYoungContainers(t *testing.T) {
	over := device(row("main", 4, 6<<10))
	want := []string{"", "", "", "", "", "", "", "+main main 45"} // the 5th pass is the first that counts
	if diff := cmp.Diff(want, play(New(map[string]uint64{"v": 0}), time.Unix(1000, 0), 0, times(8, over)...)); diff != "" {
		t.Errorf("passes (-want +got):\n%s", diff)
	}
	w := New(map[string]uint64{"v": 0})
	for range 6 {
		changes := w.Look(Pass{Time: time.Unix(1000, 0), Devices: []wire.DeviceUsage{over},
			Model:   func(accel.DeviceID) string { return "" },
			Started: func(wire.ContainerUsage) (time.Time, bool) { return time.Time{}, false }})
		if len(changes.Current) > 0 {
			t.Fatalf("a container that does not run: %+v", changes.Current)
		}
	}
}

// TestRestart: another run of a container is judged as a new one.
func TestRestart(t *testing.T) {
	w := New(map[string]uint64{"v": 0})
	began, current := 0, 0
	look := func(at, started int64, used uint64) Changes {
		changes := w.Look(Pass{
			Time: time.Unix(at, 0), Devices: []wire.DeviceUsage{device(row("main", 4, used))},
			Model:   func(accel.DeviceID) string { return "" },
			Started: func(wire.ContainerUsage) (time.Time, bool) { return time.Unix(started, 0), started > 0 },
		})
		began, current = began+len(changes.Began), len(changes.Current)
		return changes
	}
	for at := int64(1000); at < 1060; at += 15 {
		look(at, 10, 6<<10)
	}
	if began != 1 || current != 1 {
		t.Fatalf("%d began, %d go on; want 1 and 1", began, current)
	}
	// It does not run, and its processes are gone.
	if changes := look(1060, 0, 0); len(changes.Ended) != 1 || current != 0 {
		t.Errorf("a container that uses nothing: %+v", changes)
	}
	for at := int64(1075); at < 1135; at += 15 {
		look(at, 10, 6<<10)
	}
	if changes := look(1135, 1130, 6<<10); len(changes.Ended) != 1 || *changes.Ended[0].Container.UsedBytes != 0 || current != 0 {
		t.Errorf("another run: %+v", changes)
	}
	began = 0
	for at := int64(1150); at < 1190; at += 15 {
		look(at, 1130, 6<<10)
	}
	if began != 0 {
		t.Error("another run is accused in its first minute")
	}
}

// TestAssured: what follows from a measured allowance is a report.
func TestAssured(t *testing.T) {
	for _, configured := range []bool{false, true} {
		allowance := map[string]uint64{}
		if configured {
			allowance["v"] = 0
		}
		w := New(allowance)
		d := with(device(row("main", 4, 6<<10)), func(d *wire.DeviceUsage) { d.LeastProcessBytes = new(uint64(8 * gib)) })
		var changes Changes
		for i := range 4 {
			changes = w.Look(Pass{Time: time.Unix(int64(1000+i), 0), Devices: []wire.DeviceUsage{d},
				Model:   func(accel.DeviceID) string { return "" },
				Started: func(wire.ContainerUsage) (time.Time, bool) { return time.Unix(0, 0), true }})
		}
		// A measured allowance is 1 GiB at most.
		if len(changes.Current) != 1 || changes.Current[0].Assured != configured {
			t.Errorf("configured %t: %+v", configured, changes.Current)
		}
	}
}

// TestConclusive: a pass in which no device could be measured proves nothing.
func TestConclusive(t *testing.T) {
	lost := wire.DeviceUsage{Vendor: "v", Device: "d", Problem: "lost"}
	for name, tt := range map[string]struct {
		devices []wire.DeviceUsage
		want    bool
	}{
		"no device": {nil, true}, "one that fails": {[]wire.DeviceUsage{lost}, false},
		"one of two fails": {[]wire.DeviceUsage{lost, device()}, true},
	} {
		changes := New(nil).Look(Pass{Devices: tt.devices, Model: func(accel.DeviceID) string { return "" }})
		if changes.Conclusive != tt.want {
			t.Errorf("%s: conclusive is %t", name, changes.Conclusive)
		}
	}
}

// TestPeak is the most that a container was over in its episode.
func TestPeak(t *testing.T) {
	w := New(map[string]uint64{"v": 0})
	var got []uint64
	for i, used := range []uint64{30 << 10, 4 << 10, 9 << 10, 6 << 10, 5 << 10, 6 << 10, 8 << 10, 5 << 10} {
		changes := w.Look(Pass{
			Time: time.Unix(int64(1000+i), 0), Devices: []wire.DeviceUsage{device(row("main", 4, used))},
			Model:   func(accel.DeviceID) string { return "" },
			Started: func(wire.ContainerUsage) (time.Time, bool) { return time.Unix(0, 0), true },
		})
		for _, e := range changes.Current {
			got = append(got, e.Peak/gib)
		}
	}
	if diff := cmp.Diff([]uint64{5, 5, 5}, got); diff != "" {
		t.Errorf("peaks (-want +got):\n%s", diff)
	}
}
