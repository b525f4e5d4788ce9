package claimreview

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

const (
	gcu corev1.ResourceName = "enflame.com/gcu-memory"
	gpu corev1.ResourceName = "nvidia.com/gpu-memory"
)

// testUnits are GCUs in GB, and GPUs in tenths.
func testUnits(t testing.TB) []Unit {
	t.Helper()
	return []Unit{unit(t, string(gcu)+"=enflame:1"), unit(t, string(gpu)+"=nvidia:0.1")}
}

// container has amounts, as limits and requests, of resources written as name=amount.
func container(name string, amounts ...string) corev1.Container {
	list := corev1.ResourceList{"cpu": resource.MustParse("1")}
	for _, a := range amounts {
		name, amount, _ := strings.Cut(a, "=")
		list[corev1.ResourceName(name)] = resource.MustParse(amount)
	}
	return corev1.Container{Name: name, Image: "i", Resources: corev1.ResourceRequirements{Limits: list, Requests: list.DeepCopy()}}
}

func sidecar(c corev1.Container) corev1.Container {
	c.RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
	return c
}

func podOf(annotations map[string]string, inits []corev1.Container, apps ...corev1.Container) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p", Annotations: annotations},
		Spec: corev1.PodSpec{InitContainers: inits, Containers: apps}}
}

// short writes claims as a person would: "memory 10Gi", with constraints and who uses what.
func short(all []Translation) (out []string) {
	for _, t := range all {
		text := string(t.Resource) + ":"
		for _, r := range t.Devices.Requests {
			memory := r.Exactly.Capacity.Requests[wire.MemoryCapacity]
			text += fmt.Sprintf(" %s=%dx%s", r.Name, r.Exactly.Count, memory.String())
			for _, s := range r.Exactly.Selectors {
				text += " if " + s.CEL.Expression
			}
		}
		for _, c := range t.Devices.Constraints {
			text += " same " + string(*c.MatchAttribute)
		}
		for _, c := range t.Containers {
			text += fmt.Sprintf(" %s(%d):%s", c.Name, c.Units, c.Request)
		}
		out = append(out, text)
	}
	return out
}

