package supervisor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
	statefile "github.com/divvy-gpu/divvy/internal/node/state"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

const (
	// retireAfter is how long a profile must have had no partitions before its resource
	// is retired: tools that repartition a device delete all partitions first.
	retireAfter = time.Minute
	// retryAfter is the pause before profiles are tried again that could not be offered.
	retryAfter = 30 * time.Second
)

// profiles are the profiles of the partitions of this node. It is safe for concurrent use.
type profiles struct {
	mu sync.Mutex
	// gone is since when a profile has had no partitions, zero while it has some or
	// that is not known, by vendor and accel.ProfileName.
	gone map[string]map[string]time.Time
}

func newProfiles() *profiles { return &profiles{gone: map[string]map[string]time.Time{}} }

// of are the profiles of a vendor. The caller holds mu.
func (p *profiles) of(vendor string) map[string]time.Time {
	if p.gone[vendor] == nil {
		p.gone[vendor] = map[string]time.Time{}
	}
	return p.gone[vendor]
}

// recall adds the profiles whose partitions an earlier run offered. Their resources are
// offered from the start: kubelet rejects pods that request a resource without a plugin.
func (p *profiles) recall(resources []accel.Resource) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range resources {
		for i := range accel.Vendors {
			if name, ok := accel.Vendors[i].ProfileOf(r); ok {
				p.of(accel.Vendors[i].Name)[name] = time.Time{}
			}
		}
	}
}

// discovered takes the outcome of a discovery of a vendor with partitions. What is not
// listed is gone if all devices were asked.
func (p *profiles) discovered(vendor string, found backend.Found, err error, now time.Time) {
	if v := accel.VendorNamed(vendor); v == nil || v.Partitions == "" {
		return
	}
	listed := map[string]bool{}
	for _, d := range found.Devices {
		if d.Profile != "" {
			listed[accel.ProfileName(d.Profile)] = true
		}
	}
	complete := err == nil && !found.Silent && len(found.Unasked) == 0 &&
		!slices.ContainsFunc(found.Faults, func(f backend.Fault) bool { return f.Cause != accel.CauseNotOffered })
	p.mu.Lock()
	defer p.mu.Unlock()
	gone := p.of(vendor)
	for name := range listed {
		gone[name] = time.Time{}
	}
	for name, since := range gone {
		switch {
		case listed[name]:
		case !complete:
			gone[name] = time.Time{}
		case since.IsZero():
			gone[name] = now
		}
	}
}

// wanted are the profiles to offer by vendor, sorted.
func (p *profiles) wanted(now time.Time) map[string][]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[string][]string{}
	for vendor, gone := range p.gone {
		maps.DeleteFunc(gone, func(_ string, since time.Time) bool { return !since.IsZero() && now.Sub(since) >= retireAfter })
		out[vendor] = slices.Sorted(maps.Keys(gone))
	}
	return out
}

// names are the profiles of all vendors, for people.
func names(wanted map[string][]string) string {
	var all []string
	for _, vendor := range slices.Sorted(maps.Keys(wanted)) {
		all = append(all, wanted[vendor]...)
	}
	return cmp.Or(strings.Join(all, ", "), "none")
}

// recallProfiles reads the profiles that an earlier run offered from the state folder.
func (s *supervisor) recallProfiles(ctx context.Context, dir string) {
	stored, err := statefile.Stored(dir)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Looking for the profiles that were offered before")
	}
	s.profiles.recall(stored)
}

// adopt applies the profiles that the node's partitions have now, if that changes
// what is offered, and returns what runs then. An error means that nothing runs.
func (s *supervisor) adopt(ctx context.Context, now *running) (*running, error) {
	wanted := s.profiles.wanted(time.Now())
	before, after := nodeconfig.WithProfiles(now.config, now.profiles), nodeconfig.WithProfiles(now.config, wanted)
	if slices.EqualFunc(before.Resources, after.Resources, func(a, b config.Resource) bool { return a.Name == b.Name }) {
		return now, nil
	}
	if time.Since(s.refused) < retryAfter {
		return now, nil
	}
	rejected := func(err error) {
		s.refused = time.Now()
		klog.FromContext(ctx).Error(err, "Cannot offer other profiles of partitions", "profiles", wanted)
		s.tell(events.ConfigurationRejected, fmt.Sprintf("the resources of the node's partitions cannot be offered: %v", err))
	}
	if mistakes := config.Validate(after, vendors.Names()); len(mistakes) > 0 {
		rejected(&config.MistakesError{Source: "profiles of partitions", Mistakes: mistakes})
		return now, nil
	}
	b, err := s.open(now.config)
	if err != nil {
		rejected(err)
		return now, nil
	}
	klog.FromContext(ctx).Info("The profiles of the node's partitions changed; applying them", "before", now.profiles, "profiles",
		wanted)
	next, refused, err := s.goOver(ctx, now, now.config, wanted, b)
	switch {
	case err != nil:
		return nil, err
	case refused != nil:
		rejected(refused)
	default:
		s.tell(events.PartitionsChanged, "the profiles of the node's partitions are now: "+names(wanted))
	}
	return next, nil
}
