package limits

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

var (
	trainer = Name{"team", "trainer", "main"}
	leaf    = Group{Path: path, Dir: "/cg" + path, Scope: "/cg" + path}
	below   = Group{Path: path + "/a", Dir: "/cg" + path + "/a", Scope: "/cg" + path}
)

// holder is a container with an allocation of 3000 MiB and these limits.
func holder(limits ...ReadLimit) Container {
	return Container{Name: trainer, ID: mainID, Bytes: 3000 * MiB, Groups: limits}
}

func recorded(lost time.Time) []Record {
	return []Record{{Container: "any", Group: path, Device: gpu, Bytes: 3000 * MiB, Lost: lost}}
}

func TestJudge(t *testing.T) {
	right := ReadLimit{Group: leaf, Bytes: 3000 * MiB}
	missing := ReadLimit{Group: leaf, Err: fmt.Errorf("driver: %w", backend.ErrNoLimit)}
	repair := func(g Group) Repair {
		return Repair{Device: gpu, Name: trainer, ID: mainID, Group: g, Bytes: 3000 * MiB}
	}
	lost := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, tt := range map[string]struct {
		device  Device
		records []Record
		want    []string // "cause: part of the reason"
		repairs []Repair
	}{
		"no containers": {device: Device{ID: gpu}},
		"a container with its limit": {
			device:  Device{Containers: []Container{holder(right)}, Processes: []Process{{Container: mainID}}},
			records: recorded(time.Time{})},
		"a container with groups of its own": {
			device:  Device{Containers: []Container{holder(right, ReadLimit{Group: below, Bytes: 3000 * MiB})}},
			records: recorded(time.Time{})},
		"a container that has not begun": {device: Device{Containers: []Container{holder()}}, records: recorded(time.Time{})},
		"a missing limit": {device: Device{Containers: []Container{holder(missing)}}, records: recorded(time.Time{}),
			want: []string{"limit-missing: team/trainer/main: has no limit and should have 3000 MiB"}, repairs: []Repair{repair(leaf)}},
		"another limit in a group below": {
			device:  Device{Containers: []Container{holder(right, ReadLimit{Group: below, Bytes: 4000 * MiB})}},
			records: recorded(time.Time{}), want: []string{"limit-different: 4194304000 bytes and should have 3145728000"},
			repairs: []Repair{repair(below)},
		},
		"a limit that cannot be read": {device: Device{Containers: []Container{holder(ReadLimit{Group: leaf, Err: errors.New("broken")})}},
			records: recorded(time.Time{}), want: []string{"limit-unreadable: broken"}},
		"a container from before": {device: Device{Containers: []Container{holder(right)}},
			want: []string{"started-without-limit: started without a limit"}},
		"a container from before, without a limit": {device: Device{Containers: []Container{holder(missing)}},
			want: []string{"limit-missing: no limit"}, repairs: []Repair{repair(leaf)}},
		"a record of another device": {device: Device{ID: "GPU-2", Containers: []Container{holder(right)}}, records: recorded(time.Time{}),
			want: []string{"started-without-limit: "}},
		"a limit that was repaired": {device: Device{Containers: []Container{holder(right)}}, records: recorded(lost),
			want: []string{"limit-was-lost: was without its limit at 2026-01-02T03:04:05Z"}},
		"the whole device": {device: Device{Containers: []Container{{Name: trainer, ID: mainID, Groups: []ReadLimit{missing}}},
			Processes: []Process{{Container: mainID, PodUID: podUID}}}},
		"a driver that keeps no limits": {device: Device{Problem: errors.New("persistence mode is off")},
			want: []string{"driver: persistence mode is off"}},
		"processes that are not known": {
			device: Device{Unlisted: errors.New("no hostPID")}, want: []string{"processes-unknown: no hostPID"}},
		"a process of another pod": {device: Device{Processes: []Process{{Container: sideID, PodUID: podUID}}},
			want: []string{"process-without-limit: no limit bounds a process in container " + sideID}},
		"a process of a pod": {device: Device{Processes: []Process{{PodUID: podUID}}},
			want: []string{"process-without-limit: no limit bounds a process of pod"}},
		"a process of a user": {device: Device{Processes: []Process{{Program: "python3"}}},
			want: []string{"process-without-limit: no limit bounds a process of the host (python3)"}},
		"a process in a pod that is named like a system's": {
			device: Device{Processes: []Process{{PodUID: podUID, Program: "Xorg"}}},
			want:   []string{"process-without-limit: no limit bounds a process of pod"}},
		"a process of the system": {device: Device{Processes: []Process{{Program: "nvidia-persiste"}}}},
		"a process of a container that is too new": {device: Device{Processes: []Process{{Container: mainID, PodUID: podUID}}},
			records: recorded(time.Time{})},
		"a process of a container that was without its limit": {
			device:  Device{Processes: []Process{{Container: mainID, PodUID: podUID}}},
			records: recorded(lost), want: []string{"process-without-limit: no limit bounds a process in container"}},
	} {
		if tt.device.ID == "" {
			tt.device.ID = gpu
		}
		losses, repairs := Judge(tt.device, tt.records)
		if diff := cmp.Diff(tt.repairs, repairs); diff != "" {
			t.Errorf("%s: repairs (-want +got):\n%s", name, diff)
		}
		if len(losses) != len(tt.want) {
			t.Errorf("%s: losses are %+v, want %q", name, losses, tt.want)
			continue
		}
		for i, l := range losses {
			cause, reason, _ := strings.Cut(tt.want[i], ": ")
			if string(l.Cause) != cause || !strings.Contains(l.Reason, reason) {
				t.Errorf("%s: loss is %+v, want %q", name, l, tt.want[i])
			}
		}
	}
}

func TestWatch(t *testing.T) {
	var w Watch
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	loss := func(cause Cause) Loss { return Loss{Cause: cause, Container: trainer, Reason: start.String()} }
	pass := 0
	look := func(what string, attested bool, fresh int, losses ...Loss) {
		t.Helper()
		now := start.Add(time.Duration(pass) * time.Second)
		pass++
		status, news := w.Look(map[accel.DeviceID][]Loss{gpu: losses}, now)
		want := time.Time{}
		if attested {
			want = now
		}
		if s := status[gpu]; !s.Attested.Equal(want) || len(s.Losses) != len(losses) || len(news[gpu]) != fresh {
			t.Errorf("%s: %+v with %v news, want attested %v with %d", what, s, news, attested, fresh)
		}
	}
	look("the first pass", true, 0)
	look("later", true, 0)
	look("a loss", false, 1, loss(CauseMissing))
	look("the same loss", false, 0, loss(CauseMissing))
	look("one more", false, 1, loss(CauseMissing), loss(CauseProcess))
	look("a limit that was set again", false, 0, loss(CauseRepaired))
	look("none", false, 0)
	look("the loss again", false, 1, loss(CauseMissing))
	look("none", false, 0)
	look("none for two passes", true, 0)
	w.Look(nil, start)
	look("a device that was gone", false, 0)
}
