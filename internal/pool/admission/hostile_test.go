package admission

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// Pods are looked at before the API server has checked the length of anything in
// them; messages go to people, events and logs.
func TestMessagesAreBounded(t *testing.T) {
	huge := strings.Repeat("\x01x", 128<<10)
	mounted := container("a", half(), pythonX)
	mounted.VolumeMounts = []corev1.VolumeMount{{Name: huge, MountPath: "/bitfusion" + strings.Repeat("/", 1<<20)}}
	device := container("a", half(), pythonX)
	device.VolumeDevices = []corev1.VolumeDevice{{Name: huge, DevicePath: "/bitfusion" + strings.Repeat("/", 1<<20)}}
	for name, pod := range map[string]*corev1.Pod{
		"mode":          annotated(poolPod(container("a", half(), pythonX)), pool.ModeAnnotation, huge),
		"os":            annotated(poolPod(container("a", half(), pythonX)), pool.OSAnnotation, huge),
		"version":       annotated(poolPod(container("a", half(), pythonX)), pool.VersionAnnotation, huge),
		"filter":        annotated(poolPod(container("a", half(), pythonX)), pool.FilterAnnotation, huge),
		"many filters":  annotated(poolPod(container("a", half(), pythonX)), pool.FilterAnnotation, strings.Repeat("x ", 1<<17)),
		"entrypoint":    annotated(poolPod(container("a", half())), pool.EntrypointAnnotation, huge),
		"entrypoint of": annotated(poolPod(container("a", half())), pool.EntrypointAnnotation, `{"`+strings.Repeat("x", 1<<18)+`":[]}`),
		"home":          annotated(poolPod(container("a", half(), pythonX)), pool.HomeAnnotation, huge),
		"long home":     annotated(poolPod(container("a", half(), pythonX)), pool.HomeAnnotation, "/"+strings.Repeat("x", 1<<18)),
		"container":     poolPod(container(huge, asking(pool.AmountResource, "0", pool.PercentResource, "0"), pythonX)),
		"key":           poolPod(container("a", asking(pool.AmountResource, "1", pool.Prefix+huge, "1"), pythonX)),
		"command":       poolPod(container("a", half(), huge+"\x00")),
		"mount":         poolPod(mounted),
		"device":        poolPod(device),
	} {
		_, _, err := Mutate(pod, testNamespace, pool.DefaultCatalog(), testSettings())
		if err == nil || len(err.Error()) > 4<<10 {
			t.Errorf("%s: %.200v", name, err)
		}
		_, err = Validate(pod, testNamespace, pool.DefaultCatalog(), testSettings(), readyCluster())
		if err == nil || len(err.Error()) > 4<<10 {
			t.Errorf("%s: Validate: %.200v", name, err)
		}
	}
	_, warnings, err := Mutate(annotated(poolPod(container("a", corev1.ResourceRequirements{})), pool.ModeAnnotation,
		"all"+strings.Repeat(" ", 1<<18)),
		testNamespace, pool.DefaultCatalog(), testSettings())
	if err != nil || len(warnings) != 1 || len(warnings[0]) > 4<<10 {
		t.Errorf("%v, %.200q", err, warnings)
	}
	raw, err := json.Marshal(map[string]any{"metadata": map[string]any{"generateName": huge}})
	if err != nil {
		t.Fatal(err)
	}
	if name := admissionreview.Name(&admissionv1.AdmissionRequest{Object: runtime.RawExtension{Raw: raw}}); len(name) > 1<<10 ||
		name == "" {
		t.Errorf("a log has a name of %d bytes", len(name))
	}
}

