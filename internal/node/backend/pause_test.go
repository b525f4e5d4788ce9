package backend_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// pausable is a scripted backend that is not asked during a pause.
type pausable struct {
	scripted
	pause *backend.Pause
}

func (p *pausable) Discover(ctx context.Context) (backend.Found, error) {
	found, err := p.scripted.Discover(ctx)
	if why, _ := p.pause.Now(); why.Unhealthy {
		return backend.Found{}, &backend.UnavailableError{Vendor: "scripted", Err: &backend.PausedError{Health: why}}
	}
	return found, err
}

func TestWatchDuringAPause(t *testing.T) {
	upgrade := accel.Health{Unhealthy: true, Cause: "upgrade", Reason: "an upgrade"}
	change := accel.Health{Unhealthy: true, Cause: "change", Reason: "a change"}
	sick := foundThree()
	sick.Devices[1].Health = accel.Health{Unhealthy: true, Cause: "hot", Reason: "hot"}
	fatal := foundThree()
	fatal.Devices[1].Health = accel.Health{Unhealthy: true, Cause: "broken", Reason: "broken"}
	cut := foundThree()
	cut.Devices[1].Health, cut.Devices[2].Parent = fatal.Devices[1].Health, "b"
	two := foundThree()
	two.Devices, two.Links = two.Devices[:2], two.Links[:1]
	type step struct {
		after time.Duration
		pause accel.Health
		found backend.Found
		err   error
	}
	for name, tt := range map[string]struct {
		steps []step
		want  []string // devices with the causes of those that are unhealthy
	}{
		"at once, and well again at once": {
			[]step{{found: foundThree()}, {after: 30 * time.Second, pause: upgrade}, {after: time.Hour, found: foundThree()}},
			[]string{"0s a b c", "30s a:upgrade b:upgrade c:upgrade", "1h0m30s a b c"},
		},
		"of another kind in between": {
			[]step{{found: foundThree()}, {after: time.Minute, pause: change}, {after: time.Minute, pause: upgrade},
				{after: time.Minute, found: two}},
			[]string{"0s a b c", "1m0s a:change b:change c:change", "2m0s a:upgrade b:upgrade c:upgrade", "3m0s a b"},
		},
		"from the start": {
			[]step{{pause: upgrade}, {after: time.Minute, found: foundThree()}},
			[]string{"0s scripted devices are unavailable: an upgrade", "1m0s a b c"},
		},
		"of a device that failed before": {
			[]step{{found: sick}, {after: time.Minute, pause: upgrade}, {after: time.Minute, found: foundThree()}, {after: time.Minute,
				found: foundThree()}},
			[]string{"0s a b:hot c", "1m0s a:upgrade b:upgrade c:upgrade", "2m0s a b:hot c", "2m10s a b c"},
		},
		"of a device in quarantine": {
			[]step{{found: fatal}, {after: time.Minute, pause: upgrade}, {after: time.Minute, found: foundThree()}},
			[]string{"0s a b:broken c", "1m0s a:upgrade b:broken c:upgrade", "2m0s a b:broken c"},
		},
		"of a partition whose device is in quarantine": {
			[]step{{found: cut}, {after: time.Minute, pause: upgrade}, {after: time.Minute, found: cut}},
			[]string{"0s a b:broken c:broken", "1m0s a:upgrade b:broken c:broken", "2m0s a b:broken c:broken"},
		},
		"after the driver is gone": {
			[]step{{found: foundThree()}, {after: time.Minute, err: fmt.Errorf("no driver")}, {after: time.Minute, pause: upgrade},
				{after: time.Minute, found: foundThree()}, {after: time.Minute, found: foundThree()}},
			[]string{"0s a b c", "1m1s no driver", "2m0s a:upgrade b:upgrade c:upgrade", "3m0s a:unreachable b:unreachable c:unreachable",
				"3m10s a b c"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := &pausable{pause: backend.NewPause(accel.Health{})}
				var got []string
				start, done := time.Now(), make(chan struct{})
				defer func() { <-done }() // the context has ended then
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				for i, s := range tt.steps {
					time.Sleep(s.after)
					if i == 1 {
						time.Sleep(500 * time.Millisecond) // between two discoveries
					}
					b.set(s.found, s.err)
					b.pause.Set(s.pause)
					if i > 0 {
						continue
					}
					go func() {
						defer close(done)
						policy := backend.Recovery{After: 10 * time.Second, Never: []string{"broken"}, Pause: b.pause}
						backend.Watch(ctx, b, time.Second, policy, func(found backend.Found, err error) {
							got = append(got, fmt.Sprintf("%v %s", time.Since(start).Truncate(time.Second), causes(found, err)))
						})
					}()
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("reports (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func causes(found backend.Found, err error) string {
	if err != nil {
		return err.Error()
	}
	var words []string
	for _, d := range found.Devices {
		word := string(d.ID)
		if d.Health.Unhealthy {
			word += ":" + d.Health.Cause
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}
