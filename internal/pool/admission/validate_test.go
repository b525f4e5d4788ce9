package admission

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/divvy-gpu/divvy/internal/pool"
)

func validated(t *testing.T, pod *corev1.Pod, cluster Cluster) {
	t.Helper()
	if _, err := Validate(pod, testNamespace, pool.DefaultCatalog(), testSettings(), cluster); err != nil {
		t.Errorf("refused: %v", err)
	}
}

// refused is Validate where it must refuse, with all of the words in its message.
func refused(t *testing.T, pod *corev1.Pod, cluster Cluster, forbidden bool, words ...string) Denial {
	t.Helper()
	_, err := Validate(pod, testNamespace, pool.DefaultCatalog(), testSettings(), cluster)
	var denial *Denial
	if !errors.As(err, &denial) {
		t.Fatalf("not refused: %v", err)
	}
	mentions(t, denial.Error(), words...)
	if denial.Forbidden != forbidden {
		t.Errorf("forbidden is %v for %q", denial.Forbidden, denial.Error())
	}
	return *denial
}

func converted(t *testing.T, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	after, _ := convert(t, pod)
	return after
}

func TestConvertedPodsPass(t *testing.T) {
	t.Parallel()
	none := corev1.ResourceRequirements{}
	validated(t, converted(t, guidePod()), readyCluster())
	validated(t, converted(t, annotated(guidePod(), pool.ModeAnnotation, "injection", pool.HomeAnnotation, "/home/user")), readyCluster())
	validated(t, converted(t, annotated(guidePod(), pool.VersionAnnotation, "250")), readyCluster())
	validated(t, converted(t, initsOf(poolPod(container("a", none, "x"), container("b", half(), pythonX)),
		sidecar(container("c", half(), "serve")))), readyCluster())
	volumes := guidePod()
	volumes.Spec.Volumes = append(volumes.Spec.Volumes, emptyDir(distroVolume))
	validated(t, converted(t, volumes), readyCluster())
	// Without a node nothing can be said about nodes, as the original holds it.
	validated(t, converted(t, guidePod()), &testCluster{})
}

// V1: pods that have nothing to do with the pool pass whatever the cluster is
// like, and so does everything in an ignored namespace.
func TestOtherPodsPass(t *testing.T) {
	t.Parallel()
	broken := &testCluster{largest: map[corev1.ResourceName]int64{}, quotas: map[string]map[string]int64{testNamespace: {"none": 0}},
		notAllowed: errors.New("no")}
	pod := poolPod(container("a", asking("example.com/nothing", "1", "cpu", "1"), "x"))
	pod.Annotations = nil
	validated(t, pod, broken)
	validated(t, annotated(poolPod(container("a", asking("cpu", "1"))), pool.StatusAnnotation, "injected"), broken)
	if _, err := Validate(guidePod(), "bwki", pool.DefaultCatalog(), testSettings(), broken); err != nil {
		t.Errorf("an ignored namespace: %v", err)
	}
}

// Raw keys never get through: W22 and W30, and the silent pass of mode none.
func TestLeftoversAreRefused(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"-", "", "none", "off"} {
		refused(t, annotated(guidePod(), pool.ModeAnnotation, mode), readyCluster(), false, `container "bf-pkgs"`, pool.AmountResource,
			pool.ModeAnnotation+": all", "injection")
	}
	for _, mode := range []string{"all", "injection"} {
		refused(t, annotated(guidePod(), pool.ModeAnnotation, mode), readyCluster(), false, `container "bf-pkgs"`, pool.AmountResource,
			"not converted")
	}
	refused(t, annotated(guidePod(), pool.StatusAnnotation, "injected"), readyCluster(), false, "not converted") // W30
	refused(t, annotated(guidePod(), pool.ModeAnnotation, "injecton"), readyCluster(), false, pool.ModeAnnotation, "injecton")
	// V3: init containers are looked at.
	refused(t, initsOf(poolPod(container("a", corev1.ResourceRequirements{})), container("warm", half(), "x")), readyCluster(), false,
		`init container "warm"`)
	// V5: what is wrong with the request is told at once.
	wrong := annotated(poolPod(container("a", asking(pool.PercentResource, "101"), pythonX)), pool.ModeAnnotation, "-", pool.OSAnnotation,
		"-")
	refused(t, wrong, readyCluster(), false, pool.ModeAnnotation, pool.PercentResource+": 101", pool.AmountResource, pool.OSAnnotation)
	refused(t, poolPod(container("a", asking("bitfusion.io/gpu-percnt", "10"), pythonX)), readyCluster(), false, `container "a"`,
		"bitfusion.io/gpu-percnt", pool.PercentResource)
}