// Guards V3: every denial about a resource names container, key and value.
func TestDenialsNameContainerKeyAndValue(t *testing.T) {
	for name, test := range map[string]struct {
		pod   *corev1.Pod
		words []string
	}{
		"no mode": {annotated(poolPod(container("main", half(), pythonX)), pool.ModeAnnotation, "-"),
			[]string{`"main"`, pool.PercentResource + ": 50", pool.ModeAnnotation + ": all"}},
		"not converted": {poolPod(container("main", half(), pythonX)), []string{`"main"`, pool.PercentResource + ": 50", "not converted"}},
		"unknown key": {poolPod(container("main", asking(pool.Prefix+"gpus", "7"), pythonX)), []string{`"main"`, pool.Prefix + "gpus: 7",
			pool.AmountResource}},
		"by hand": {poolPod(container("main", asking(pool.Resource, "7"), pythonX)), []string{`"main"`, pool.Resource + ": 7",
			pool.AmountResource}},
		"of no node": {poolPod(container("main", asking(pool.Resource, "7", "example.com/fpga", "3"), pythonX)),
			[]string{`"main"`, "example.com/fpga (3 are requested)"}},
		"in an init too": {initsOf(poolPod(container("main", half(), pythonX)), container("first", half(), pythonX)),
			[]string{`init container "first": ` + pool.AmountResource + ": 1"}},
	} {
		_, err := Validate(test.pod, testNamespace, pool.DefaultCatalog(), testSettings(), readyCluster())
		if err == nil {
			t.Errorf("%s: admitted", name)
			continue
		}
		mentions(t, err.Error(), test.words...)
	}
}

// Without its label a pod would wait for its credentials for ever: they are
// brought to pods that have it. Copies of pods lose labels and annotations.
func TestAConvertedPodThatLostItsLabelGetsItBack(t *testing.T) {
	converted, _ := convert(t, guidePod())
	for name, change := range map[string]func(*corev1.Pod){
		"labels":      func(p *corev1.Pod) { p.Labels = nil },
		"its value":   func(p *corev1.Pod) { p.Labels[pool.ConvertedLabel] = "false" },
		"annotations": func(p *corev1.Pod) { p.Labels, p.Annotations = nil, nil },
	} {
		pod := converted.DeepCopy()
		change(pod)
		again, _ := convert(t, pod)
		if again.Labels[pool.ConvertedLabel] != "true" {
			t.Errorf("without %s: labels %v", name, again.Labels)
		}
		again.Labels, pod.Labels = nil, nil
		if len(again.Spec.InitContainers) != 1 || len(again.Annotations) != len(pod.Annotations) {
			t.Errorf("without %s: more than the label was changed", name)
		}
	}
	other := poolPod(container("a", asking(pool.Resource, "7"), pythonX))
	if same, _ := convert(t, other); same != other {
		t.Error("a pod that mounts no credentials was changed")
	}
}

// Guards W29: a mount of the user's neither hides the client nor lies in one of
// its files, and a path that is not absolute is below / as kubelet has it.
func TestMountsOverTheClientAreRefused(t *testing.T) {
	for at, refused := range map[string]bool{
		root450: true, root450 + "/usr": true, root450 + "//usr/bin/": true, "bitfusion": true, "bitfusion/../bitfusion/": true,
		"/bitfusion/" + "..//bitfusion": true,
		serversPath + "/x":              true, pool.CAPath + "/x": true, "/root/.bitfusion/client.yaml/x": true, "opt/bitfusion": true,
		"/bitfusion/data": false, "/bitfusion2": false, root450 + "2": false, "/etc/bitfusion": false, "/root": false,
		"/root/.bitfusion": false, "/opt/bitfusion/data": false, "/": false,
	} {
		c := container("main", half(), pythonX)
		c.VolumeMounts = []corev1.VolumeMount{{Name: "mine", MountPath: at}}
		if refused {
			denied(t, poolPod(c), `container "main"`, `"mine"`, at, "mount it elsewhere")
		} else {
			convert(t, poolPod(c))
		}
	}
}

func TestUnitsBeyond64BitsAreNotFew(t *testing.T) {
	for _, value := range []string{"9223372036854775807", "9e18", "1e30"} {
		r := corev1.ResourceRequirements{Limits: quantities(pool.Resource, value), Requests: quantities(pool.Resource, value)}
		pod := poolPod(container("a", r, pythonX), container("b", r, pythonX))
		if got := podUnits(pod); got != math.MaxInt64 {
			t.Errorf("twice %s are %d units", value, got)
		}
		_, err := Validate(pod, testNamespace, pool.DefaultCatalog(), testSettings(), readyCluster())
		if err == nil {
			t.Fatal("admitted")
		}
		mentions(t, err.Error(), "the largest node has 1000")
	}
}
