package backend

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Recovery says when a device that was unhealthy takes pods again. A device
// that turns unhealthy does so at once, whatever the policy.
type Recovery struct {
	// After is how long the device must have been well without a break; 0 is at
	// once. It is twice as long for a device that failed again before it had taken
	// pods for that time, each time that it does so, up to MaxAfter.
	After time.Duration
	// Never are causes, as patterns with "*", after which the device is put into
	// quarantine.
	Never []string
	// Quarantine has the devices that stay unhealthy until they are released; nil is
	// one that ends with Watch.
	Quarantine Quarantine
	// Pause is that of Options: Watch looks at once when it changes. Devices that were
	// unhealthy for a pause alone take pods again when it ends, and it is no failure.
	Pause *Pause
}

// Quarantine are the devices that take no pods until an administrator releases them.
// It is safe for concurrent use.
type Quarantine interface {
	// Of returns a device's entry, false when it is not in quarantine.
	Of(accel.DeviceID) (accel.Quarantine, bool)
	// Add puts a device into quarantine. One that is there stays as it is.
	Add(accel.Quarantine)
}

// MaxAfter is the longest time that a device must be well because it failed again
// and again, unless Recovery.After is longer.
const MaxAfter = 10 * time.Minute

// Patience is how long devices count as they were found last while their vendor's
// library answers nothing about them. A driver that resets a card answers nothing
// for some ten seconds; one that answers nothing for longer may never do so again,
// and pods that are given devices meanwhile may wait for it.
const Patience = time.Minute

// recovery applies a Recovery to one discovery after the other. It remembers
// devices by ID, so that a device which comes back under another index is still
// the one that failed. Devices that cannot be reached have failed too. Not safe
// for concurrent use.
type recovery struct {
	vendor  string
	policy  Recovery
	devices map[accel.DeviceID]*record
	// last is what the library said when it answered last, empty after an error; answered is
	// the same after any error, and links are those that it told of last.
	last, answered Found
	links          []accel.Link
}

// record is what is remembered of a device.
type record struct {
	// device is how the library described it last, and at is when.
	device accel.Device
	at     time.Time
	// failure is what the device is not trusted for; healthy while it is trusted.
	failure accel.Health
	// well is when the device was found well for the first time after it failed;
	// zero while it is not well.
	well time.Time
	// after is how long it must be well, and trusted when it was so the last time.
	after   time.Duration
	trusted time.Time
}

func newRecovery(vendor string, p Recovery) *recovery {
	if p.Quarantine == nil {
		p.Quarantine = memory{}
	}
	return &recovery{vendor: vendor, policy: p, devices: map[accel.DeviceID]*record{}}
}

// memory is a quarantine that one goroutine uses.
type memory map[accel.DeviceID]accel.Quarantine

func (m memory) Of(id accel.DeviceID) (accel.Quarantine, bool) {
	q, ok := m[id]
	return q, ok
}

func (m memory) Add(q accel.Quarantine) {
	if _, ok := m[q.Device]; !ok {
		m[q.Device] = q
	}
}

// apply returns found as it counts: with the devices unhealthy that are not trusted
// yet, and those that were not asked as they were, while that is not too long ago.
// next is when that may change without anything else changing, zero for never.
func (r *recovery) apply(found Found, now time.Time) (_ Found, next time.Time) {
	r.last, r.answered = found, found
	if !found.Silent {
		r.links = found.Links
	}
	return r.count(found, now)
}

// without returns what counts after a discovery that failed: for a while the devices
// as they were, if the library merely does not answer, else the error.
func (r *recovery) without(err error, now time.Time) (Found, error) {
	var paused *PausedError
	if errors.As(err, &paused) {
		return r.during(paused, err)
	}
	if u := Unavailable(err); u != nil && u.Silent {
		if found, ok := r.silence(err, now); ok {
			return found, nil
		}
	}
	r.last = Found{}
	for _, d := range r.inOrder() {
		r.failed(d, d.device, accel.Health{Unhealthy: true, Cause: accel.CauseUnreachable, Reason: err.Error()}, now)
	}
	return Found{}, err
}