// Units written by hand come without a client.
func TestUnitsByHandAreRefused(t *testing.T) {
	t.Parallel()
	byHand := poolPod(container("a", asking(pool.Resource, "50"), pythonX))
	refused(t, byHand, readyCluster(), false, `container "a"`, pool.Resource, pool.AmountResource, pool.ModeAnnotation)
	refused(t, annotated(byHand.DeepCopy(), pool.ModeAnnotation, "-", pool.StatusAnnotation, "injected"), readyCluster(), false,
		pool.Resource)
	// Nothing at all may be asked for by hand.
	validated(t, poolPod(container("a", asking(pool.Resource, "0"), pythonX)), readyCluster())

	tests := map[string]func(*corev1.Pod){
		"without populate":   func(p *corev1.Pod) { p.Spec.InitContainers = nil },
		"another populate":   func(p *corev1.Pod) { p.Spec.InitContainers[0].VolumeMounts[0].Name = "code" },
		"without the client": func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts[4].MountPath = "/elsewhere" },
		"without the token":  func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts[2].MountPath = "/elsewhere" },
		"another container":  func(p *corev1.Pod) { p.Spec.Containers = append(p.Spec.Containers, byHand.Spec.Containers[0]) },
		"an earlier container": func(p *corev1.Pod) {
			p.Spec.InitContainers = append([]corev1.Container{early(p)}, p.Spec.InitContainers...)
		},
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pod := converted(t, guidePod())
			change(pod)
			refused(t, pod, readyCluster(), false, pool.Resource, "by hand")
		})
	}
}

// early is the container of a pod as an init container.
func early(pod *corev1.Pod) corev1.Container {
	c := *pod.Spec.Containers[0].DeepCopy()
	c.Name = "early"
	return c
}

// V3: a resource that no node has is named, with its container. V2: nodes are
// asked for how much they have.
func TestResourcesThatNoNodeHas(t *testing.T) {
	t.Parallel()
	pod := converted(t, poolPod(container("a", half(), pythonX), container("b", asking("example.com/nic", "1", "cpu", "1"))))
	refused(t, pod, readyCluster(), false, `container "b"`, "example.com/nic")
	zero := converted(t, poolPod(container("a", half(), pythonX), container("b", asking("example.com/nic", "0"))))
	validated(t, zero, readyCluster())

	cluster := readyCluster()
	delete(cluster.largest, pool.Resource)
	refused(t, converted(t, guidePod()), cluster, false, `container "bf-pkgs"`, pool.Resource, "bitfusion-device-plugin")

	// All containers of a pod run on one node.
	cluster.largest[pool.Resource] = 99
	two := converted(t, poolPod(container("a", half(), pythonX), container("b", half(), pythonX)))
	refused(t, two, cluster, false, "100", "99")
	cluster.largest[pool.Resource] = 100
	validated(t, two, cluster)
	// Init containers run before, sidecars beside the others.
	validated(t, converted(t, initsOf(poolPod(container("a", half(), pythonX)), container("warm", asking(pool.AmountResource, "1"), "x"))),
		cluster)
	refused(t, converted(t, initsOf(poolPod(container("a", half(), pythonX)),
		sidecar(container("serve", asking(pool.AmountResource, "1"), "x")))), cluster, false, "150", "100")
}

// A quota that could not hold the pod even when it was empty.
func TestQuotaThatIsTooSmall(t *testing.T) {
	t.Parallel()
	cluster := readyCluster()
	cluster.quotas = map[string]map[string]int64{testNamespace: {"small": 49, "large": 50, "none": 0}, "other": {"tiny": 1}}
	denial := refused(t, converted(t, guidePod()), cluster, true, `"small"`, "49", "50", `"none"`, testNamespace)
	if text := denial.Error(); strings.Contains(text, `"large"`) || strings.Contains(text, `"tiny"`) {
		t.Errorf("quotas that can hold it are named: %s", text)
	}
	cluster.quotas[testNamespace] = map[string]int64{"large": 50}
	validated(t, converted(t, guidePod()), cluster)
}

func TestNamespaceWithoutCredentials(t *testing.T) {
	t.Parallel()
	cluster := &credentialsCluster{testCluster: readyCluster()}
	cluster.notAllowed = errors.New("kubectl label namespace tensorflow-benchmark divvy.dev/pool=allowed")
	refused(t, converted(t, guidePod()), cluster, true, "kubectl label namespace")
	if cluster.namespace != testNamespace || strings.Join(cluster.secrets, " ") != pool.CASecret+" "+pool.ClientSecret+" "+
		pool.ServersSecret {
		t.Errorf("asked about %s, %q", cluster.namespace, cluster.secrets)
	}
	// What is wrong with the pod comes first.
	pod := converted(t, guidePod())
	pod.Spec.InitContainers = nil
	refused(t, pod, cluster, false, "kubectl label namespace", "by hand")
}

// credentialsCluster remembers what was asked.
type credentialsCluster struct {
	*testCluster

	namespace string
	secrets   []string
}

func (c *credentialsCluster) CredentialsAllowed(namespace string, secrets []string) error {
	c.namespace, c.secrets = namespace, secrets
	return c.notAllowed
}

// Quantities that are not integers do not stop it.
func TestValidateTakesAnyQuantity(t *testing.T) {
	t.Parallel()
	pod := converted(t, guidePod())
	for _, value := range []string{"1500m", "-5", "9e30"} {
		list := corev1.ResourceList{pool.Resource: resource.MustParse(value)}
		pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: list, Limits: list}
		_, _ = Validate(pod, testNamespace, pool.DefaultCatalog(), testSettings(), readyCluster()) // API validation refuses them
	}
}
