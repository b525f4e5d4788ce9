package nodeagent

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
)

// tenants knows which chips are given out, and as what, so that resources that
// are made of the same chips withdraw them from each other. A chip is the
// smallest thing that a vendor numbers; a board counts as all of its chips. It
// is safe for concurrent use.
type tenants struct {
	mu  sync.Mutex
	all []*tenant
}

// tenant is what one part of a resource says of the chips that it gave out.
type tenant struct {
	tenants  *tenants
	resource accel.Resource
	vendor   string

	// Guarded by tenants.mu.
	known bool
	held  map[accel.DeviceID]bool
	given map[accel.DeviceID]time.Time
}

// join adds a tenant that does not know yet what it holds.
func (t *tenants) join(resource accel.Resource, vendor string) *tenant {
	t.mu.Lock()
	defer t.mu.Unlock()
	one := &tenant{tenants: t, resource: resource, vendor: vendor, given: map[accel.DeviceID]time.Time{}}
	t.all = append(t.all, one)
	return one
}

// set says which chips containers hold; what was given less than grace ago is
// held as well.
func (t *tenant) set(held map[accel.DeviceID]bool, grace time.Duration) {
	now := time.Now()
	t.tenants.mu.Lock()
	defer t.tenants.mu.Unlock()
	t.known, t.held = true, held
	// Not those that are held: a slice may be held and another one be just given.
	maps.DeleteFunc(t.given, func(_ accel.DeviceID, at time.Time) bool { return now.Sub(at) >= grace })
}

// give says that a container is just getting chips.
func (t *tenant) give(chips ...accel.DeviceID) { t.giveAt(time.Now(), chips...) }

// giveAt says that a container has got chips at that time.
func (t *tenant) giveAt(at time.Time, chips ...accel.DeviceID) {
	t.tenants.mu.Lock()
	defer t.tenants.mu.Unlock()
	for _, c := range chips {
		t.given[c] = at
	}
}

// has reports whether the tenant itself holds a chip.
func (t *tenant) has(chip accel.DeviceID) bool {
	t.tenants.mu.Lock()
	defer t.tenants.mu.Unlock()
	return t.holds(chip)
}

// holds is has for a caller that holds mu.
func (t *tenant) holds(chip accel.DeviceID) bool {
	_, given := t.given[chip]
	return given || t.held[chip]
}

// elsewhere returns the resource as which another tenant holds a chip, false
// when none does.
func (t *tenant) elsewhere(chips ...accel.DeviceID) (accel.Resource, bool) {
	t.tenants.mu.Lock()
	defer t.tenants.mu.Unlock()
	for _, other := range t.tenants.all {
		// Whatever its vendor: it may have been another one's, and ids are unique.
		if other == t {
			continue
		}
		for _, c := range chips {
			if other.holds(c) {
				return other.resource, true
			}
		}
	}
	return "", false
}

// unknown returns another resource of the same vendor of which it is not known
// yet what containers hold, false when there is none.
func (t *tenant) unknown() (accel.Resource, bool) {
	t.tenants.mu.Lock()
	defer t.tenants.mu.Unlock()
	for _, other := range t.tenants.all {
		if other != t && other.vendor == t.vendor && !other.known {
			return other.resource, true
		}
	}
	return "", false
}

// settle waits until it is certain whether kubelet kept what it was given last:
// a pod may be refused right after its containers were served, and the next must
// not suffer for that. It is false when there is nothing to wait for.
func (t *tenant) settle(ctx context.Context) bool {
	return t.unsettled() && sleep(ctx, recordedBefore)
}

// unsettled reports whether chips of the vendor were given out just now.
func (t *tenant) unsettled() bool {
	now := time.Now()
	t.tenants.mu.Lock()
	defer t.tenants.mu.Unlock()
	for _, one := range t.tenants.all {
		if one.vendor != t.vendor {
			continue
		}
		for _, at := range one.given {
			if now.Sub(at) < recordedBefore {
				return true
			}
		}
	}
	return false
}

// givenOutAs is the reason of a device that is withdrawn.
func givenOutAs(r accel.Resource) string { return accel.ReasonGivenOut + string(r) }
