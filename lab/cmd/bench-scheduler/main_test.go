package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	o, err := parse([]string{"-nodes", "10, 20", "-pods", "100", "-extender", "--choose-node=false  --log-level=debug"},
		io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(o.sizes, []int{10, 20}) || o.pods != 100 ||
		!slices.Equal(o.extender, []string{"--choose-node=false", "--log-level=debug"}) {
		t.Errorf("options %+v", o)
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
	if o, err = parse(nil, io.Discard); err != nil || !slices.Equal(o.sizes, []int{1000, 5000}) || o.rounds < 3 {
		t.Errorf("by default: %+v, %v", o, err)
	}
	for args, want := range map[string]string{
		"-nodes 0":               "-nodes is \"0\": must be numbers from 1 to 20000",
		"-nodes 1000,x":          "-nodes is \"1000,x\"",
		"-nodes 30000":           "from 1 to 20000",
		"-pods 0":                "-pods is 0: must be from 1 to 100000",
		"-rounds 0":              "-rounds is 0: must be at least 1",
		"-nodes 10 -pods 161":    "-pods 161 ask for 644 units; half of what 10 nodes have are 640",
		"-nodes 10 -pods 5 more": "unknown argument \"more\"",
	} {
		if _, err := parse(strings.Fields(args), io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
	if _, err := parse([]string{"-h"}, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("-h: %v", err)
	}
}
