package admission

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

const (
	gcu accel.Resource = "enflame.com/gcu-memory"
	gpu accel.Resource = "nvidia.com/gpu-memory"
)

// file is a configuration that offers resources of mode memory, each as
// name=unit, beside one of another mode.
func file(resources ...string) string {
	text := "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\nresources:\n- {name: nvidia.com/gpu, vendor: nvidia, mode: " +
		"exclusive}\n"
	for _, r := range resources {
		name, unit, _ := strings.Cut(r, "=")
		text += fmt.Sprintf("- {name: %s, vendor: enflame, mode: memory, memoryUnit: %q}\n", name, unit)
	}
	return text
}

// only is a configuration of the base alone.
func only(resources ...string) Configs { return Configs{Base: file(resources...)} }

func holder(name string, resource accel.Resource, config, unit string) Holder {
	return Holder{Pod: accel.PodRef{Namespace: "team", Name: name}, Node: "node-1", Resource: resource, ConfigName: config, Unit: unit}
}

func TestCheckUnits(t *testing.T) {
	one := []Holder{holder("a", gcu, "", "1")}
	named := func(base string, named map[string]string) Configs { return Configs{Base: base, Named: named} }
	nvidiaFile := "version: v1\nflags: {migStrategy: none}\n"
	tests := map[string]struct {
		before, after Configs
		holders       []Holder
		refused       string // part of the error
		warned        string // part of a warning
	}{
		"another unit under a pod": {only("enflame.com/gcu-memory=1"), only("enflame.com/gcu-memory=0.1"), one,
			`memoryUnit of enflame.com/gcu-memory cannot change from "1" to "0.1" while pods hold units of it, because existing requests ` +
				`would be reinterpreted: team/a. Delete`, ""},
		"another unit and nobody": {only("enflame.com/gcu-memory=1"), only("enflame.com/gcu-memory=0.1"), nil, "", ""},
		"the same unit":           {only("enflame.com/gcu-memory=1"), only("enflame.com/gcu-memory=1"), one, "", ""},
		"a setting beside it": {only("enflame.com/gcu-memory=1"),
			Configs{Base: file("enflame.com/gcu-memory=1") + "logLevel: debug\n"}, one, "", ""},
		"the unit of another resource": {only("enflame.com/gcu-memory=1", "nvidia.com/gpu-memory=1"),
			only("enflame.com/gcu-memory=1", "nvidia.com/gpu-memory=0.1"), one, "", ""},
		"of several the one that is held": {only("enflame.com/gcu-memory=1", "nvidia.com/gpu-memory=1"),
			only("enflame.com/gcu-memory=0.1", "nvidia.com/gpu-memory=0.1"),
			[]Holder{holder("g", gpu, "", "1")}, `memoryUnit of nvidia.com/gpu-memory cannot change from "1" to "0.1"`, ""},
		"back to what is held": {only("enflame.com/gcu-memory=0.1"), only("enflame.com/gcu-memory=1"), one, "", ""},
		"on to a third": {only("enflame.com/gcu-memory=0.1"), only("enflame.com/gcu-memory=0.01"), one,
			`from "1" to "0.01"`, ""},
		"on a node that is away": {only("enflame.com/gcu-memory=1"), only("enflame.com/gcu-memory=0.1"),
			[]Holder{holder("a", gcu, "", "")}, `from "1" to "0.1"`, ""},
		"a unit that was left out": {Configs{Base: strings.ReplaceAll(file("enflame.com/gcu-memory=1"), `, memoryUnit: "1"`,
			"")}, only("enflame.com/gcu-memory=1"), one, "", ""},
		"a resource that is removed": {only("enflame.com/gcu-memory=1"), only(), one,
			"", "pods still hold units of enflame.com/gcu-memory, which is no longer offered: team/a"},
		"one that comes back with another unit": {only(), only("enflame.com/gcu-memory=0.1"), one, `from "1" to "0.1"`, ""},
		"a resource that is renamed": {only("enflame.com/gcu-memory=1"), only("enflame.com/memory=0.1"), one,
			"", "no longer offered"},
		"another mode under the name": {only("enflame.com/gcu-memory=1"),
			Configs{Base: strings.ReplaceAll(file("enflame.com/gcu-memory=1"), `mode: memory, memoryUnit: "1"`, "mode: exclusive")}, one,
			"", "no longer offered"},
		"a configuration that is broken": {only("enflame.com/gcu-memory=1"), Configs{Base: "resources: ["}, one, "", ""},
		"one with a key that does not exist": {only("enflame.com/gcu-memory=1"),
			Configs{Base: file("enflame.com/gcu-memory=0.1") + "colour: red\n"}, one, "", ""},
		"a broken one that is mended": {Configs{Base: "resources: ["}, only("enflame.com/gcu-memory=0.1"), one,
			`from "1" to "0.1"`, ""},
		"a broken one that is mended as it is": {Configs{Base: "resources: ["}, only("enflame.com/gcu-memory=1"), one, "", ""},

		"a named configuration on its nodes": {
			named(file("enflame.com/gcu-memory=1"), map[string]string{"fine": file("enflame.com/gcu-memory=0.1")}),
			named(file("enflame.com/gcu-memory=1"), map[string]string{"fine": file("enflame.com/gcu-memory=0.01")}),
			[]Holder{holder("a", gcu, "fine", "0.1"), holder("b", gcu, "", "1")},
			`from "0.1" to "0.01" while pods hold units of it, because existing requests would be reinterpreted: team/a.`, ""},
		"a named configuration on nobody's node": {
			named(file("enflame.com/gcu-memory=1"), map[string]string{"fine": file("enflame.com/gcu-memory=0.1")}),
			named(file("enflame.com/gcu-memory=1"), map[string]string{"fine": file("enflame.com/gcu-memory=0.01")}), one, "", ""},
		"the base under a named one that has resources": {
			named(file("enflame.com/gcu-memory=1"), map[string]string{"fine": file("enflame.com/gcu-memory=1")}),
			named(file("enflame.com/gcu-memory=0.1"), map[string]string{"fine": file("enflame.com/gcu-memory=1")}),
			[]Holder{holder("a", gcu, "fine", "1")}, "", ""},
		"the base under a named one without": {
			named(file("enflame.com/gcu-memory=1"),
				map[string]string{"loud": "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\nlogLevel: debug\n"}),
			named(file("enflame.com/gcu-memory=0.1"),
				map[string]string{"loud": "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\nlogLevel: debug\n"}),
			[]Holder{holder("a", gcu, "loud", "1")}, `from "1" to "0.1"`, ""},
		"a named one that begins to have resources": {
			named(file("enflame.com/gcu-memory=1"), map[string]string{"fine": "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\n"}),
			named(file("enflame.com/gcu-memory=1"), map[string]string{"fine": file("enflame.com/gcu-memory=0.1")}),
			[]Holder{holder("a", gcu, "fine", "1")}, `from "1" to "0.1"`, ""},
		"the one of all nodes without a label": {
			named(file("enflame.com/gcu-memory=1"), nil), named(file("enflame.com/gcu-memory=1"),
				map[string]string{"default": file("enflame.com/gcu-memory=0.1")}),
			one, `from "1" to "0.1"`, ""},
		"a name that is not there": {
			named(file("enflame.com/gcu-memory=1"), nil), named(file("enflame.com/gcu-memory=0.1"), nil),
			[]Holder{holder("a", gcu, "lost", "1")}, "", ""},
		"the base under a file of NVIDIA's": {
			named(file("enflame.com/gcu-memory=1"), map[string]string{"old": nvidiaFile}), named(file("enflame.com/gcu-memory=0.1"),
				map[string]string{"old": nvidiaFile}),
			[]Holder{holder("a", gcu, "old", "1")}, `from "1" to "0.1"`, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			warnings, err := CheckUnits(tt.before, tt.after, tt.holders)
			var refused *UnitError
			switch {
			case tt.refused == "" && err != nil:
				t.Errorf("refused: %v", err)
			case tt.refused != "" && (!errors.As(err, &refused) || !strings.Contains(err.Error(), tt.refused)):
				t.Errorf("want a refusal with\n%s\ngot\n%v", tt.refused, err)
			}
			if all := strings.Join(warnings, "\n"); tt.warned == "" && all != "" || !strings.Contains(all, tt.warned) {
				t.Errorf("warnings %q, want %q", warnings, tt.warned)
			}
		})
	}
}

