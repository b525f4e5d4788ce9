// Package nodelabels describes a node's devices in labels, and works out which
// labels of a node have to change for that. It is pure: labels in, a patch out;
// the node daemon reads and writes the node.
//
// A label belongs to whoever wrote it. Keys that Divvy wrote stand in an
// annotation of the node, and only those are changed or removed: a label that
// the vendor's own feature discovery has set, or a person, stays as it is.
package nodelabels

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// OwnedAnnotation is the annotation of a node that holds the keys of the labels
// that Divvy wrote, sorted and joined by commas.
const OwnedAnnotation = wire.LabelsAnnotation

// domain is that of the labels that are the same for all vendors.
const domain = "divvy.dev/"

// Vendor is one vendor's devices on the node.
type Vendor struct {
	// Name is the vendor's, as the configuration spells it.
	Name  string
	Found backend.Found
	// Labels are those of the vendor's own feature discovery, as
	// backend.Labeler returns them; nil for a vendor that has none.
	Labels map[string]string
	// Tiers are those of the memory of the devices that containers share.
	Tiers []accel.Tier
}

// Wanted returns the labels that describe the vendors' devices. A vendor
// without devices has none. Values are made valid.
//
//	divvy.dev/<vendor>.present  "true"
//	divvy.dev/<vendor>.count    the number of devices, healthy or not, partitions not counted
//	divvy.dev/<vendor>.model    the product name
//	divvy.dev/<vendor>.memory   the memory of one device, in MiB
//	divvy.dev/<vendor>.driver   the driver's version
//	divvy.dev/<vendor>.isolation  the lowest tier of the devices that containers share, if there are any
//
// On a node with several models, model and memory are those of the model that
// most devices are of, the one with the lowest index among equals, so they do
// not depend on the order of discovery.
func Wanted(vendors []Vendor, policy v1alpha1.LabelPolicy) map[string]string {
	out := map[string]string{}
	if policy == v1alpha1.LabelNone {
		return out
	}
	for _, v := range vendors {
		devices := backend.Whole(v.Found.Devices)
		if len(devices) == 0 {
			continue
		}
		model := backend.MostFrequent(devices)
		labels := map[string]string{
			"present": "true", "count": strconv.Itoa(len(devices)), "model": model.Model, "driver": v.Found.Driver,
		}
		if model.MemoryBytes > 0 {
			labels["memory"] = strconv.FormatInt(model.MemoryBytes>>20, 10)
		}
		if len(v.Tiers) > 0 {
			labels["isolation"] = accel.LowestTier(v.Tiers...).String()
		}
		maps.Copy(out, backend.Labels(domain+v.Name+".", labels))
		if policy == v1alpha1.LabelDivvy {
			continue
		}
		for key, value := range v.Labels {
			out[key] = backend.LabelValue(value)
		}
	}
	return out
}

// Conflict is a label that somebody else has set to another value.
type Conflict struct{ Key, Theirs, Ours string }

// String says it to a person.
func (c Conflict) String() string {
	return fmt.Sprintf("label %s=%s was set by another client and is kept; divvy-node would set %q", c.Key, c.Theirs, c.Ours)
}

// Change is what has to change at a node.
type Change struct {
	// Set and Remove are the labels to write and to take away; Remove is
	// sorted.
	Set    map[string]string
	Remove []string
	// Owned is the new value of OwnedAnnotation, "" for no annotation.
	Owned string
	// Conflicts are the wanted labels that are not written, by key.
	Conflicts []Conflict

	before string
}

// Empty reports whether there is nothing to write.
func (c Change) Empty() bool { return len(c.Set) == 0 && len(c.Remove) == 0 && c.Owned == c.before }

// Patch returns the change as a JSON merge patch of the node. Labels and
// annotation change together, so a label that was written is known as Divvy's
// whatever happens afterwards.
func (c Change) Patch() ([]byte, error) {
	labels := map[string]any{}
	for key, value := range c.Set {
		labels[key] = value
	}
	for _, key := range c.Remove {
		labels[key] = nil
	}
	annotations := map[string]any{OwnedAnnotation: nil}
	if c.Owned != "" {
		annotations[OwnedAnnotation] = c.Owned
	}
	return json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels, "annotations": annotations}})
}

// Merge compares the labels that a node has with those that are wanted. owned
// is the value of the node's OwnedAnnotation, "" for none.
//
// A key in owned is set to what is wanted, or removed. Another key that the
// node has is somebody else's, also with the value that is wanted: it is
// neither written nor owned, and reported when its value is another. Labels of
// Kubernetes itself are never touched, whatever the annotation says.
func Merge(current map[string]string, owned string, wanted map[string]string) Change {
	c := Change{Set: map[string]string{}, before: owned}
	ours := map[string]bool{}
	for _, key := range wire.OwnedLabels(owned) {
		ours[key] = true
	}
	var keep []string
	for _, key := range slices.Sorted(maps.Keys(wanted)) {
		theirs, there := current[key]
		switch {
		case wire.ReservedLabel(key):
			continue
		case there && !ours[key]:
			if theirs != wanted[key] {
				c.Conflicts = append(c.Conflicts, Conflict{Key: key, Theirs: theirs, Ours: wanted[key]})
			}
			continue
		case !there || theirs != wanted[key]:
			c.Set[key] = wanted[key]
		}
		keep = append(keep, key)
	}
	for _, key := range slices.Sorted(maps.Keys(ours)) {
		_, there := current[key]
		if _, still := wanted[key]; there && !still {
			c.Remove = append(c.Remove, key)
		}
	}
	c.Owned = strings.Join(keep, ",")
	return c
}