// during returns what counts during a pause: the devices that the library reported last,
// all unhealthy for its reason, or err if it has reported none.
func (r *recovery) during(paused *PausedError, err error) (Found, error) {
	found := r.answered
	if len(found.Devices)+len(found.Unasked) == 0 {
		return Found{}, err
	}
	found.Devices, found.Unasked, found.Silent = slices.Clone(found.Devices), nil, false
	for _, f := range r.answered.Unasked {
		if d := r.devices[f.ID]; d != nil {
			found.Devices = append(found.Devices, d.device)
		}
	}
	slices.SortFunc(found.Devices, byDeviceIndex)
	for i := range found.Devices {
		found.Devices[i].Health = paused.Health
		found.Devices[i].Health.Reason = paused.Error()
		if q, ok := r.quarantined(found.Devices[i]); ok {
			found.Devices[i].Health = q.Health()
		}
	}
	return found, nil
}

// silence returns what counts while the library answers nothing, false when it has
// not answered for too long.
func (r *recovery) silence(err error, now time.Time) (Found, bool) {
	found := r.last
	found.Devices, found.Unasked, found.Silent = nil, nil, true
	recent := false
	unasked := func(index int, id accel.DeviceID) {
		found.Unasked = append(found.Unasked, Fault{Index: index, ID: id, Err: err, Cause: accel.CauseUnreachable})
		recent = recent || r.recent(id, now)
	}
	for _, d := range r.last.Devices {
		unasked(d.Index, d.ID)
	}
	for _, f := range r.last.Unasked {
		unasked(f.Index, f.ID)
	}
	if !recent {
		return Found{}, false
	}
	slices.SortFunc(found.Unasked, byIndex)
	found, _ = r.count(found, now)
	return found, true
}

// recent reports whether the library described a device not too long ago.
func (r *recovery) recent(id accel.DeviceID, now time.Time) bool {
	d := r.devices[id]
	return d != nil && now.Sub(d.at) < Patience
}

func (r *recovery) count(found Found, now time.Time) (_ Found, next time.Time) {
	out := found
	out.Devices, out.Faults, out.Unasked = nil, slices.Clone(found.Faults), nil
	here := map[accel.DeviceID]bool{}
	for _, device := range found.Devices {
		d := r.devices[device.ID]
		if d == nil {
			d = &record{}
			r.devices[device.ID] = d
		}
		d.device, d.at, here[device.ID] = device, now, true
		switch {
		case device.Health.Unhealthy:
			r.failed(d, device, device.Health, now)
		case d.failure.Unhealthy:
			if due := r.trust(d, now); !due.IsZero() && (next.IsZero() || due.Before(next)) {
				next = due
			}
		}
		out.Devices = append(out.Devices, r.shown(d, device))
	}
	for _, f := range found.Unasked {
		if !r.recent(f.ID, now) {
			out.Faults = append(out.Faults, f)
			continue
		}
		d := r.devices[f.ID]
		d.well = time.Time{} // whether it is well is not known
		if r.final(f.Cause) {
			r.failed(d, d.device, f.health(), now)
		}
		out.Unasked, here[f.ID] = append(out.Unasked, f), true
		out.Devices = append(out.Devices, r.shown(d, d.device))
	}
	slices.SortFunc(out.Faults, byIndex)
	slices.SortFunc(out.Devices, byDeviceIndex)
	if found.Silent { // connections do not change
		out.Links = slices.DeleteFunc(slices.Clone(r.links), func(l accel.Link) bool { return !here[l.A] || !here[l.B] })
	}
	for _, f := range out.Faults {
		if f.ID == "" || here[f.ID] {
			continue
		}
		here[f.ID] = true
		device := accel.Device{ID: f.ID, Index: f.Index}
		if d := r.devices[f.ID]; d != nil {
			device.Parent = d.device.Parent
		}
		r.failed(r.devices[f.ID], device, f.health(), now)
	}
	for _, d := range r.inOrder() {
		switch {
		case here[d.device.ID]:
		case d.device.Parent != "" && described(found, d.device.Parent):
			delete(r.devices, d.device.ID) // a partition that was deleted has not failed
		default:
			r.failed(d, d.device, accel.Health{Unhealthy: true, Cause: accel.CauseLost, Reason: "the device was lost"}, now)
		}
	}
	return out, next
}

