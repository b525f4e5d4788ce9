package program

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/kubernetes/pkg/scheduler"
	config "k8s.io/kubernetes/pkg/scheduler/apis/config"

	divvy "github.com/divvy-gpu/divvy/internal/app/scheduler"
	"github.com/divvy-gpu/divvy/internal/scheduler/plugin"
)

// check says what is wrong with the profiles and extenders of a configuration, and what to write.
func check(s *scheduler.Scheduler, extenders []config.Extender, manages func(resource string) bool) error {
	var wrong []error
	for _, name := range slices.Sorted(maps.Keys(s.Profiles)) {
		for _, problem := range problems(s.Profiles[name].ListPlugins()) {
			wrong = append(wrong, fmt.Errorf("profile %s: %s", name, problem))
		}
	}
	for i := range extenders {
		e := &extenders[i]
		switch {
		case slices.ContainsFunc(e.ManagedResources, func(r config.ExtenderManagedResource) bool { return manages(r.Name) }):
			wrong = append(wrong, fmt.Errorf("the extender %s is configured for a resource that the plugin %s manages: remove it from "+
				"extenders", e.URLPrefix, plugin.Name))
		case len(e.ManagedResources) == 0:
			wrong = append(wrong, fmt.Errorf("the extender %s is called for all pods: remove it from extenders, or give it "+
				"managedResources", e.URLPrefix))
		}
	}
	if len(wrong) == 0 {
		return nil
	}
	return fmt.Errorf("%w\nA configuration that works is\n%s", errors.Join(wrong...), divvy.Example)
}

// problems are those of one profile.
func problems(p *config.Plugins) (out []string) {
	points := []struct {
		name, where string
		set         config.PluginSet
		before      string // the plugin that ours must come before
		between     string // what is enabled between the two
	}{
		{"preFilter", "multiPoint", p.PreFilter, "", ""},
		{"filter", "multiPoint", p.Filter, "", ""},
		{"preScore", "multiPoint", p.PreScore, "", ""},
		{"score", "multiPoint", p.Score, "", ""},
		{"reserve", "multiPoint", p.Reserve, "", ""},
		{"postBind", "multiPoint", p.PostBind, "", ""},
		{"postFilter", "postFilter", p.PostFilter, "DefaultPreemption", "{name: DynamicResources}, "},
		{"bind", "bind", p.Bind, "DefaultBinder", ""},
	}
	var missing []string
	for _, point := range points {
		at := func(name string) int {
			return slices.IndexFunc(point.set.Enabled, func(q config.Plugin) bool { return q.Name == name })
		}
		own, other := at(plugin.Name), at(point.before)
		switch {
		case own < 0:
			missing = append(missing, point.name)
		case other >= 0 && other < own:
			out = append(out, fmt.Sprintf("%[1]s comes before %[2]s in %[3]s: write %[3]s: {disabled: [{name: \"*\"}], "+
				"enabled: [{name: %[2]s}, %[4]s{name: %[1]s}]}", point.before, plugin.Name, point.name, point.between))
		}
	}
	switch {
	case len(missing) == len(points):
		out = append(out, fmt.Sprintf("it does not enable the plugin %s, so it would bind pods to devices that others hold: enable it, "+
			"or remove the profile", plugin.Name))
	case len(missing) > 0:
		out = append(out, fmt.Sprintf("the plugin %s is missing in %s: write multiPoint: {enabled: [{name: %s}]}, and do not disable it",
			plugin.Name, strings.Join(missing, ", "), plugin.Name))
	}
	return out
}
