package backend

import (
	"fmt"
	"path"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
)

// Recovery says when a device that was unhealthy takes pods again. A device
// that turns unhealthy does so at once, whatever the policy.
type Recovery struct {
	// After is how long the device must have been well without a break; 0 is at
	// once.
	After time.Duration
	// Never are causes, as patterns with "*", after which the device stays
	// unhealthy for as long as this program runs.
	Never []string
}

// recovery applies a Recovery to one discovery after the other. It remembers
// devices by ID, so that a device which comes back under another index is still
// the one that failed. Devices that cannot be reached have failed too. Not safe
// for concurrent use.
type recovery struct {
	policy  Recovery
	failing map[accel.DeviceID]failure
	// seen are the devices that were listed once: one that is missing has
	// failed.
	seen map[accel.DeviceID]bool
}

// failure is what a device is not trusted for yet.
type failure struct {
	health accel.Health
	// since is when the device was found well for the first time after it
	// failed; zero while it is not well.
	since time.Time
}

func newRecovery(p Recovery) *recovery {
	return &recovery{policy: p, failing: map[accel.DeviceID]failure{}, seen: map[accel.DeviceID]bool{}}
}

// apply returns found with the devices unhealthy that are not trusted yet. next
// is when that may change without anything else changing, zero for never.
func (r *recovery) apply(found Found, now time.Time) (_ Found, next time.Time) {
	found.Devices = slices.Clone(found.Devices)
	here := map[accel.DeviceID]bool{}
	for i := range found.Devices {
		d := &found.Devices[i]
		here[d.ID], r.seen[d.ID] = true, true
		if d.Health.Unhealthy {
			if kept := r.failing[d.ID].health; kept.Unhealthy && r.final(kept.Cause) {
				d.Health = kept
			}
			r.failing[d.ID] = failure{health: d.Health}
			continue
		}
		f, failed := r.failing[d.ID]
		if !failed {
			continue
		}
		if f.since.IsZero() {
			f.since = now
			r.failing[d.ID] = f
		}
		due := f.since.Add(r.policy.After)
		switch {
		case r.final(f.health.Cause):
			d.Health = f.health
			continue
		case !now.Before(due):
			delete(r.failing, d.ID)
			continue
		}
		d.Health = accel.Health{
			Unhealthy: true,
			Cause:     f.health.Cause,
			Reason:    fmt.Sprintf("%s; well again, and trusted once it was so for %v", f.health.Reason, r.policy.After),
		}
		if next.IsZero() || due.Before(next) {
			next = due
		}
	}
	for id := range r.seen {
		if here[id] || r.final(r.failing[id].health.Cause) {
			continue
		}
		r.failing[id] = failure{health: accel.Health{Unhealthy: true, Cause: accel.CauseLost, Reason: "the device was lost"}}
	}
	return found, next
}

// final reports whether nothing brings a device back that failed for cause.
func (r *recovery) final(cause string) bool { return cause != "" && Matches(r.policy.Never, cause) }

// Matches reports whether a cause matches one of the patterns, in which "*"
// stands for any text.
func Matches(patterns []string, cause string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, err := path.Match(p, cause)
		return err == nil && ok
	})
}

// Counts reports whether ill health for cause counts by o, given the patterns
// of causes that the vendor ignores by default.
func (o Options) Counts(cause string, ignoredByDefault ...string) bool {
	if Matches(o.Heed, cause) {
		return true
	}
	ignore := o.Ignore
	if ignore == nil {
		ignore = []string{"default"}
	}
	if slices.Contains(ignore, "all") || slices.Contains(ignore, "default") && Matches(ignoredByDefault, cause) {
		return false
	}
	return !Matches(ignore, cause)
}

// Gravest returns the position of the cause that accel.Health tells of several
// that count and hold at once: the first of those after which the device does
// not recover, else the first. Without it a harmless cause would hide one that
// is to keep the device away. There must be at least one.
func (o Options) Gravest(causes []string) int {
	return max(0, slices.IndexFunc(causes, func(c string) bool { return Matches(o.NeverRecover, c) }))
}