func TestTranslate(t *testing.T) {
	a, b := container("a", string(gcu)+"=10"), container("b", string(gcu)+"=4")
	tests := map[string]struct {
		pod  *corev1.Pod
		want []string
	}{
		"one container": {podOf(nil, nil, a, container("log")), []string{"enflame.com/gcu-memory: memory=1x10Gi a(10):memory"}},
		"tenths of a GB, which are no whole MiB": {podOf(nil, nil, container("a", string(gpu)+"=3")),
			[]string{"nvidia.com/gpu-memory: memory=1x308Mi a(3):memory"}},
		"ten tenths": {podOf(nil, nil, container("a", string(gpu)+"=10")), []string{"nvidia.com/gpu-memory: memory=1x1Gi a(10):memory"}},
		"two containers, on one device": {podOf(nil, nil, a, b), []string{"enflame.com/gcu-memory: memory-0=1x10Gi memory-1=1x4Gi " +
			"same enflame.divvy.dev/uuid a(10):memory-0 b(4):memory-1"}},
		"an init container uses what the others have after it": {podOf(nil, []corev1.Container{b}, a),
			[]string{"enflame.com/gcu-memory: memory=1x10Gi b(4):memory a(10):memory"}},
		"an init container that needs more": {podOf(nil, []corev1.Container{a}, b),
			[]string{"enflame.com/gcu-memory: memory=1x10Gi a(10):memory b(4):memory"}},
		"init containers alone": {podOf(nil, []corev1.Container{b, a}, container("main")),
			[]string{"enflame.com/gcu-memory: memory=1x10Gi b(4):memory a(10):memory"}},
		"a sidecar beside a container": {podOf(nil, []corev1.Container{sidecar(b)}, a), []string{"enflame.com/gcu-memory: memory-0=1x4Gi " +
			"memory-1=1x10Gi same enflame.divvy.dev/uuid b(4):memory-0 a(10):memory-1"}},
		"two vendors": {podOf(nil, nil, a, container("b", string(gpu)+"=20")), []string{
			"enflame.com/gcu-memory: memory=1x10Gi a(10):memory", "nvidia.com/gpu-memory: memory=1x2Gi b(20):memory"}},
		"several devices": {podOf(map[string]string{wire.CountAnnotation: "2"}, []corev1.Container{b}, a),
			[]string{"enflame.com/gcu-memory: memory=2x5Gi b(4):memory a(10):memory"}},
		"models and devices": {podOf(map[string]string{wire.UseModelsAnnotation: "S60, T2*", wire.AvoidModelsAnnotation: "S60G",
			wire.UseDevicesAnnotation: "U1,U2", wire.AvoidDevicesAnnotation: `U"3`}, nil, a),
			[]string{`enflame.com/gcu-memory: memory=1x10Gi if (device.attributes["enflame.divvy.dev"].model.lowerAscii() == "s60" || ` +
				`device.attributes["enflame.divvy.dev"].model.lowerAscii().startsWith("t2")) && ` +
				`!(device.attributes["enflame.divvy.dev"].model.lowerAscii() == "s60g") && ` +
				`(device.attributes["enflame.divvy.dev"].uuid in ["U1", "U2"]) && ` +
				`!(device.attributes["enflame.divvy.dev"].uuid in ["U\"3"]) a(10):memory`}},
		"a tier of isolation, or a higher one": {podOf(map[string]string{wire.IsolationAnnotation: "driver"}, nil, a),
			[]string{`enflame.com/gcu-memory: memory=1x10Gi if (device.attributes["enflame.divvy.dev"].isolation in ["driver", ` +
				`"hardware"]) ` +
				"a(10):memory"}},
		"no units":   {podOf(nil, nil, container("a", "nvidia.com/gpu=1")), nil},
		"zero units": {podOf(nil, nil, container("a", string(gcu)+"=0")), nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			all, warnings, err := Translate(tt.pod, testUnits(t))
			if diff := cmp.Diff(tt.want, short(all)); diff != "" || err != nil || warnings != nil {
				t.Fatalf("%v, %q, %s", err, warnings, diff)
			}
			after := patched(t, tt.pod, all)
			// Nothing of it is left to translate, and the annotation says what became of it.
			read, err := Translations(after.Annotations)
			if err != nil || !slices.Equal(sorted(short(read)), sorted(tt.want)) {
				t.Errorf("the annotation has %q, %v", short(read), err)
			}
			for at, c := range containers(&after.Spec) {
				for _, list := range []corev1.ResourceList{c.Resources.Limits, c.Resources.Requests} {
					for _, name := range []corev1.ResourceName{gcu, gpu} {
						if q := list[name]; !q.IsZero() {
							t.Errorf("%s still has %s of %s", at, q.String(), name)
						}
					}
					if _, ok := list["cpu"]; !ok {
						t.Errorf("%s lost its CPU", at)
					}
				}
			}
			for _, one := range all {
				if !slices.ContainsFunc(after.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool {
					return c.Name == one.Claim && *c.ResourceClaimTemplateName == one.Template
				}) {
					t.Errorf("the pod does not name claim %s: %+v", one.Claim, after.Spec.ResourceClaims)
				}
				for _, used := range one.Containers {
					for _, c := range containers(&after.Spec) {
						if c.Name == used.Name && !slices.Contains(c.Resources.Claims, corev1.ResourceClaim{Name: one.Claim,
							Request: used.Request}) {
							t.Errorf("container %s has %v", c.Name, c.Resources.Claims)
						}
					}
				}
			}
		})
	}
}

func sorted(list []string) []string { return slices.Sorted(slices.Values(list)) }

// patched applies the patch of a translation to a pod, and to a field that this program does not know.
func patched(t *testing.T, pod *corev1.Pod, all []Translation) *corev1.Pod {
	t.Helper()
	if all == nil {
		return pod
	}
	change, err := patch(pod, all)
	if err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	data = []byte(strings.Replace(string(data), `"resources":{`, `"resources":{"new":"field",`, 1))
	steps, err := jsonpatch.DecodePatch(change)
	if err != nil {
		t.Fatal(err)
	}
	if data, err = steps.Apply(data); err != nil {
		t.Fatalf("%v in %s", err, change)
	}
	if !strings.Contains(string(data), `"new":"field"`) {
		t.Errorf("a field was lost: %s", data)
	}
	var after corev1.Pod
	if err := json.Unmarshal(data, &after); err != nil {
		t.Fatal(err)
	}
	if after.Labels[wire.UnitsLabel] != wire.UnitsAsClaims {
		t.Errorf("labels %v", after.Labels)
	}
	return &after
}

