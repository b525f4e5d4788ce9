package backend_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// foundThree are three devices with links between them.
func foundThree() backend.Found {
	f := backend.Found{Driver: "1.0", Links: []accel.Link{{A: "a", B: "b", Score: 10}, {A: "a", B: "c", Score: 20},
		{A: "b", B: "c", Score: 30}}}
	for i, id := range []accel.DeviceID{"a", "b", "c"} {
		f.Devices = append(f.Devices, accel.Device{Index: i, ID: id, MemoryBytes: 1})
	}
	return f
}

// hangs are the same when calls about the first hang. With a lock in the library the
// others cannot be asked.
func hangs(lock bool) backend.Found {
	f := foundThree()
	hung := errors.New("ask(0) did not answer within 5s")
	f.Faults = []backend.Fault{{Index: 0, ID: "a", Err: hung, Cause: accel.CauseUnreachable}}
	f.Devices, f.Links = f.Devices[1:], f.Links[2:]
	if lock {
		for _, d := range f.Devices {
			f.Unasked = append(f.Unasked, backend.Fault{Index: d.Index, ID: d.ID, Err: hung, Cause: accel.CauseUnreachable})
		}
		f.Devices, f.Links, f.Silent = nil, nil, true
	}
	return f
}

// silent is the error of a library that does not answer.
func silent() error {
	return &backend.UnavailableError{Vendor: "scripted", Err: errors.New("count did not answer within 5s"), Silent: true}
}

// seen says in a line what counts: "a b! (c)" is a well, b unhealthy and c not
// asked; links are counted.
func seen(found backend.Found, err error) string {
	if err != nil {
		return err.Error()
	}
	unasked := map[accel.DeviceID]bool{}
	for _, f := range found.Unasked {
		unasked[f.ID] = true
	}
	var words []string
	for _, d := range found.Devices {
		word := string(d.ID)
		if d.Health.Unhealthy {
			word += "!"
		}
		if unasked[d.ID] {
			word = "(" + word + ")"
		}
		words = append(words, word)
	}
	for _, f := range found.Faults {
		words = append(words, fmt.Sprintf("%s fails", f.ID))
	}
	return fmt.Sprintf("%s, %d links", strings.Join(words, " "), len(found.Links))
}

// watchAll runs Watch with a second's interval and a hold-down of 10 s, and
// returns what was reported, each with the second in which it was.
func watchAll(t *testing.T, b backend.Backend) func() []string {
	t.Helper()
	start := time.Now()
	var got []string
	done := make(chan struct{})
	go func() {
		defer close(done)
		backend.Watch(t.Context(), b, time.Second, backend.Recovery{After: 10 * time.Second}, func(found backend.Found, err error) {
			got = append(got, fmt.Sprintf("%v %s", time.Since(start).Truncate(time.Second), seen(found, err)))
		})
	}()
	t.Cleanup(func() { <-done }) // t's context has ended then
	return func() []string {
		synctest.Wait()
		return got
	}
}

