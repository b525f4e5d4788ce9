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

// play makes a pass each 15 s and returns what each has shown: "+" for a beginning, "-" for
// an end, and then the current episodes with the age of each, "?" while it is not proven.
func play(w *Watch, start time.Time, age time.Duration, passes ...wire.DeviceUsage) (out []string) {
	for i, d := range passes {
		now := start.Add(time.Duration(i) * 15 * time.Second)
		changes := w.Look(Pass{
			Time: now, Devices: []wire.DeviceUsage{d}, Model: func(accel.DeviceID) string { return "m" },
			Started: func(wire.ContainerUsage) (time.Time, bool) { return now.Add(-age), true },
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
		"the pod's sum is not over": {[][]wire.DeviceUsage{times(4, device(rest(100), row("main", 4, 5<<10), row("side", 4, 1<<10)))},
			quiet},
		"a pod with a container without bounds": {[][]wire.DeviceUsage{times(4, device(rest(9<<10), whole(0)))}, quiet},
		"an episode while the pod's sum is judged": {
			[][]wire.DeviceUsage{times(4, over), {device(rest(6<<10), row("main", 4, 0))}, times(2, over)},
			[]string{"", "", "", "+main main 45", "main ?", "main 0", "main 15"}},
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
	w := New(map[string]uint64{"v": 0})
	if got := play(w, time.Unix(1000, 0), settling-time.Second, times(6, over)...); strings.Join(got, "") != "" {
		t.Errorf("in its first minute: %q", got)
	}
	if got := play(w, time.Unix(2000, 0), settling, times(4, over)...); got[3] != "+main main 45" {
		t.Errorf("after it: %q", got)
	}
	w = New(map[string]uint64{"v": 0})
	for range 6 {
		changes := w.Look(Pass{Time: time.Unix(1000, 0), Devices: []wire.DeviceUsage{over},
			Model:   func(accel.DeviceID) string { return "" },
			Started: func(wire.ContainerUsage) (time.Time, bool) { return time.Time{}, false }})
		if len(changes.Current) > 0 {
			t.Fatalf("a container that does not run: %+v", changes.Current)
		}
	}
}

// TestPeak is the most that a container was over in its episode.
func TestPeak(t *testing.T) {
	w := New(map[string]uint64{"v": 0})
	var got []uint64
	for i, used := range []uint64{9 << 10, 6 << 10, 5 << 10, 6 << 10, 8 << 10, 5 << 10} {
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

func TestExcess(t *testing.T) {
	if got := (Episode{Container: row("main", 4, 6<<10)}).Excess(); got != 2*gib {
		t.Errorf("excess is %d", got)
	}
	if got := (Episode{Container: row("main", 4, 1<<10)}).Excess(); got != 0 {
		t.Errorf("excess below the allocation is %d", got)
	}
}