// A pod that has claims, labels and annotations of its own keeps them.
func TestPatchBesideClaims(t *testing.T) {
	pod := podOf(map[string]string{"a": "b"}, nil, container("a", string(gcu)+"=1", string(gpu)+"=1"))
	pod.Labels = map[string]string{"c": "d"}
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "net", ResourceClaimName: new("n")}}
	pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "net"}}
	all, _, err := Translate(pod, testUnits(t))
	if err != nil {
		t.Fatal(err)
	}
	after := patched(t, pod, all)
	if after.Annotations["a"] != "b" || after.Labels["c"] != "d" || len(after.Spec.ResourceClaims) != 3 ||
		after.Spec.ResourceClaims[0].Name != "net" {
		t.Errorf("the pod became %+v", after)
	}
	want := []corev1.ResourceClaim{{Name: "net"}, {Name: "divvy-enflame-gcu-memory", Request: "memory"},
		{Name: "divvy-nvidia-gpu-memory", Request: "memory"}}
	if diff := cmp.Diff(want, after.Spec.Containers[0].Resources.Claims); diff != "" {
		t.Error(diff)
	}
}

func TestPodsThatAreNotTranslated(t *testing.T) {
	ten := container("a", string(gcu)+"=10")
	edit := func(f func(*corev1.ResourceRequirements)) *corev1.Pod {
		c := container("a", string(gcu)+"=10")
		f(&c.Resources)
		return podOf(nil, nil, c)
	}
	claimed := podOf(nil, nil, ten)
	claimed.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "divvy-enflame-gcu-memory"}}
	var many []corev1.Container
	for i := range 33 {
		many = append(many, container(fmt.Sprintf("c%d", i), string(gcu)+"=1"))
	}
	tests := map[string]struct {
		pod  *corev1.Pod
		want string
	}{
		"a request that is not the limit": {edit(func(r *corev1.ResourceRequirements) { r.Requests[gcu] = resource.MustParse("4") }),
			`spec.containers[0].resources.limits[enflame.com/gcu-memory]: Invalid value: "10": must be equal to the request, which is 4`},
		"a request without a limit": {edit(func(r *corev1.ResourceRequirements) { delete(r.Limits, gcu) }),
			`must be equal to the request, which is 10`},
		"half a unit": {podOf(nil, nil, container("a", string(gcu)+"=500m")), "must be a whole number of units"},
		"units that cannot be divided": {podOf(map[string]string{wire.CountAnnotation: "3"}, nil, ten),
			"container a requests 10 of enflame.com/gcu-memory, which cannot be divided equally among 3 devices; use 9 or 12"},
		"more devices than a claim has": {podOf(map[string]string{wire.CountAnnotation: "64"}, nil, container("a", string(gcu)+"=64")),
			"a claim has 32 devices at most, not 64"},
		"several containers on several devices": {podOf(map[string]string{wire.CountAnnotation: "2"}, nil, ten,
			container("b", string(gcu)+"=2")), "claims cannot keep them on the same 2 devices; let one of them request units"},
		"an annotation that cannot be followed": {podOf(map[string]string{wire.CountAnnotation: "two"}, nil, ten),
			`annotation divvy.dev/devices: "two" is not a number of devices`},
		"a share of compute": {podOf(map[string]string{wire.ComputeAnnotation: "50"}, nil, ten), "remove the annotation"},
		"a pod that was translated": {podOf(map[string]string{wire.UnitsAnnotation: "[]"}, nil, ten),
			"have been translated into claims before"},
		"a claim of that name":          {claimed, `spec.resourceClaims: Duplicate value: "divvy-enflame-gcu-memory"`},
		"more containers than requests": {podOf(nil, nil, many...), "a claim has 32 requests at most; write claims instead of units"},
		"more names than a selector holds": {podOf(map[string]string{wire.UseModelsAnnotation: names(60, 200)}, nil, ten),
			"name fewer models"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			all, _, err := Translate(tt.pod, testUnits(t))
			if all != nil || err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%q, %v; want %s", short(all), err, tt.want)
			}
		})
	}
}

func names(n, length int) string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf("%d%s", i, strings.Repeat("x", length)))
	}
	return strings.Join(all, ",")
}