func TestSilence(t *testing.T) {
	type step struct {
		after time.Duration
		found backend.Found
		err   error
	}
	sick := func(f backend.Found, id accel.DeviceID) backend.Found {
		for i := range f.Devices {
			if f.Devices[i].ID == id {
				f.Devices[i].Health = accel.Health{Unhealthy: true, Cause: "hot", Reason: "hot"}
			}
		}
		return f
	}
	for name, tt := range map[string]struct {
		steps []step
		want  []string
	}{
		"one device hangs, the others go on": {
			[]step{{0, foundThree(), nil}, {5 * time.Second, hangs(false), nil}, {5 * time.Second, sick(hangs(false), "c"), nil},
				{5 * time.Second, foundThree(), nil}, {time.Minute, foundThree(), nil}},
			[]string{"0s a b c, 3 links", "5s b c a fails, 1 links", "10s b c! a fails, 1 links", "15s a! b c!, 3 links",
				"25s a b c, 3 links"},
		},
		"one device hangs with the library's lock: the others are as they were, for a while": {
			[]step{{0, foundThree(), nil}, {5 * time.Second, hangs(true), nil}, {2 * time.Minute, foundThree(), nil},
				{time.Minute, foundThree(), nil}},
			[]string{
				"0s a b c, 3 links", "5s (b) (c) a fails, 1 links", "1m4s a fails b fails c fails, 0 links",
				"2m5s a! b! c!, 3 links", "2m15s a b c, 3 links",
			},
		},
		"all is silent for less than Patience": {
			[]step{{0, foundThree(), nil}, {5 * time.Second, backend.Found{}, silent()}, {50 * time.Second, foundThree(), nil},
				{time.Minute, foundThree(), nil}},
			[]string{"0s a b c, 3 links", "5s (a) (b) (c), 3 links", "55s a b c, 3 links"},
		},
		"all is silent for longer": {
			[]step{{0, foundThree(), nil}, {5 * time.Second, backend.Found{}, silent()}, {2 * time.Minute, foundThree(), nil},
				{time.Minute, foundThree(), nil}},
			[]string{
				"0s a b c, 3 links", "5s (a) (b) (c), 3 links", "1m4s scripted devices are unavailable: count did not answer within 5s",
				"2m5s a! b! c!, 3 links", "2m15s a b c, 3 links",
			},
		},
		"silent from the start": {
			[]step{{0, backend.Found{}, silent()}, {5 * time.Second, foundThree(), nil}, {time.Minute, foundThree(), nil}},
			[]string{"0s scripted devices are unavailable: count did not answer within 5s", "5s a b c, 3 links"},
		},
		"what fails before stays so": {
			[]step{{0, sick(foundThree(), "b"), nil}, {5 * time.Second, hangs(false), nil}, {5 * time.Second, backend.Found{}, silent()},
				{20 * time.Second, foundThree(), nil}, {time.Minute, foundThree(), nil}},
			[]string{
				"0s a b! c, 3 links", "5s b! c a fails, 1 links", "10s (b!) (c) a fails, 1 links",
				// b was seen well at 5 s, and is not trusted for a time in which it was not seen.
				"30s a! b! c, 3 links", "40s a b c, 3 links",
			},
		},
		"a driver that is gone is not silent": {
			[]step{{0, foundThree(), nil}, {5 * time.Second, backend.Found{}, errors.New("no driver")},
				{5 * time.Second, backend.Found{}, silent()}, {5 * time.Second, foundThree(), nil}, {time.Minute, foundThree(), nil}},
			[]string{
				"0s a b c, 3 links", "5s no driver", "10s scripted devices are unavailable: count did not answer within 5s",
				"15s a! b! c!, 3 links", "25s a b c, 3 links",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := &scripted{}
				b.set(tt.steps[0].found, tt.steps[0].err)
				got := watchAll(t, b)
				for _, s := range tt.steps[1:] {
					time.Sleep(s.after - time.Millisecond)
					b.set(s.found, s.err)
					time.Sleep(time.Millisecond)
				}
				if diff := cmp.Diff(tt.want, got()); diff != "" {
					t.Errorf("reports (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestStalls: a driver that stalls every 20 s makes nothing flap, be it the whole
// library or one card, however long it stalls.
func TestStalls(t *testing.T) {
	for stall := 2 * time.Second; stall < 20*time.Second; stall += 3 * time.Second {
		for name, tt := range map[string]struct {
			found backend.Found
			err   error
			flips int // of the first device, at most
		}{
			"the library":         {backend.Found{}, silent(), 0},
			"one card":            {hangs(false), nil, 3},
			"one card, with lock": {hangs(true), nil, 3},
		} {
			t.Run(fmt.Sprintf("%s for %v", name, stall), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					b := &scripted{found: foundThree()}
					got := watchAll(t, b)
					for range 30 {
						time.Sleep(20*time.Second - stall)
						b.set(tt.found, tt.err)
						time.Sleep(stall)
						b.set(foundThree(), nil)
					}
					flips, well := 0, true
					for _, report := range got() {
						_, what, _ := strings.Cut(report, " ")
						if strings.Contains(what, "b!") || strings.Contains(what, "b fails") || strings.Contains(what, "unavailable") {
							t.Fatalf("a device that does not stall: %s", report)
						}
						if now := strings.HasPrefix(what, "a ") || strings.HasPrefix(what, "(a)"); now != well {
							well = now
							flips++
						}
					}
					// It is trusted once more after a short stall, and not after the next.
					if flips > tt.flips {
						t.Errorf("the device that stalls changed %d times in 10 minutes: %q", flips, got())
					}
				})
			})
		}
	}
}

// TestDamping: a device that fails again soon must be well for longer each time.
func TestDamping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sick := foundOne(accel.Health{Unhealthy: true, Reason: "hot", Cause: "hot"})
		b := &scripted{found: foundOne(accel.Health{})}
		got := watched(t, b, backend.Recovery{After: 10 * time.Second})
		time.Sleep(500 * time.Millisecond)
		var want []outcome
		want = append(want, outcome{})
		start := time.Now()
		at := func() time.Duration { return time.Since(start) + 500*time.Millisecond }
		// fall makes it ill for 2 s, and waits until it is trusted and for as long after.
		fall := func(hold, rest time.Duration) {
			b.set(sick, nil)
			want = append(want, outcome{At: at() + 500*time.Millisecond, Health: "hot"})
			time.Sleep(2 * time.Second)
			b.set(foundOne(accel.Health{}), nil)
			well := at() + 500*time.Millisecond
			want = append(want,
				outcome{At: well, Health: fmt.Sprintf("hot; well again, and trusted once it was so for %v", hold)},
				outcome{At: well + hold})
			time.Sleep(hold + rest + time.Second)
		}
		fall(10*time.Second, 5*time.Second)
		fall(20*time.Second, 5*time.Second)
		fall(40*time.Second, time.Minute) // it stays well
		fall(10*time.Second, 5*time.Second)
		for hold := 20 * time.Second; hold < backend.MaxAfter; hold *= 2 {
			fall(hold, time.Second)
		}
		fall(backend.MaxAfter, time.Second)
		fall(backend.MaxAfter, 0)
		if diff := cmp.Diff(want, got()); diff != "" {
			t.Errorf("reports (-want +got):\n%s", diff)
		}
	})
}
