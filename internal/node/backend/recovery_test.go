package backend

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

func foundDevice(cause string) Found {
	d := accel.Device{ID: "a", Health: accel.Health{Unhealthy: cause != "", Cause: cause, Reason: cause}}
	return Found{Devices: []accel.Device{d}}
}

func TestRecovery(t *testing.T) {
	type step struct {
		at    int    // seconds
		cause string // "" healthy, "gone" not listed
		want  string // cause shown, "" healthy
	}
	for name, tt := range map[string]struct {
		policy Recovery
		steps  []step
	}{
		"at once": {Recovery{}, []step{{0, "", ""}, {1, "ecc", "ecc"}, {2, "", ""}}},
		"after a quiet time": {Recovery{After: 10 * time.Second}, []step{
			{0, "ecc", "ecc"}, {5, "", "ecc"}, {14, "", "ecc"}, {15, "", ""}, {16, "", ""},
		}},
		"flipping is not quiet": {Recovery{After: 10 * time.Second}, []step{
			{0, "ecc", "ecc"}, {5, "", "ecc"}, {9, "ecc", "ecc"}, {10, "", "ecc"}, {19, "", "ecc"}, {20, "", ""},
		}},
		"lost and back": {Recovery{After: 10 * time.Second}, []step{
			{0, "", ""}, {1, "gone", ""}, {2, "", accel.CauseLost}, {12, "", ""},
		}},
		"never": {Recovery{Never: []string{"xid-7*"}}, []step{
			{0, "xid-79", "xid-79"}, {1, "", "xid-79"}, {2, "ecc", "xid-79"}, {3, "gone", ""}, {4, "", "xid-79"}, {3600, "", "xid-79"},
		}},
		"never is for the causes that it names": {Recovery{Never: []string{"xid-7*"}}, []step{{0, "xid-48", "xid-48"}, {1, "", ""}}},
	} {
		t.Run(name, func(t *testing.T) {
			r, start := newRecovery("acme", tt.policy), time.Unix(0, 0)
			for _, s := range tt.steps {
				in := foundDevice(s.cause)
				if s.cause == "gone" {
					in = Found{}
				}
				out, next := r.apply(in, start.Add(time.Duration(s.at)*time.Second))
				if s.cause == "gone" {
					continue
				}
				got := out.Devices[0].Health
				if got.Cause != s.want || got.Unhealthy != (s.want != "") {
					t.Errorf("at %d s: shown as %+v, want cause %q", s.at, got, s.want)
				}
				if waits := s.cause == "" && s.want != "" && len(tt.policy.Never) == 0; waits == next.IsZero() {
					t.Errorf("at %d s: to be looked at again at %v", s.at, next)
				}
			}
		})
	}
}

func TestCounts(t *testing.T) {
	for name, tt := range map[string]struct {
		o    Options
		want map[string]bool
	}{
		"nothing said": {Options{}, map[string]bool{"xid-13": false, "xid-79": true}},
		"default and one more": {Options{Ignore: []string{"default", "xid-79"}}, map[string]bool{"xid-13": false, "xid-79": false,
			"xid-48": true}},
		"none": {Options{Ignore: []string{}}, map[string]bool{"xid-13": true}},
		"all but one": {Options{Ignore: []string{"all"}, Heed: []string{"xid-94"}},
			map[string]bool{"xid-79": false, "xid-94": true}},
		"heed wins": {Options{Heed: []string{"xid-13"}}, map[string]bool{"xid-13": true}},
	} {
		t.Run(name, func(t *testing.T) {
			for cause, want := range tt.want {
				if got := tt.o.Counts(cause, "xid-13"); got != want {
					t.Errorf("%s counts: %v, want %v", cause, got, want)
				}
			}
		})
	}
}

func TestCauseThatNeverRecoversIsNotHiddenByOthers(t *testing.T) {
	causes := []string{"over-temperature", "ecc", "pcie"}
	for name, tt := range map[string]struct {
		never []string
		want  int
	}{
		"nothing said":     {nil, 0},
		"another":          {[]string{"memory"}, 0},
		"the second":       {[]string{"ecc"}, 1},
		"two of them":      {[]string{"pcie", "ec*"}, 1},
		"the first anyway": {[]string{"*"}, 0},
	} {
		if got := (Options{NeverRecover: tt.never}).Gravest(causes); got != tt.want {
			t.Errorf("%s: tells cause %d, want %d", name, got, tt.want)
		}
	}
}

