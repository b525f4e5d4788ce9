//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// mixed is a node with cards of three vendors, whole and by memory.
var mixed = setting{
	topology: demos.Mixed, values: demos.MixedValues, unit: "1", injection: audit.DeviceNodes, units: 32, cards: 2,
}

// beginMixed starts a test on cards of three vendors, of which nothing is in
// use, and puts cards and configuration back after it.
func beginMixed(t *testing.T) context.Context {
	t.Helper()
	if interrupted.Load() {
		t.Skip("interrupted")
	}
	ctx := t.Context()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		if t.Failed() {
			t.Log(situation(ctx))
		}
		hardware, err := lab.Cards(demos.Mixed)
		err = errors.Join(err, lab.Pods.DeleteAll(ctx), lab.Node.Label(ctx, testenv.ConfigLabel, ""), lab.SetHardware(ctx, hardware),
			lab.ReleaseDevices(ctx), allFree(ctx))
		if err != nil {
			t.Errorf("after the test: %v", err)
		}
	})
	beginWith(t, ctx, mixed)
	must(t, allFree(ctx))
	return ctx
}

// allFree waits until everything of mixed is offered.
func allFree(ctx context.Context) error {
	for name, want := range map[corev1.ResourceName]int64{
		demos.GPU: 2, demos.GPUMemory: 80, demos.IX: 2, demos.IXMemory: 128, demos.GCU: 2, demos.GCUMemory: 32,
	} {
		if _, err := lab.Node.WaitAllocatable(ctx, settingTimeout, name, want); err != nil {
			return err
		}
	}
	return nil
}

// offers waits until the node offers so much of a resource.
func offers(t *testing.T, name corev1.ResourceName, want int64) {
	t.Helper()
	_, err := lab.Node.WaitAllocatable(t.Context(), settingTimeout, name, want)
	must(t, err)
}

// shows waits until the node's capacity and what it offers of a resource are both so
// much, as where nothing is unhealthy or in use otherwise.
func shows(t *testing.T, name corev1.ResourceName, want int64) {
	t.Helper()
	must(t, poll.Until(t.Context(), settingTimeout, fmt.Sprintf("capacity and allocatable of %s to be %d", name, want),
		func(ctx context.Context) error {
			capacity, allocatable, err := lab.Node.Offered(ctx, name)
			if err == nil && (capacity != want || allocatable != want) {
				err = fmt.Errorf("they are %d and %d", capacity, allocatable)
			}
			return err
		}))
}

// choose puts a configuration of mixed.yaml in force.
func choose(t *testing.T, name string) {
	t.Helper()
	must(t, lab.Node.Label(t.Context(), testenv.ConfigLabel, name))
}

// asking returns a pod of one container.
func asking(name string, what corev1.ResourceName, amount int64) *corev1.Pod {
	return lab.Pods.New(name, testenv.Asking("app", what, amount))
}

// sights returns what running pods see of cards.
func sights(t *testing.T, names ...string) map[string]testenv.Sight {
	t.Helper()
	seen := map[string]testenv.Sight{}
	for _, name := range names {
		sight, err := lab.Pods.See(t.Context(), name)
		must(t, err)
		seen[name] = sight
	}
	return seen
}

// sameDaemon checks at the end that the daemon was not started again.
func sameDaemon(t *testing.T) (check func()) {
	t.Helper()
	before, err := lab.Divvy.DaemonLife(t.Context())
	must(t, err)
	return func() {
		t.Helper()
		if after, err := lab.Divvy.DaemonLife(t.Context()); err != nil || after != before {
			t.Errorf("the daemon was %s, and is %s (%v)", before, after, err)
		}
	}
}

