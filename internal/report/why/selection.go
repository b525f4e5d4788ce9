package why

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// correction is a name in an annotation of the pod that no device of the cluster has, and the
// name of one that is most like it.
type correction struct{ key, name, near string }

// corrections are those of the models and devices to use.
func (w *world) corrections(a *ask) []correction {
	s := a.shared.Selection
	if s == nil {
		return nil
	}
	models, ids := map[string]bool{}, map[string]bool{}
	for _, n := range w.nodes {
		if in := n.inventory(a.shared.Resource); in != nil {
			for _, share := range in.Shares {
				models[share.Model], ids[string(share.ID)] = true, true
			}
		}
	}
	var out []correction
	look := func(key string, names []string, have map[string]bool, only func(name string) *accel.Selection) {
		for _, name := range names {
			matches := func(model, id string) bool { return only(name).Names(accel.DeviceID(id), model) }
			if slices.ContainsFunc(slices.Collect(maps.Keys(have)), func(of string) bool { return matches(of, of) }) {
				continue
			}
			if near := nearest(name, slices.Sorted(maps.Keys(have))); near != "" {
				out = append(out, correction{key, name, near})
			}
		}
	}
	look(wire.UseModelsAnnotation, s.UseModels, models, func(name string) *accel.Selection {
		return &accel.Selection{UseModels: []string{name}}
	})
	look(wire.UseDevicesAnnotation, s.UseIDs, ids, func(name string) *accel.Selection { return &accel.Selection{UseIDs: []string{name}} })
	return out
}

// explainSelection says if a name of the pod's selection is misspelt.
func (d *diagnosis) explainSelection() {
	e, a := d.e, d.a
	for _, c := range d.world.corrections(a) {
		e.Causes = append(e.Causes, Cause{Code: SelectionMistake, Object: podText(a.pod), Evidence: []string{
			c.key + ": " + a.pod.Annotations[c.key],
		}, Detail: fmt.Sprintf("no device is %s, which %s names; the nearest name is %s", c.name, c.key, c.near)})
	}
}

// corrected are the annotations with the names that devices have, nil where none is misspelt.
func (w *world) corrected(a *ask) map[string]string {
	out := map[string]string{}
	for _, c := range w.corrections(a) {
		text, had := out[c.key]
		if !had {
			text = a.pod.Annotations[c.key]
		}
		names := strings.Split(text, ",")
		for i := range names {
			if strings.TrimSpace(names[i]) == c.name {
				names[i] = c.near
			}
		}
		out[c.key] = strings.Join(names, ",")
	}
	return out
}
