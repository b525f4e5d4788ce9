package admission

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/pool"
)

const (
	testNamespace = "tensorflow-benchmark"
	clientImage   = "docker.io/bitfusiondeviceplugin/bitfusion-client:0.4"
	root450       = "/bitfusion/bitfusion-client-ubuntu1804_4.5.0-4_amd64.deb"
	binary450     = root450 + "/usr/bin/bitfusion"
	libraries450  = root450 + "/opt/bitfusion/lib/x86_64-linux-gnu/bitfusion/lib/"
	pythonX       = "python x.py"
)

func testSettings() Settings {
	return Settings{
		TotalMemoryMB: 16000, ClientImage: clientImage, ClientPullPolicy: corev1.PullIfNotPresent,
		IgnoredNamespaces: []string{"kube-system", "kube-public", "bwki"},
	}
}

// quantities makes a resource list of names and values.
func quantities(pairs ...string) corev1.ResourceList {
	list := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		list[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return list
}

// asking makes the resources of a container as the API server has defaulted
// them: limits, and equal requests.
func asking(pairs ...string) corev1.ResourceRequirements {
	return corev1.ResourceRequirements{Limits: quantities(pairs...), Requests: quantities(pairs...)}
}

func half() corev1.ResourceRequirements {
	return asking(pool.AmountResource, "1", pool.PercentResource, "50")
}

// poolPod is a pod of the guide, with the containers given.
func poolPod(containers ...corev1.Container) *corev1.Pod {
	return &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: "bf-pkgs", Namespace: testNamespace, Annotations: map[string]string{
			pool.ModeAnnotation: "all", pool.OSAnnotation: "ubuntu18", pool.VersionAnnotation: "450",
		}},
		Spec: corev1.PodSpec{Containers: containers},
	}
}

func container(name string, r corev1.ResourceRequirements, command ...string) corev1.Container {
	return corev1.Container{Name: name, Image: "nvcr.io/nvidia/tensorflow:19.07-py3", Command: command, Resources: r}
}

// guidePod is the pod of section 4.1 of the guide.
func guidePod() *corev1.Pod {
	pod := poolPod(container("bf-pkgs", half(), "python /benchmark/scripts/tf_cnn_benchmarks/tf_cnn_benchmarks.py "+
		"--local_parameter_device=gpu --batch_size=32 --model=inception3"))
	pod.Spec.Containers[0].ImagePullPolicy = corev1.PullIfNotPresent
	pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "code", MountPath: "/benchmark"}}
	pod.Spec.Volumes = []corev1.Volume{{Name: "code",
		VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/home/benchmarks"}}}}
	return pod
}

// convert is Mutate where it must succeed. It also checks what holds for every
// pod: the argument stays, the patch gives the same pod, a second run changes
// nothing, and what the user had is still there.
func convert(t *testing.T, pod *corev1.Pod) (*corev1.Pod, []string) {
	t.Helper()
	return convertWith(t, pod, pool.DefaultCatalog(), testSettings())
}

func convertWith(t *testing.T, pod *corev1.Pod, catalog *pool.Catalog, s Settings) (*corev1.Pod, []string) {
	t.Helper()
	before := pod.DeepCopy()
	converted, warnings, err := Mutate(pod, testNamespace, catalog, s)
	if err != nil {
		t.Fatalf("Mutate: %v", err)
	}
	if diff := cmp.Diff(before, pod); diff != "" {
		t.Errorf("Mutate changed its argument (-before +after):\n%s", diff)
	}
	again, _, err := Mutate(converted, testNamespace, catalog, s)
	if err != nil {
		t.Fatalf("Mutate again: %v", err)
	}
	if again != converted {
		t.Errorf("Mutate converted its own result (-first +second):\n%s", cmp.Diff(converted, again))
	}
	if converted == pod {
		return converted, warnings
	}
	if diff := cmp.Diff(converted, patched(t, pod, converted)); diff != "" {
		t.Errorf("the patch gives another pod (-Mutate +patch):\n%s", diff)
	}
	kept(t, before, converted)
	return converted, warnings
}

// patched applies the patch as the API server does.
func patched(t *testing.T, pod, converted *corev1.Pod) *corev1.Pod {
	t.Helper()
	patch, err := makePatch(pod, converted)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	var result corev1.Pod
	if err := json.Unmarshal(applyPatch(t, raw, patch), &result); err != nil {
		t.Fatal(err)
	}
	return &result
}

func applyPatch(t *testing.T, raw, patch []byte) []byte {
	t.Helper()
	decoded, err := jsonpatch.DecodePatch(patch)
	if err != nil {
		t.Fatal(err)
	}
	after, err := decoded.Apply(raw)
	if err != nil {
		t.Fatalf("the patch does not apply: %v\n%s", err, patch)
	}
	return after
}

// kept checks that everything of the user's is still there.
func kept(t *testing.T, before, after *corev1.Pod) {
	t.Helper()
	for key, value := range before.Annotations {
		if after.Annotations[key] != value && key != pool.StatusAnnotation {
			t.Errorf("annotation %s: %q, was %q", key, after.Annotations[key], value)
		}
	}
	for key, value := range before.Labels {
		if after.Labels[key] != value && key != pool.ConvertedLabel {
			t.Errorf("label %s: %q, was %q", key, after.Labels[key], value)
		}
	}
	for i, v := range before.Spec.Volumes {
		if diff := cmp.Diff(v, after.Spec.Volumes[i]); diff != "" {
			t.Errorf("volume %s:\n%s", v.Name, diff)
		}
	}
	now := map[string]*corev1.Container{}
	for place, c := range containers(after) {
		now[place] = c
	}
	for place, c := range containers(before) {
		other := now[place]
		if other == nil {
			t.Errorf("%s is gone", place)
			continue
		}
		if !pool.Asks(c.Resources) {
			if diff := cmp.Diff(c, other); diff != "" {
				t.Errorf("%s asks for nothing and was changed:\n%s", place, diff)
			}
			continue
		}
		if diff := cmp.Diff(c.VolumeMounts, other.VolumeMounts[:len(c.VolumeMounts)], cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("mounts of %s:\n%s", place, diff)
		}
		for j, e := range c.Env {
			if e.Name != libraryPathVariable && !cmp.Equal(e, other.Env[j]) {
				t.Errorf("env of %s:\n%s", place, cmp.Diff(e, other.Env[j]))
			}
		}
	}
}

// denied is Mutate where it must refuse, with all of the words in its message.
func denied(t *testing.T, pod *corev1.Pod, words ...string) Denial {
	t.Helper()
	return deniedWith(t, pod, pool.DefaultCatalog(), testSettings(), words...)
}

func deniedWith(t *testing.T, pod *corev1.Pod, catalog *pool.Catalog, s Settings, words ...string) Denial {
	t.Helper()
	converted, _, err := Mutate(pod, testNamespace, catalog, s)
	var denial *Denial
	if !errors.As(err, &denial) {
		t.Fatalf("not denied: %v, %v", converted, err)
	}
	mentions(t, denial.Error(), words...)
	return *denial
}

func mentions(t *testing.T, text string, words ...string) {
	t.Helper()
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%q does not mention %q", text, word)
		}
	}
}