func TestPolicyHasNoEffect(t *testing.T) {
	_, warnings, err := Translate(podOf(map[string]string{wire.PolicyAnnotation: "spread"}, nil, container("a", string(gcu)+"=1")),
		testUnits(t))
	if err != nil || len(warnings) != 1 || !strings.Contains(warnings[0], wire.PolicyAnnotation+" has no effect") {
		t.Errorf("%q, %v", warnings, err)
	}
}

// Templates are reused by pods that need the same, whatever they and their containers are called.
func TestTemplateNames(t *testing.T) {
	name := func(pod *corev1.Pod) string {
		t.Helper()
		all, _, err := Translate(pod, testUnits(t))
		if err != nil || len(all) != 1 {
			t.Fatal(all, err)
		}
		if got := template("team", &all[0]); got.Name != all[0].Template || got.Labels[wire.UnitsLabel] != wire.UnitsAsClaims {
			t.Errorf("template %+v", got)
		}
		return all[0].Template
	}
	ten := name(podOf(nil, nil, container("a", string(gcu)+"=10")))
	if same := name(podOf(nil, nil, container("log"), container("b", string(gcu)+"=10"))); same != ten {
		t.Errorf("%s and %s", ten, same)
	}
	for what, pod := range map[string]*corev1.Pod{
		"another amount":    podOf(nil, nil, container("a", string(gcu)+"=11")),
		"another vendor":    podOf(nil, nil, container("a", string(gpu)+"=100")),
		"two devices":       podOf(map[string]string{wire.CountAnnotation: "2"}, nil, container("a", string(gcu)+"=20")),
		"a choice of model": podOf(map[string]string{wire.UseModelsAnnotation: "S60"}, nil, container("a", string(gcu)+"=10")),
	} {
		if other := name(pod); other == ten {
			t.Errorf("%s has the same template", what)
		}
	}
}

// What a user writes into the annotation makes no template of another content than its name says.
func TestForgedAnnotations(t *testing.T) {
	all, _, err := Translate(podOf(nil, nil, container("a", string(gcu)+"=10")), testUnits(t))
	if err != nil {
		t.Fatal(err)
	}
	all[0].Devices.Requests[0].Exactly.Count = 2
	data, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{string(data), "{", `[{"template":"mine"}]`} {
		if got, err := Translations(map[string]string{wire.UnitsAnnotation: text}); err == nil {
			t.Errorf("%s is read as %+v", text, got)
		}
	}
	if got, err := Translations(map[string]string{"other": "x"}); got != nil || err != nil {
		t.Errorf("a pod without: %v, %v", got, err)
	}
}

// FuzzTranslate: whatever a pod requests, there is an answer, and a claim has what the containers that
// run at the same time request together.
func FuzzTranslate(f *testing.F) {
	f.Add(int64(1), int64(2), int64(0), int64(3), "2", false)
	f.Add(int64(10), int64(0), int64(5), int64(1<<40), "x", true)
	f.Add(int64(5), int64(0), int64(10), int64(10), "", false)
	f.Add(int64(0), int64(0), int64(10), int64(10), "", false)
	f.Fuzz(func(t *testing.T, first, second, beside, initial int64, devices string, late bool) {
		before := []corev1.Container{sidecar(container("s", fmt.Sprintf("%s=%d", gpu, beside))),
			container("i", fmt.Sprintf("%s=%d", gpu, initial))}
		if late {
			slices.Reverse(before)
		}
		pod := podOf(nil, before, container("a", fmt.Sprintf("%s=%d", gpu, first)), container("b", fmt.Sprintf("%s=%d",
			gpu, second)))
		if devices != "" {
			pod.Annotations = map[string]string{wire.CountAnnotation: devices}
		}
		all, _, err := Translate(pod, testUnits(t))
		if err != nil || all == nil {
			return
		}
		var sum int64
		for _, r := range all[0].Devices.Requests {
			memory := r.Exactly.Capacity.Requests[wire.MemoryCapacity]
			sum += memory.Value() * r.Exactly.Count
		}
		starting := initial
		if !late {
			starting += max(beside, 0)
		}
		need := max(max(beside, 0)+max(first, 0)+max(second, 0), starting)
		if u := testUnits(t)[1]; need <= int64(accel.MaxUnits) && sum < u.MiB(accel.Units(need))*wire.MemoryStep {
			t.Errorf("%d bytes for %d units", sum, need)
		}
		patched(t, pod, all)
	})
}
