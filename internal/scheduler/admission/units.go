package admission

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Holder is a pod on a node that holds units of a resource there.
type Holder struct {
	Pod      accel.PodRef
	Node     string
	Resource accel.Resource
	// ConfigName is the named configuration that the node's label asks for; "" for
	// none.
	ConfigName string
	// Unit is the size of a unit that the node publishes, "" when it does not.
	Unit string
}

// Configs are the configurations of all nodes, as texts.
type Configs struct {
	// Base is what holds on every node, and Named what goes over it by the node's
	// label.
	Base  string
	Named map[string]string
}

// defaultName is the named configuration of nodes whose label asks for none.
const defaultName = "default"

// units returns the size of a unit of each resource of mode memory on nodes with
// that name. known is false where nothing can be said: of a configuration that
// cannot be read, or that is not there, the daemon keeps the one before.
func (c Configs) units(name string) (units map[accel.Resource]string, known bool) {
	node := config.Base()
	if mistakes, err := config.Decode([]byte(c.Base), &node); err != nil || len(mistakes) > 0 {
		return nil, false
	}
	text, ok := c.Named[cmp.Or(name, defaultName)]
	if name != "" && !ok {
		return nil, false
	}
	if ok {
		over := node
		mistakes, err := config.Decode([]byte(text), &over)
		switch {
		case err == nil && len(mistakes) == 0:
			node = over
		case err != nil || over.Kind != "":
			return nil, false
		default:
			// One written for another plugin has no units of memory, and leaves those of
			// the base.
		}
	}
	config.Complete(&node)
	units = map[accel.Resource]string{}
	for _, r := range node.Resources {
		if r.Mode == config.ModeMemory {
			units[accel.Resource(r.Name)] = r.MemoryUnit
		}
	}
	return units, true
}

// maxNamed is how many pods a message names.
const maxNamed = 10

// UnitError says why units must stay as large as they are, and which pods stand
// in the way.
type UnitError struct {
	Resource accel.Resource
	// Old and New are sizes of a unit in GB, such as "0.1".
	Old, New string
	// Pods hold units of the old size, in the order of their names.
	Pods []accel.PodRef
}

func (e *UnitError) Error() string {
	return fmt.Sprintf("memoryUnit of %s cannot change from %q to %q while pods hold units of it, because existing requests would be "+
		"reinterpreted: %s. "+
		"Delete these pods or wait until they have ended, then try again", e.Resource, e.Old, e.New, named(e.Pods))
}

// named names pods, or the first of them and how many more there are.
func named(pods []accel.PodRef) string {
	var names []string
	for _, p := range pods[:min(len(pods), maxNamed)] {
		names = append(names, p.String())
	}
	text := strings.Join(names, ", ")
	if more := len(pods) - len(names); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// CheckUnits compares configurations before and after a change. The error, if any,
// is a *UnitError for the first resource, by name, whose unit would change under
// pods. A resource that pods hold and that is taken away is no error, as it can be
// wanted: then there is a warning.
func CheckUnits(before, after Configs, holders []Holder) (warnings []string, err error) {
	type nodeUnits struct{ old, new map[accel.Resource]string }
	byName := map[string]nodeUnits{}
	changed := map[accel.Resource]*UnitError{}
	gone := map[accel.Resource][]accel.PodRef{}
	holders = slices.SortedFunc(slices.Values(holders), func(a, b Holder) int { return strings.Compare(a.Pod.String(), b.Pod.String()) })
	for _, h := range holders {
		units, seen := byName[h.ConfigName]
		if !seen {
			if old, known := before.units(h.ConfigName); known {
				units.old = old
			}
			// What cannot be read changes nothing: the daemon keeps what it has.
			if now, known := after.units(h.ConfigName); known {
				units.new = now
			} else {
				units.new = units.old
			}
			byName[h.ConfigName] = units
		}
		was, is := units.old[h.Resource], units.new[h.Resource]
		switch {
		case was == is:
			continue
		case is == "":
			gone[h.Resource] = append(gone[h.Resource], h.Pod)
			continue
		}
		// What the node publishes goes before what it was told: a change back, to
		// what pods hold, is none.
		held := cmp.Or(h.Unit, was)
		if held == "" || held == is {
			continue
		}
		e := changed[h.Resource]
		if e == nil {
			e = &UnitError{Resource: h.Resource, Old: held, New: is}
			changed[h.Resource] = e
		}
		if e.Old == held && e.New == is {
			e.Pods = append(e.Pods, h.Pod)
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(gone)) {
		warnings = append(warnings, fmt.Sprintf("pods still hold units of %s, which is no longer offered: %s", resource,
			named(gone[resource])))
	}
	for _, resource := range slices.Sorted(maps.Keys(changed)) {
		return warnings, changed[resource]
	}
	return warnings, nil
}