// A refusal names some pods, in the order of their names, and counts the rest.
func TestManyPodsAreCounted(t *testing.T) {
	var holders []Holder
	for i := range 13 {
		holders = append(holders, holder(fmt.Sprintf("pod-%02d", 12-i), gcu, "", "1"))
	}
	_, err := CheckUnits(only("enflame.com/gcu-memory=1"), only("enflame.com/gcu-memory=0.1"), holders)
	var refused *UnitError
	if !errors.As(err, &refused) || len(refused.Pods) != 13 {
		t.Fatal(err)
	}
	want := ": team/pod-00, team/pod-01, team/pod-02, team/pod-03, team/pod-04, team/pod-05, team/pod-06, team/pod-07, team/pod-08, " +
		"team/pod-09 and 3 more."
	if !strings.Contains(err.Error(), want) {
		t.Errorf("%v\nlacks%s", err, want)
	}
	if diff := cmp.Diff(accel.PodRef{Namespace: "team", Name: "pod-12"}, refused.Pods[12]); diff != "" {
		t.Error(diff)
	}
}

// FuzzCheckUnits: whatever stands in a ConfigMap, there is an answer, and nothing
// that is left as it is is refused.
func FuzzCheckUnits(f *testing.F) {
	f.Add(file("enflame.com/gcu-memory=1"), file("enflame.com/gcu-memory=0.1"))
	f.Add("version: v1\nflags: {migStrategy: none}\n", "resources: [")
	f.Add("", "\x00")
	f.Fuzz(func(t *testing.T, base, named string) {
		c := Configs{Base: base, Named: map[string]string{"n": named}}
		holders := []Holder{holder("a", gcu, "", "1"), holder("b", gcu, "n", "0.1"), holder("c", gpu, "n", "")}
		if _, err := CheckUnits(c, c, holders); err != nil {
			t.Errorf("no change, and yet %v", err)
		}
		_, _ = CheckUnits(c, Configs{Base: named}, holders)
		_, _ = CheckUnits(Configs{Base: named}, c, holders)
	})
}