// TestQuarantine: what is put into quarantine, by which cause, and when it counts.
func TestQuarantine(t *testing.T) {
	at := func(second int) time.Time { return time.Unix(1000, 0).Add(time.Duration(second) * time.Second) }
	sick := foundDevice
	fault := func(cause string) Found {
		return Found{Faults: []Fault{{Index: 3, ID: "a", Cause: cause, Err: errors.New("fault " + cause)}}}
	}
	unasked := func(cause string) Found {
		f := fault(cause)
		f.Faults, f.Unasked, f.Silent = nil, f.Faults, true
		return f
	}
	for name, tt := range map[string]struct {
		steps []Found // a second each
		want  accel.Quarantine
	}{
		"a device that is unhealthy": {
			[]Found{sick(""), sick("xid-79"), sick("")},
			accel.Quarantine{Device: "a", Vendor: "acme", Cause: "xid-79", Reason: "xid-79", Since: at(1).UTC()},
		},
		"the first of two": {
			[]Found{sick("xid-79"), sick("xid-48"), sick("")},
			accel.Quarantine{Device: "a", Vendor: "acme", Cause: "xid-79", Reason: "xid-79", Since: at(0).UTC()},
		},
		"a device that was never described": {
			[]Found{fault("xid-79"), sick("")},
			accel.Quarantine{Device: "a", Vendor: "acme", Index: 3, Cause: "xid-79", Reason: "fault xid-79", Since: at(0).UTC()},
		},
		"a device that was lost with the error": {
			[]Found{sick(""), fault("xid-79"), sick("")},
			accel.Quarantine{Device: "a", Vendor: "acme", Index: 3, Cause: "xid-79", Reason: "fault xid-79", Since: at(1).UTC()},
		},
		"a device that cannot be asked": {
			[]Found{sick(""), unasked("xid-79")},
			accel.Quarantine{Device: "a", Vendor: "acme", Cause: "xid-79", Reason: "fault xid-79", Since: at(1).UTC()},
		},
		"not for another cause": {[]Found{sick("hot"), fault(""), unasked(accel.CauseUnreachable), sick("")}, accel.Quarantine{}},
	} {
		t.Run(name, func(t *testing.T) {
			ward := memory{}
			r := newRecovery("acme", Recovery{Never: []string{"xid-*"}, Quarantine: ward})
			var out Found
			for i, f := range tt.steps {
				out, _ = r.apply(f, at(i))
			}
			got, there := ward.Of("a")
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("in quarantine (-want +got):\n%s", diff)
			}
			want := accel.Health{}
			if there {
				want = accel.Health{Unhealthy: true, Cause: tt.want.Cause, Reason: tt.want.Reason, Quarantined: tt.want.Since}
			}
			if len(out.Devices) != 1 || out.Devices[0].Health != want {
				t.Errorf("shown as %+v, want health %+v", out, want)
			}
		})
	}
}

// TestRelease: a device that is released and well is trusted at once if it was well for
// long enough, and one that is put into quarantine from outside is shown so.
func TestRelease(t *testing.T) {
	ward := memory{}
	r := newRecovery("acme", Recovery{After: 10 * time.Second, Never: []string{"xid-*"}, Quarantine: ward})
	shown := func(second int, cause string) accel.Health {
		t.Helper()
		out, _ := r.apply(foundDevice(cause), time.Unix(int64(second), 0))
		return out.Devices[0].Health
	}
	want := func(what string, got accel.Health, quarantined, unhealthy bool) {
		t.Helper()
		if got.Unhealthy != unhealthy || got.Quarantined.IsZero() == quarantined {
			t.Errorf("%s: shown as %+v", what, got)
		}
	}
	want("ill", shown(1000, "xid-79"), true, true)
	want("well", shown(1001, ""), true, true)
	want("well for long", shown(1020, ""), true, true)
	delete(ward, "a")
	want("released", shown(1021, ""), false, false)
	want("ill again", shown(2000, "xid-79"), true, true)
	want("well again", shown(2001, ""), true, true)
	delete(ward, "a")
	want("released too early", shown(2002, ""), false, true)
	want("trusted", shown(2011, ""), false, false)
	want("released with the error", shown(3000, "xid-79"), true, true)
	delete(ward, "a")
	want("and put into quarantine again", shown(3001, "xid-79"), true, true)
	delete(ward, "a")
	shown(3002, "")
	want("trusted later", shown(4000, ""), false, false)
	ward.Add(accel.Quarantine{Device: "a", Cause: accel.CauseAdministrator, Since: time.Unix(4000, 0)})
	want("by hand", shown(4001, ""), true, true)
}

// partitioned is a device that is cut into these partitions.
func partitioned(partitions ...accel.DeviceID) Found {
	found := Found{Devices: []accel.Device{{ID: "a", Partitioned: true}}}
	for i, id := range partitions {
		found.Devices = append(found.Devices, accel.Device{ID: id, Index: accel.PartitionIndex(0, i), Parent: "a"})
	}
	return found
}

// TestQuarantineOfADeviceWithPartitions: one entry covers the partitions, also if none of
// them can be described any more.
func TestQuarantineOfADeviceWithPartitions(t *testing.T) {
	for name, lose := range map[string]func(*recovery, time.Time){
		"a fault": func(r *recovery, now time.Time) {
			var found Found
			for _, d := range partitioned("p", "q").Devices {
				found.Faults = append(found.Faults, Fault{Index: d.Index, ID: d.ID, Err: errors.New("lost"), Cause: "xid-79"})
			}
			r.apply(found, now)
		},
		"not listed": func(r *recovery, now time.Time) { r.apply(Found{}, now) },
		"no library": func(r *recovery, now time.Time) { _, _ = r.without(errors.New("no driver"), now) },
	} {
		t.Run(name, func(t *testing.T) {
			q := memory{}
			r, now := newRecovery("acme", Recovery{Never: []string{"*"}, Quarantine: q}), time.Unix(0, 0)
			r.apply(partitioned("p", "q"), now)
			lose(r, now.Add(time.Second))
			if _, ok := q.Of("a"); !ok || len(q) != 1 {
				t.Errorf("in quarantine are %v, want the device alone", q)
			}
		})
	}
}

// TestDeletedPartition: it has not failed, and one that is made in its place takes pods at
// once.
func TestDeletedPartition(t *testing.T) {
	q := memory{}
	r, now := newRecovery("acme", Recovery{After: time.Minute, Never: []string{"*"}, Quarantine: q}), time.Unix(0, 0)
	r.apply(partitioned("p", "q"), now)
	r.apply(partitioned("p"), now.Add(5*time.Second))
	out, _ := r.apply(partitioned("p", "q"), now.Add(10*time.Second))
	if len(q) > 0 || out.Devices[2].Health.Unhealthy {
		t.Errorf("in quarantine are %v, the new partition is %+v", q, out.Devices[2].Health)
	}
}