// inOrder returns the records in the order of the devices' indexes: partitions come after
// what they are cut from.
func (r *recovery) inOrder() []*record {
	return slices.SortedFunc(maps.Values(r.devices), func(a, b *record) int { return byDeviceIndex(a.device, b.device) })
}

// described reports whether the library described the device.
func described(found Found, id accel.DeviceID) bool {
	return slices.ContainsFunc(found.Devices, func(d accel.Device) bool { return d.ID == id })
}

// health is that of a device with a fault.
func (f Fault) health() accel.Health {
	return accel.Health{Unhealthy: true, Cause: cmp.Or(f.Cause, accel.CauseLost), Reason: errorText(f.Err)}
}

// failed notes that a device cannot be trusted. d is nil for one that was never
// described.
func (r *recovery) failed(d *record, device accel.Device, why accel.Health, now time.Time) {
	// A partition is in quarantine with its parent, which comes before it.
	if _, with := r.policy.Quarantine.Of(device.Parent); r.final(why.Cause) && !with {
		r.policy.Quarantine.Add(accel.Quarantine{
			Device: device.ID, Vendor: r.vendor, Index: device.Index, Cause: why.Cause, Reason: why.Reason,
			Since: now.UTC().Truncate(time.Second),
		})
	}
	if d == nil {
		return
	}
	d.well = time.Time{}
	switch {
	case !d.failure.Unhealthy && !d.trusted.IsZero() && now.Sub(d.trusted) < d.after:
		d.after = min(2*d.after, max(MaxAfter, r.policy.After))
	case !d.failure.Unhealthy:
		d.after = r.policy.After
	}
	d.failure = why
}

// trust trusts a device that is well again when it has been so for long enough;
// else it returns when that will be, zero for never.
func (r *recovery) trust(d *record, now time.Time) (due time.Time) {
	if d.well.IsZero() {
		d.well = now
	}
	if due = d.well.Add(d.after); now.Before(due) {
		return due
	}
	d.failure, d.trusted = accel.Health{}, now
	return time.Time{}
}

// shown is a device, as the library described it, with the health that counts.
func (r *recovery) shown(d *record, device accel.Device) accel.Device {
	q, quarantined := r.quarantined(device)
	switch {
	case quarantined:
		device.Health = q.Health()
	case !d.failure.Unhealthy:
	case d.well.IsZero():
		device.Health = d.failure
	default:
		device.Health = d.failure
		device.Health.Reason = fmt.Sprintf("%s; well again, and trusted once it was so for %v", d.failure.Reason, d.after)
	}
	return device
}

// quarantined returns the entry of a device, or of the one that it is a partition of.
func (r *recovery) quarantined(device accel.Device) (accel.Quarantine, bool) {
	if q, ok := r.policy.Quarantine.Of(device.ID); ok || device.Parent == "" {
		return q, ok
	}
	return r.policy.Quarantine.Of(device.Parent)
}

// final reports whether a device that failed for cause is put into quarantine.
func (r *recovery) final(cause string) bool { return cause != "" && Matches(r.policy.Never, cause) }

func byDeviceIndex(a, b accel.Device) int { return cmp.Compare(a.Index, b.Index) }

func byIndex(a, b Fault) int { return cmp.Compare(a.Index, b.Index) }

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

// FatalCauses returns the causes, as patterns, that a configuration names in list:
// "default" stands for byDefault, those that mean that a device of the vendor must be
// reset or replaced, and nil is "default" alone.
func FatalCauses(list, byDefault []string) []string {
	if list == nil {
		return byDefault
	}
	var out []string
	for _, p := range list {
		if p == "default" {
			out = append(out, byDefault...)
		} else {
			out = append(out, p)
		}
	}
	return out
}

// Gravest returns the position of the cause that accel.Health tells of several
// that count and hold at once: the first of those after which the device does
// not recover, else the first. Without it a harmless cause would hide one that
// is to keep the device away. There must be at least one. fatalByDefault is that of
// FatalCauses.
func (o Options) Gravest(causes []string, fatalByDefault ...string) int {
	fatal := FatalCauses(o.NeverRecover, fatalByDefault)
	return max(0, slices.IndexFunc(causes, func(c string) bool { return Matches(fatal, c) }))
}
