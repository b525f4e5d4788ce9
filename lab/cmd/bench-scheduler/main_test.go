package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

func TestParse(t *testing.T) {
	o, err := parse([]string{"-nodes", "10, 20", "-pods", "50", "-flags", "--choose-node=false  --log-level=debug",
		"-policy", "spread", "-scenario", "mixed,throughput"},
		io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(o.sizes, []int{10, 20}) || o.pods != 50 ||
		!slices.Equal(o.flags, []string{"--choose-node=false", "--log-level=debug"}) ||
		len(o.scenarios) != 2 || o.scenarios[0].name != "throughput" || o.scenarios[1].name != "mixed" {
		t.Errorf("options %+v", o)
	}
	if got := fmt.Sprint(o.sides()); got != "[plain extender spread plugin spread]" {
		t.Errorf("sides %s", got)
	}
	if settings := o.schedulerSettings("a"); len(settings) != 0 {
		t.Errorf("further settings of kube-scheduler by default: %v", settings)
	}
	if o, err = parse([]string{"-batching"}, io.Discard); err != nil {
		t.Fatal(err)
	}
	const settings = "map[profiles:[map[pluginConfig:[map[args:map[apiVersion:kubescheduler.config.k8s.io/v1 " +
		"defaultingType:List kind:PodTopologySpreadArgs] name:PodTopologySpread]] schedulerName:a]]]"
	if got := fmt.Sprint(o.schedulerSettings("a")); got != settings {
		t.Errorf("settings of kube-scheduler are %s, want %s", got, settings)
	}
	if o, err = parse(nil, io.Discard); err != nil || !slices.Equal(o.sizes, []int{1000, 5000}) || o.rounds != 9 ||
		len(o.scenarios) != len(scenarios)-1 || o.claims() || len(o.sides()) != 5 {
		t.Errorf("by default: %+v, %v", o, err)
	}
	if o, err = parse(strings.Fields("-scenario claims -nodes 10 -pods 100 -policy binpack"), io.Discard); err != nil ||
		fmt.Sprint(o.sides()) != "[plain plugin binpack]" {
		t.Errorf("with claims: %+v, %v", o, err)
	}
	for args, want := range map[string]string{
		"-nodes 0":               "-nodes is \"0\": must be numbers from 1 to 20000",
		"-nodes 1000,x":          "-nodes is \"1000,x\"",
		"-nodes 30000":           "from 1 to 20000",
		"-pods 0":                "-pods is 0: must be from 1 to 100000",
		"-rounds 0":              "-rounds is 0: must be at least 1",
		"-nodes 10 -pods 5 more": "unknown argument \"more\"",
		"-policy x":              "-policy is \"x\": must be some of binpack, spread, fragmentation",
		"-policy spread,spread":  "each once",
		"-scenario full,empty": "-scenario is \"full,empty\": \"empty\" is none of throughput,latency,full,mixed," +
			"preemption,claims",
		"-scenario claims,full":               "claims is measured alone",
		"-scenario claims -before x":          "-before compares extenders",
		"-nodes 1 -pods 161 -scenario claims": "-pods 161 request 322 units in scenario claims; half of what 1 nodes have free are 320",
		"-scenario full,full":                 "\"full\" is none of",
		"-nodes 10 -pods 161 -scenario throughput": "-pods 161 request 644 units in scenario throughput; half of what 10 nodes have " +
			"free are 640",
		"-nodes 10 -pods 41 -scenario full":       "-pods 41 request 164 units in scenario full; half of what 10 nodes have free are 160",
		"-nodes 10 -pods 30 -scenario preemption": "-pods 30 evict 6 pods in scenario preemption; half of the 10 nodes have 5",
	} {
		if _, err := parse(strings.Fields(args), io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
	if _, err := parse([]string{"-h"}, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("-h: %v", err)
	}
}

func TestOrder(t *testing.T) {
	sides := (&options{policies: []string{"binpack"}}).sides()
	for round, want := range []string{
		"[plain extender binpack plugin binpack]", "[extender binpack plugin binpack plain]", "[plugin binpack plain extender binpack]",
		"[plain extender binpack plugin binpack]",
	} {
		if got := fmt.Sprint(order(sides, round)); got != want {
			t.Errorf("round %d: %s, want %s", round, got, want)
		}
	}
	o := &options{policies: []string{"binpack"}, before: "divvy-control"}
	if got := fmt.Sprint(o.sides()); got != "[before binpack extender binpack]" || o.reference(o.sides()[1]) != o.sides()[0] {
		t.Errorf("with an earlier commit: %s", got)
	}
}

// A filler and an evictor do not fit on a node together, by the sum and on no device, so each
// evictor evicts one.
func TestShapes(t *testing.T) {
	nodes := simnodes.Group{Cards: cardsPerNode, Units: cardUnits}
	for _, s := range []shape{filler, evictor} {
		pod := s.pod(&nodes, namespace, "a")
		if s.units != 96 || pod.Annotations[wire.CountAnnotation] != "8" || pod.Spec.PriorityClassName != s.class {
			t.Errorf("%+v: pod %+v", s, pod)
		}
	}
	if one := small.pod(&nodes, namespace, "a"); len(one.Annotations) != 0 {
		t.Errorf("a pod on one device: %+v", one.Annotations)
	}
	for i := range scenarios {
		if s := &scenarios[i]; s.rounds(9) != map[bool]int{true: 9, false: 3}[s.judged] || s.rounds(1) != 1 {
			t.Errorf("%s: %d of 9 rounds", s.name, s.rounds(9))
		}
	}
}