// TestOldFilesAsTheyAre: files of both old device plugins work unchanged, and
// change with the node's label.
func TestOldFilesAsTheyAre(t *testing.T) {
	ctx := beginMixed(t)
	check := sameDaemon(t)
	for config, want := range map[string]int64{"board": 2, "chips": 4, "replicas": 8} {
		choose(t, config)
		shows(t, demos.IX, want)
		shows(t, demos.GPU, 2) // the other vendors' are not concerned
	}
	choose(t, "nvidia")
	shows(t, demos.GPU, 8)
	shows(t, demos.IX, 2)
	must(t, poll.Until(ctx, settingTimeout, "labels of time slices", func(ctx context.Context) error {
		node, err := lab.Node.Get(ctx)
		if err != nil {
			return err
		}
		l := node.Labels
		if l["nvidia.com/gpu.replicas"] != "4" || l["nvidia.com/gpu.sharing-strategy"] != "time-slicing" ||
			l["nvidia.com/gpu.product"] != "NVIDIA-A100-SXM4-40GB-SHARED" {
			return fmt.Errorf("%s, %s, %s", l["nvidia.com/gpu.replicas"], l["nvidia.com/gpu.sharing-strategy"], l["nvidia.com/gpu.product"])
		}
		return nil
	}))

	// failRequestsGreaterThanOne
	create(t, asking("two-replicas", demos.GPU, 2))
	must(t, lab.Pods.WaitPhase(ctx, podTimeout, corev1.PodFailed, "two-replicas"))
	pod, err := lab.Pods.API.Get(ctx, "two-replicas", metav1.GetOptions{})
	must(t, err)
	if !strings.Contains(pod.Status.Message, "maximum request size for shared resources is 1") {
		t.Errorf("%s; want the reason", testenv.Describe(pod))
	}
	// Four replicas on two cards are spread.
	var names []string
	for i := range 4 {
		names = append(names, fmt.Sprint("replica-", i))
		start(t, asking(names[i], demos.GPU, 1))
	}
	sharers := map[string]int{}
	for _, sight := range sights(t, names...) {
		sharers[sight.Env["NVIDIA_VISIBLE_DEVICES"]]++
	}
	if len(sharers) != 2 || sharers[uuidOf(t, 0)] != 2 {
		t.Errorf("pods on each GPU: %v, want two on each", sharers)
	}
	check()
}

// uuidOf returns the uuid of a card of mixed.
func uuidOf(t *testing.T, number int) string {
	t.Helper()
	hardware, err := lab.Cards(demos.Mixed)
	must(t, err)
	return hardware.Cards[number].UUID
}

// TestRestartsUnderEveryKind restarts kubelet and the daemon under pods of every
// vendor and mode: they keep their cards and are not started again.
func TestRestartsUnderEveryKind(t *testing.T) {
	kinds := map[string][]*corev1.Pod{
		"": {
			asking("gpu-whole", demos.GPU, 1), asking("gpu-part", demos.GPUMemory, 4),
			asking("ix-whole", demos.IX, 1), asking("ix-part", demos.IXMemory, 4),
			asking("gcu-whole", demos.GCU, 1), asking("gcu-part", demos.GCUMemory, 4),
		},
		"slices": {
			asking("gpu-1", demos.GPU, 1), asking("gpu-2", demos.GPU, 1), asking("gpu-3", demos.GPU, 1),
			asking("ix-1", demos.IX, 1), asking("ix-2", demos.IX, 2), asking("gcu-1", demos.GCU, 1),
		},
	}
	for config, pods := range kinds {
		t.Run("config "+config, func(t *testing.T) {
			ctx := beginMixed(t)
			if config != "" {
				choose(t, config)
				offers(t, demos.GPU, 4)
				offers(t, demos.IX, 4)
				offers(t, demos.GCU, 4)
			}
			start(t, pods...)
			names := namesOf(pods)
			before, alive := sights(t, names...), lives(t)
			for _, restart := range lab.Restarts() {
				if !slices.Contains([]string{"kubelet restarted", "kubelet killed", "divvy-node deleted", "divvy-node killed",
					"divvy-node rolled"}, restart.Name) {
					continue
				}
				must(t, restart.Do(ctx))
				running(t, names...)
				if after := sights(t, names...); !reflect.DeepEqual(after, before) {
					t.Errorf("%s: pods see %v, saw %v", restart.Name, after, before)
				}
				undisturbed(t, alive)
			}
			// What is left is still handed out.
			if config == "" {
				pending(t, create(t, asking("none-left", demos.GPU, 1))[0], "Insufficient nvidia.com/gpu")
				start(t, asking("gpu-more", demos.GPUMemory, 36), asking("ix-more", demos.IXMemory, 32),
					asking("gcu-more", demos.GCUMemory, 12))
			} else {
				start(t, asking("gpu-4", demos.GPU, 1), asking("gcu-2", demos.GCU, 3))
			}
			undisturbed(t, alive)
		})
	}
}

