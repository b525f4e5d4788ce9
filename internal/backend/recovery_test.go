package backend

import (
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
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
		"nothing said":         {Options{}, map[string]bool{"xid-13": false, "xid-79": true}},
		"default and one more": {Options{Ignore: []string{"default", "xid-79"}}, map[string]bool{"xid-13": false, "xid-79": false, "xid-48": true}},
		"none":                 {Options{Ignore: []string{}}, map[string]bool{"xid-13": true}},
		"all but one":          {Options{Ignore: []string{"all"}, Heed: []string{"xid-94"}}, map[string]bool{"xid-79": false, "xid-94": true}},
		"heed wins":            {Options{Heed: []string{"xid-13"}}, map[string]bool{"xid-13": true}},
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
