package kube

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// asking is a pod of two containers with these annotations, key and value in
// turn.
func asking(annotations ...string) *v1.Pod {
	pod := podSpec([]v1.Container{container("prepare", "6")}, []v1.Container{container("train", "12"), container("idle", "")})
	pod.Annotations = map[string]string{}
	for i := 0; i+1 < len(annotations); i += 2 {
		pod.Annotations[annotations[i]] = annotations[i+1]
	}
	return pod
}

func TestAskedDevices(t *testing.T) {
	for name, tt := range map[string]struct {
		pod  *v1.Pod
		want accel.Request
	}{
		"nothing said":            {asking("divvy.dev/grant", "x"), accel.Request{}},
		"several devices":         {asking(wire.CountAnnotation, "3"), accel.Request{Devices: 3}},
		"one device":              {asking(wire.CountAnnotation, "1"), accel.Request{Devices: 1}},
		"what a node wrote there": {asking(wire.CountAnnotation, `{"enflame.com/gcu":["a"]}`), accel.Request{}},
		"a policy":                {asking(wire.PolicyAnnotation, "spread"), accel.Request{Policy: "spread"}},
		"an isolation": {
			asking(wire.IsolationAnnotation, "driver"), accel.Request{Selection: &accel.Selection{Isolation: accel.TierDriver}},
		},
		"no isolation required": {asking(wire.IsolationAnnotation, "none"), accel.Request{}},
		"an isolation and a model": {
			asking(wire.IsolationAnnotation, "hardware", wire.UseModelsAnnotation, "S60"),
			accel.Request{Selection: &accel.Selection{UseModels: []string{"S60"}, Isolation: accel.TierHardware}},
		},
		"a part of what is used is avoided": {
			asking(wire.UseModelsAnnotation, "S*", wire.AvoidModelsAnnotation, "S60*,T20"),
			accel.Request{Selection: &accel.Selection{UseModels: []string{"S*"}, AvoidModels: []string{"S60*", "T20"}}},
		},
		"one of several is avoided": {
			asking(wire.UseModelsAnnotation, "S60,T20", wire.AvoidModelsAnnotation, "S*"),
			accel.Request{Selection: &accel.Selection{UseModels: []string{"S60", "T20"}, AvoidModels: []string{"S*"}}},
		},
		"models and devices": {
			asking(wire.UseModelsAnnotation, "S60, T20*,S60", wire.AvoidModelsAnnotation, "t20-x", wire.UseDevicesAnnotation,
				"b,a", wire.AvoidDevicesAnnotation, "c"),
			accel.Request{Selection: &accel.Selection{
				UseModels: []string{"S60", "T20*"}, AvoidModels: []string{"t20-x"}, UseIDs: []string{"a", "b"}, AvoidIDs: []string{"c"},
			}},
		},
	} {
		got, err := RequestsOf(tt.pod, []accel.Resource{gcuMemory})
		if err != nil || len(got) != 1 {
			t.Errorf("%s: %v, %v", name, got, err)
			continue
		}
		tt.want.Resource, tt.want.Containers = gcuMemory, got[0].Containers
		if diff := cmp.Diff(tt.want, got[0]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(tt.want, RequestOf(tt.pod, gcuMemory)); diff != "" {
			t.Errorf("%s: RequestOf (-want +got):\n%s", name, diff)
		}
	}
}

// A mistake is told with its key and what would be right, and does not keep the
// rest from being read by a node that has the pod already.
func TestMistakesInAnnotations(t *testing.T) {
	tooMany := strings.TrimSuffix(strings.Repeat("x*,", 65), ",")
	for i := range 65 {
		tooMany = strings.Replace(tooMany, "x*", "m"+strings.Repeat("y", i), 1)
	}
	const count, use, avoid, useIDs, avoidIDs, policy = wire.CountAnnotation, wire.UseModelsAnnotation, wire.AvoidModelsAnnotation,
		wire.UseDevicesAnnotation, wire.AvoidDevicesAnnotation, wire.PolicyAnnotation
	for name, tt := range map[string]struct {
		annotations []string
		want        []string
	}{
		"none":         {[]string{count, "0"}, []string{`annotation divvy.dev/devices: "0" is not a number of devices from 1 to 64`}},
		"below 0":      {[]string{count, "-2"}, []string{`annotation divvy.dev/devices: "-2" is not a number of devices from 1 to 64`}},
		"no number":    {[]string{count, "two"}, []string{`annotation divvy.dev/devices: "two" is not a number of devices from 1 to 64`}},
		"a fraction":   {[]string{count, "1.5"}, []string{`annotation divvy.dev/devices: "1.5" is not a number of devices from 1 to 64`}},
		"empty":        {[]string{count, ""}, []string{`annotation divvy.dev/devices: "" is not a number of devices from 1 to 64`}},
		"one too many": {[]string{count, "65"}, []string{`annotation divvy.dev/devices: "65" is not a number of devices from 1 to 64`}},
		"a thousand": {[]string{count, "1000"},
			[]string{`annotation divvy.dev/devices: "1000" is not a number of devices from 1 to 64`}},
		"beyond numbers": {[]string{count, "99999999999999999999"},
			[]string{`annotation divvy.dev/devices: "99999999999999999999" is not a number of devices from 1 to 64`}},
		"not equal": {[]string{count, "4"},
			[]string{`annotation divvy.dev/devices: container prepare requests 6 of enflame.com/gcu-memory, which cannot be divided ` +
				`equally among 4 devices; use 4 or 8`}},
		"fewer": {[]string{count, "7"},
			[]string{`annotation divvy.dev/devices: container prepare requests 6 of enflame.com/gcu-memory, which cannot be divided ` +
				`equally among 7 devices; use 7`}},
		"empty list": {[]string{useIDs, ""},
			[]string{`annotation divvy.dev/use-devices: "" contains an empty name; separate names with single commas`}},
		"empty name": {[]string{use, "S60,,T20"},
			[]string{`annotation divvy.dev/use-models: "S60,,T20" contains an empty name; separate names with single commas`}},
		"only a comma": {[]string{avoidIDs, ","},
			[]string{`annotation divvy.dev/avoid-devices: "," contains an empty name; separate names with single commas`}},
		"a star": {[]string{avoid, "S*0"},
			[]string{`annotation divvy.dev/avoid-models: "S*0" contains a * that is not at its end`}},
		"long": {[]string{useIDs, strings.Repeat("x", 300)},
			[]string{`annotation divvy.dev/use-devices: the name "` + strings.Repeat("x", 60) +
				`..." is longer than 256 bytes or not valid UTF-8`}},
		"many": {[]string{use, tooMany}, []string{"annotation divvy.dev/use-models: 65 names, at most 64"}},
		"both": {[]string{use, "S60,T20", avoid, "t20"},
			[]string{`annotation divvy.dev/avoid-models: model "T20" is in divvy.dev/use-models too`}},
		"all avoided": {[]string{use, "S60,s90-x*", avoid, "T20,s*"},
			[]string{`annotation divvy.dev/avoid-models: it excludes all models in divvy.dev/use-models`}},
		"both devices": {[]string{useIDs, "a", avoidIDs, "b,a"},
			[]string{`annotation divvy.dev/avoid-devices: device "a" is in divvy.dev/use-devices too`}},
		"too few": {[]string{count, "2", useIDs, "a"},
			[]string{`annotation divvy.dev/use-devices: divvy.dev/devices requests 2 devices, but the names in it allow only 1`}},
		"one twice": {[]string{count, "2", useIDs, "a, a"},
			[]string{`annotation divvy.dev/use-devices: divvy.dev/devices requests 2 devices, but the names in it allow only 1`}},
		"no policy": {[]string{policy, "best"},
			[]string{`annotation divvy.dev/placement-policy: "best" is not a placement policy; use one of binpack, spread, fragmentation`}},
		"another case": {[]string{policy, "Spread"},
			[]string{`annotation divvy.dev/placement-policy: "Spread" is not a placement policy; ` +
				`use one of binpack, spread, fragmentation`}},
		"no tier": {[]string{wire.IsolationAnnotation, "strong"},
			[]string{`annotation divvy.dev/isolation: "strong" is not a tier of isolation; ` +
				`use one of none, cooperative, driver, hardware`}},
		"an empty tier": {[]string{wire.IsolationAnnotation, ""},
			[]string{`annotation divvy.dev/isolation: "" is not a tier of isolation; use one of none, cooperative, driver, hardware`}},
		"no percentage": {[]string{wire.ComputeAnnotation, "50%"},
			[]string{`annotation divvy.dev/compute-percent: "50%" is not a percentage from 1 to 100`}},
		"a share where there is none": {[]string{wire.ComputeAnnotation, "50", wire.IsolationAnnotation, "driver"},
			[]string{"annotation divvy.dev/compute-percent: only devices at tier cooperative have such shares, and divvy.dev/isolation " +
				"requires driver"}},
		"too much": {[]string{wire.ComputeAnnotation, "101"},
			[]string{`annotation divvy.dev/compute-percent: "101" is not a percentage from 1 to 100`}},
		"several": {[]string{policy, "best", count, "x", use, " "}, []string{
			`annotation divvy.dev/devices: "x" is not a number of devices from 1 to 64`,
			`annotation divvy.dev/use-models: " " contains an empty name; separate names with single commas`,
			`annotation divvy.dev/placement-policy: "best" is not a placement policy; use one of binpack, spread, fragmentation`,
		}},
	} {
		got, err := RequestsOf(asking(tt.annotations...), []accel.Resource{gcuMemory})
		if e := (*AskError)(nil); !errors.As(err, &e) || e.Key == "" {
			t.Errorf("%s: %v is no *AskError", name, err)
			continue
		}
		if diff := cmp.Diff(strings.Join(tt.want, "\n"), err.Error()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if len(got) != 1 || got[0].Peak() != 12 {
			t.Errorf("%s: the request was not read: %+v", name, got)
		}
	}
	if got, err := RequestsOf(podSpec(nil, []v1.Container{container("a", "")}), []accel.Resource{gcuMemory}); got != nil || err != nil {
		t.Errorf("a pod that asks for nothing: %v, %v", got, err)
	}
	other := podSpec(nil, []v1.Container{container("a", "")})
	other.Annotations = map[string]string{wire.CountAnnotation: "x"}
	if _, err := RequestsOf(other, []accel.Resource{gcuMemory}); err != nil {
		t.Errorf("annotations of a pod that asks for nothing of ours matter: %v", err)
	}
}

// Whoever may create pods may write anything there.
func FuzzReadAsk(f *testing.F) {
	f.Add("2", "S60,T20*", "x", "a,b", "c", "spread")
	f.Add("", ",", "*", "\xff", strings.Repeat("x,", 1000), "{}")
	f.Fuzz(func(t *testing.T, count, useModels, avoidModels, useIDs, avoidIDs, policy string) {
		pod := asking(wire.CountAnnotation, count, wire.UseModelsAnnotation, useModels, wire.AvoidModelsAnnotation, avoidModels,
			wire.UseDevicesAnnotation, useIDs, wire.AvoidDevicesAnnotation, avoidIDs, wire.PolicyAnnotation, policy)
		got, err := RequestsOf(pod, []accel.Resource{gcuMemory})
		if len(got) != 1 || got[0].Devices < 0 || got[0].Devices > wire.MaxDevices {
			t.Fatalf("read %+v, %v", got, err)
		}
		if err != nil {
			if e := (*AskError)(nil); !errors.As(err, &e) || len(err.Error()) > 16<<10 {
				t.Fatalf("%d bytes of %T", len(err.Error()), err)
			}
			return
		}
		for _, c := range got[0].Containers {
			if c.Units%accel.Units(max(got[0].Devices, 1)) != 0 {
				t.Fatalf("%d units by %d devices were taken", c.Units, got[0].Devices)
			}
		}
	})
}

func TestPeakOfCPUAndMemory(t *testing.T) {
	amounts := func(name, cpu, memory string) v1.Container {
		return v1.Container{Name: name, Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
			v1.ResourceCPU: resource.MustParse(cpu), v1.ResourceMemory: resource.MustParse(memory),
		}}}
	}
	pod := podSpec([]v1.Container{amounts("init", "3", "100Mi")}, []v1.Container{amounts("a", "1500m", "1Gi"), amounts("b", "100u", "1")})
	pod.Spec.Overhead = v1.ResourceList{v1.ResourceCPU: resource.MustParse("250m")}
	if cpu, memory := PeakOf(pod); cpu != 3250 || memory != 1025 {
		t.Errorf("%d millicores and %d MiB, want 3250 and 1025", cpu, memory)
	}
	want := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})
	if cpu, _ := PeakOf(pod); cpu != want.Cpu().MilliValue() {
		t.Errorf("%d millicores, kube-scheduler counts %v", cpu, want.Cpu())
	}
	huge := podSpec(nil, []v1.Container{amounts("a", "9E", "9E")})
	if cpu, memory := PeakOf(huge); cpu <= 0 || memory <= 0 {
		t.Errorf("%d millicores and %d MiB of a pod beyond any node", cpu, memory)
	}
	requests, _ := RequestsOf(asking(), []accel.Resource{gcuMemory})
	AddPeak(pod, requests)
	if requests[0].CPU != 3250 || requests[0].Memory != 1025 {
		t.Errorf("the request has %d millicores and %d MiB", requests[0].CPU, requests[0].Memory)
	}
}