// uuidsOf returns the uuids of a vendor's cards in mixed, in the order of their
// numbers and joined by commas.
func uuidsOf(t *testing.T, vendor string) string {
	t.Helper()
	hardware, err := lab.Cards(demos.Mixed)
	must(t, err)
	var uuids []string
	for _, c := range hardware.Cards {
		if c.Vendor == vendor {
			uuids = append(uuids, c.UUID)
		}
	}
	return strings.Join(uuids, ",")
}

func TestRequestForAllDevices(t *testing.T) {
	beginMixed(t)
	start(t, asking("gpus", demos.GPU, 2), asking("boards", demos.IX, 2), asking("gcus", demos.GCU, 2))
	gpus, chips := uuidsOf(t, vendorsim.NVIDIA), uuidsOf(t, vendorsim.Iluvatar)
	for pod, want := range map[string]testenv.Sight{
		"gpus": {
			Env:   map[string]string{"NVIDIA_VISIBLE_DEVICES": gpus},
			Nodes: []string{"nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1", "nvidiactl"},
		},
		"boards": {
			Env:   map[string]string{"IX_VISIBLE_DEVICES": chips, "ILUVATAR_COREX_VISIBLE_DEVICES": chips},
			Nodes: []string{"iluvatar0", "iluvatar1", "iluvatar2", "iluvatar3", "itrctl"},
		},
		"gcus": {Env: map[string]string{"ENFLAME_VISIBLE_DEVICES": "0,1"}, Nodes: []string{"gcu0", "gcu1"}},
	} {
		got := sights(t, pod)[pod]
		for variable, value := range want.Env {
			if got.Env[variable] != value {
				t.Errorf("pod %s has %s=%s, want %s", pod, variable, got.Env[variable], value)
			}
		}
		if !slices.Equal(got.Nodes, want.Nodes) {
			t.Errorf("pod %s has the device nodes %v, want %v", pod, got.Nodes, want.Nodes)
		}
	}
	for _, memory := range []corev1.ResourceName{demos.GPUMemory, demos.IXMemory, demos.GCUMemory} {
		offers(t, memory, 0)
	}
}