func resourcesOf(c corev1.Container) map[string]string {
	all := map[string]string{}
	for name, q := range c.Resources.Limits {
		all["limits."+string(name)] = q.String()
	}
	for name, q := range c.Resources.Requests {
		all["requests."+string(name)] = q.String()
	}
	return all
}

func mountOf(c corev1.Container, at string) *corev1.VolumeMount {
	if i := slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == at }); i >= 0 {
		return &c.VolumeMounts[i]
	}
	return nil
}

func initNames(pod *corev1.Pod) []string {
	var names []string
	for i := range pod.Spec.InitContainers {
		names = append(names, pod.Spec.InitContainers[i].Name)
	}
	return names
}

func sidecar(c corev1.Container) corev1.Container {
	c.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
	return c
}

func initsOf(pod *corev1.Pod, inits ...corev1.Container) *corev1.Pod {
	pod.Spec.InitContainers = inits
	return pod
}

func annotated(pod *corev1.Pod, pairs ...string) *corev1.Pod {
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] == "-" {
			delete(pod.Annotations, pairs[i])
			continue
		}
		pod.Annotations[pairs[i]] = pairs[i+1]
	}
	return pod
}

// testCluster answers from fields.
type testCluster struct {
	largest    map[corev1.ResourceName]int64
	quotas     map[string]map[string]int64 // by namespace and name
	notAllowed error
}

func (c *testCluster) LargestAllocatable() map[corev1.ResourceName]int64 {
	return maps.Clone(c.largest)
}
func (c *testCluster) QuotaLimits(namespace string) map[string]int64 { return c.quotas[namespace] }
func (c *testCluster) CredentialsAllowed(string, []string) error {
	return c.notAllowed
}

func readyCluster() *testCluster {
	return &testCluster{largest: map[corev1.ResourceName]int64{
		pool.Resource: 1000, corev1.ResourceCPU: 8000, corev1.ResourceMemory: 64 << 30, corev1.ResourceEphemeralStorage: 100 << 30,
	}}
}
