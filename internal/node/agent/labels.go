package agent

import (
	"context"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/nodelabels"
)

// labelPatience is how long the labels of a vendor stay whose library fails:
// DaemonSets choose nodes by them, and a driver that resets a card is away for
// seconds.
const labelPatience = time.Minute

// publishLabels writes the labels that describe the node's devices.
func (a *Agent) publishLabels(ctx context.Context) error {
	names, all, complete := a.discoveries.all()
	if !complete {
		return nil // what an earlier run wrote stays until then
	}
	vendors := make([]nodelabels.Vendor, len(names))
	for i, name := range names {
		v, one := all[name], &vendors[i]
		one.Name, one.Tiers = name, sharedTiers(a.offerings, name, time.Now(), a.publisher.before)
		if v.err == nil || time.Since(v.since) < labelPatience {
			one.Found = v.found
			if l, ok := a.o.Backends[name].(backend.Labeler); ok && len(v.found.Devices) > 0 {
				one.Labels = l.Labels(sharingOf(a.o.Config.Resources, name))
			}
		}
	}
	wanted := nodelabels.Wanted(vendors, a.o.Config.Labels)
	if path := a.o.Config.AllocationPath; path != config.PathPlugin && a.o.Config.Labels != config.LabelNone {
		wanted[wire.PathLabel] = string(path)
	}
	return a.publisher.label(ctx, wanted)
}

// sharedTiers are the tiers, at a time, of the devices of a vendor that containers share:
// those that are given out by units or slices, and the partitions of one. Of a resource whose
// inventory is not known yet it is what an earlier run has published, which before returns.
func sharedTiers(all offerings, vendor string, now time.Time, before func(accel.Resource) (accel.Inventory, bool)) (tiers []accel.Tier) {
	for p := range all.parts(func(r *offering, p *pool) bool { return r.vendor == vendor && r.configured && p == r.parts[0] }) {
		in := see(p, (*alloc.Engine).Inventory)
		if !p.status().Known {
			in, _ = before(p.Resource)
		}
		for i := range in.Shares {
			if s := &in.Shares[i]; in.Unit != "" || s.Units > 1 || s.Parent != "" {
				tiers = append(tiers, s.Isolation.At(now).Memory)
			}
		}
	}
	return tiers
}

// sharingOf says how a vendor's whole devices are offered. A vendor's own feature
// discovery calls a shared resource renamed that is not that of whole devices.
func sharingOf(resources []config.Resource, vendor string) backend.Sharing {
	s := backend.Sharing{Replicas: 1}
	v := accel.VendorNamed(vendor)
	for _, r := range resources {
		switch {
		case r.Vendor != vendor || r.Mode != config.ModeTimeSlicing:
		case r.Profile == "":
			s.Replicas, s.Renamed = max(r.Replicas, 1), v == nil || r.Name != string(v.Devices)
		default:
			if s.Profiles == nil {
				s.Profiles = map[string]backend.Sharing{}
			}
			s.Profiles[accel.ProfileName(r.Profile)] = backend.Sharing{
				Replicas: max(r.Replicas, 1), Renamed: v == nil || accel.Resource(r.Name) != v.PartitionResource(r.Profile),
			}
		}
	}
	return s
}

// label writes the labels that differ. Those of others stay as they are.
func (p *publisher) label(ctx context.Context, wanted map[string]string) error {
	node, err := p.current()
	if err != nil {
		return err
	}
	change := p.labels.Merge(node.Labels, node.Annotations[nodelabels.OwnedAnnotation], wanted)
	log := klog.FromContext(ctx)
	for _, c := range change.Conflicts {
		if !p.conflicts[c] {
			log.Info("Keeping a label of the node that another client set", "conflict", c.String())
		}
	}
	p.conflicts = map[nodelabels.Conflict]bool{}
	for _, c := range change.Conflicts {
		p.conflicts[c] = true
	}
	if change.Empty() {
		return nil
	}
	patch, err := change.Patch()
	if err != nil {
		return fmt.Errorf("encode the node's labels: %w", err)
	}
	if err := p.send(ctx, types.MergePatchType, patch); err != nil {
		return fmt.Errorf("publish the node's labels: %w", err)
	}
	log.Info("Published the node's labels", "set", len(change.Set), "removed", change.Remove)
	return nil
}