// TestForcedDeletionOfAWholeDevice: kubelet counts the GPU of a pod that is deleted by force as free
// at once. Who comes next waits until its containers have exited.
func TestForcedDeletionOfAWholeDevice(t *testing.T) {
	ctx := beginMixed(t)
	const mark = "divvy-e2e-forced-gpu"
	app := testenv.Asking("app", demos.GPU, 1)
	app.Command = []string{"sh", "-c", "trap 'sleep 20; exit 0' TERM; while :; do sleep 0.2; done", mark}
	start(t, asking("other", demos.GPU, 1), lab.Pods.New("slow", app))
	gpu := sights(t, "slow")["slow"].Env["NVIDIA_VISIBLE_DEVICES"]
	if processes(t, mark) == 0 {
		t.Fatal("the container's process is not found")
	}
	next := create(t, asking("next", demos.GPU, 1))[0]
	pending(t, next, "Insufficient nvidia.com/gpu")

	must(t, lab.Client.CoreV1().Pods(namespace).Delete(ctx, "slow", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	takesOver(t, ctx, next.Name, mark, gpu)
}

// takesOver waits until a pod runs with a GPU, and checks that no process with that argument, of the pod
// that had the GPU before, runs then.
func takesOver(t *testing.T, ctx context.Context, pod, mark, gpu string) {
	t.Helper()
	must(t, poll.Until(ctx, podTimeout, "the GPU to be given to the other pod", func(ctx context.Context) error {
		next, err := lab.Pods.API.Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return err
		}
		left := processes(t, mark)
		switch {
		case next.Status.Phase != corev1.PodRunning:
			return fmt.Errorf("%d processes run; %s", left, testenv.Describe(next))
		case left > 0:
			t.Fatalf("it runs while %d processes of the pod before do", left)
		}
		return nil
	}))
	if got := sights(t, pod)[pod].Env["NVIDIA_VISIBLE_DEVICES"]; got != gpu {
		t.Errorf("it has GPU %s, want %s, the only one that was free", got, gpu)
	}
}

// TestResourceLeavesUnderPods: what is configured no more is served to those who
// hold it, and to nobody else.
func TestResourceLeavesUnderPods(t *testing.T) {
	ctx := beginMixed(t)
	check := sameDaemon(t)
	start(t, asking("whole", demos.GPU, 1), asking("part", demos.GPUMemory, 4))
	before, alive := sights(t, "whole", "part"), lives(t)
	annotated(t, "whole", string(demos.GPU))

	choose(t, "slices") // no memory, and GPUs by turns
	offers(t, demos.GPUMemory, 4)
	offers(t, demos.IX, 4)
	pending(t, create(t, asking("refused", demos.GPUMemory, 1))[0], "Insufficient nvidia.com/gpu-memory")
	must(t, lab.Cluster.Restart(ctx, cluster.Kubelet))
	must(t, lab.Divvy.Wait(ctx, settingTimeout))
	running(t, "whole", "part")
	undisturbed(t, alive)
	if after := sights(t, "whole", "part"); !reflect.DeepEqual(after, before) {
		t.Errorf("pods see %v, saw %v", after, before)
	}
	must(t, lab.Pods.Delete(ctx, "refused", "part", "whole"))
	offers(t, demos.GPUMemory, 0)
	offers(t, demos.GPU, 4)
	choose(t, "")
	must(t, allFree(ctx))
	check()
}

// annotated waits until a pod's annotation tells of a device of the resource.
func annotated(t *testing.T, name, what string) {
	t.Helper()
	must(t, poll.Until(t.Context(), agreeTimeout, "the annotation of "+name, func(ctx context.Context) error {
		pod, err := lab.Pods.API.Get(ctx, name, metav1.GetOptions{})
		if err == nil && !strings.Contains(pod.Annotations["divvy.dev/held"], `"`+what+`":["GPU-`) {
			err = fmt.Errorf("divvy.dev/held is %q", pod.Annotations["divvy.dev/held"])
		}
		return err
	}))
}

// TestConfigMapChangesUnderPods: a good one is taken over without a restart, and
// of a bad one is told while the last good one stays.
func TestConfigMapChangesUnderPods(t *testing.T) {
	ctx := beginMixed(t)
	check := sameDaemon(t)
	start(t, asking("whole", demos.GCU, 1))
	alive := lives(t)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		if err := errors.Join(lab.Pods.DeleteAll(ctx),
			lab.Divvy.Reconfigure(ctx, []string{mixed.values}, "--set", "node.nodeSelector=null"),
			allFree(ctx)); err != nil {
			t.Errorf("put the configuration back: %v", err)
		}
	})
	must(t, lab.Divvy.Reconfigure(ctx, []string{mixed.values}, "--set", "node.nodeSelector=null", "--set-json",
		`sharedResources=[{"name":"nvidia.com/gpu","vendor":"nvidia","mode":"timeSlicing","replicas":3},{"name":"enflame.com/gcu",`+
			`"vendor":"enflame","mode":"exclusive"}]`))
	offers(t, demos.GPU, 6)
	offers(t, demos.IX, 0)
	undisturbed(t, alive)

	since := logSize(t, nodeLog)
	patch := []byte(`{"data":{"config.yaml":"apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\ncolour: red\nresources: []\n"}}`)
	_, err := lab.Client.CoreV1().ConfigMaps(product.Namespace).Patch(ctx, "divvy-node", types.MergePatchType, patch, metav1.PatchOptions{})
	must(t, err)
	must(t, lab.Divvy.Poke(ctx, testenv.NodeDaemon))
	must(t, poll.Until(ctx, 2*settingTimeout, "the log to tell of the mistake", func(context.Context) error {
		data, err := os.ReadFile(nodeLog)
		if err == nil && !strings.Contains(string(data[min(since, len(data)):]), "colour") {
			err = errors.New("it does not yet")
		}
		return err
	}))
	offers(t, demos.GPU, 6)
	start(t, asking("replica", demos.GPU, 1))
	undisturbed(t, alive)
	check()
}

// ixConfigMap is the one of the README of Iluvatar's device plugin.
const ixConfigMap = `apiVersion: v1
kind: ConfigMap
data:
  ix-config: |-
    version: "4.2.0"
    flags:
      splitboard: false
    sharing:
      timeSlicing:
          replicas: 4
metadata:
  name: ix-config
  namespace: ` + product.Namespace + "\n"

// TestConfigMapOfIluvatarsGuide mounts it as it is, and changes it.
func TestConfigMapOfIluvatarsGuide(t *testing.T) {
	ctx := beginMixed(t)
	reconfigure := func(ctx context.Context, args ...string) error {
		return lab.Divvy.Reconfigure(ctx, []string{mixed.values}, append(args, "--set", "node.nodeSelector=null")...)
	}
	kubectl := lab.Cluster.Program("kubectl")
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		_, err := lab.CLI.Kubectl(ctx, "delete", "configmap", "ix-config", "--namespace", product.Namespace, "--ignore-not-found")
		if err := errors.Join(err, reconfigure(ctx), lab.Divvy.Wait(ctx, settingTimeout)); err != nil {
			t.Errorf("put the configuration back: %v", err)
		}
	})
	_, err := lab.CLI.Command(ctx, ixConfigMap, kubectl, "create", "-f", "-")
	must(t, err)
	must(t, reconfigure(ctx, "--set-string", "node.ixConfigMap=ix-config"))
	must(t, lab.Divvy.Wait(ctx, settingTimeout))
	offers(t, demos.IX, 8)
	offers(t, demos.GPU, 2)

	check := sameDaemon(t)
	_, err = lab.CLI.Command(ctx, strings.Replace(ixConfigMap, "replicas: 4", "replicas: 2", 1), kubectl, "replace", "-f", "-")
	must(t, err)
	must(t, lab.Divvy.Poke(ctx, testenv.NodeDaemon))
	offers(t, demos.IX, 4)
	check()
}

// TestASecondDaemonWaits: it says so, and takes nothing from the first.
func TestASecondDaemonWaits(t *testing.T) {
	ctx := beginMixed(t)
	check := sameDaemon(t)
	config := filepath.Join(t.TempDir(), "config.yaml")
	text := "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\nresources:\n- {name: nvidia.com/gpu, vendor: nvidia, mode: " +
		"timeSlicing, replicas: 9}\n"
	must(t, os.WriteFile(config, []byte(text), 0o600))
	second, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, err := lab.CLI.Command(second, "", filepath.Join(product.Programs(), "divvy-node"), "--node-name="+layout.NodeName,
		"--config="+config)
	if err == nil || !strings.Contains(err.Error(), "Another divvy-node runs on this node") {
		t.Errorf("a second daemon: %v; want it to say that another one runs", err)
	}
	must(t, allFree(ctx))
	start(t, asking("served", demos.GPU, 2))
	check()
}
