package browser

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/report/inspect/nodeusage"
	"github.com/divvy-gpu/divvy/internal/report/ui"
)

const (
	gcuMemory = "enflame.com/gcu-memory"
	gpuMemory = "nvidia.com/gpu-memory"
	gpu       = "nvidia.com/gpu"
	gib       = 1 << 30
)

// world is a cluster without an API server: lists, and watches that a test feeds.
type world struct {
	t      *testing.T
	signer *wire.Signer
	nodes  []corev1.Node
	pods   []corev1.Pod
	usage  map[string]*wire.UsageReport
	// inventories are those of the nodes, until serve.
	inventories map[string][]accel.Inventory
	watches     *watch.RaceFreeFakeWatcher
	mu          sync.Mutex
	denied      map[string]bool // "list nodes"
	// openedAgain is true if a test opens the page in a second browser, which ends the server.
	openedAgain bool
}

func newWorld(t *testing.T) *world {
	t.Helper()
	signer, err := wire.NewSigner(make([]byte, wire.MinKeyBytes))
	if err != nil {
		t.Fatal(err)
	}
	return &world{t: t, signer: signer, usage: map[string]*wire.UsageReport{}, inventories: map[string][]accel.Inventory{},
		watches: watch.NewRaceFreeFake(), denied: map[string]bool{}}
}

// node adds a node with devices that offer their memory.
func (w *world) node(name, res, model string, devices int, gb accel.Units) *corev1.Node {
	inv := accel.Inventory{Resource: accel.Resource(res), Unit: "1", Several: true}
	use := &wire.UsageReport{Node: name, Time: time.Now().Add(-20 * time.Second)}
	for i := range devices {
		d := accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprintf("%s-%02d", name, i)), Model: model, MemoryBytes: int64(gb) * gib,
			NUMANode: i * 2 / devices}
		inv.Shares = append(inv.Shares, accel.Share{Device: d, Units: gb})
		use.Devices = append(use.Devices, wire.DeviceUsage{Device: d.ID, Index: i, MemoryBytes: uint64(gb) * gib})
	}
	w.inventories[name] = []accel.Inventory{inv}
	w.usage[name] = use
	amounts := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("128"), corev1.ResourceMemory: resource.MustParse("1Ti"),
		corev1.ResourcePods: resource.MustParse("250"), corev1.ResourceName(res): *resource.NewQuantity(int64(devices)*int64(gb),
			resource.DecimalSI),
	}
	w.nodes = append(w.nodes, corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"divvy.dev/enabled": "true", "enflame.com/gcushare": "true",
			corev1.LabelTopologyZone: "zone-" + string(rune('a'+len(w.nodes)%3))}, Annotations: map[string]string{}},
		Status: corev1.NodeStatus{Allocatable: amounts, Capacity: amounts,
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	})
	return &w.nodes[len(w.nodes)-1]
}

// boards makes pairs of a node's devices boards, which are offered whole as well.
func (w *world) boards(name, res string) {
	chips := w.inventories[name][0].Shares
	whole := accel.Inventory{Resource: accel.Resource(res)}
	for i := range chips {
		chips[i].Board, chips[i].Chip = fmt.Sprintf("board-%d", i/2), i%2
		if i%2 == 0 {
			board := chips[i]
			board.Units, board.Chips = 1, 2
			whole.Shares = append(whole.Shares, board)
		}
	}
	w.inventories[name] = append(w.inventories[name], whole)
}

// share is a device in the inventory.
func (w *world) share(node string, device int) *accel.Share {
	return &w.inventories[node][0].Shares[device]
}

// newPod is a pod without a node.
func (w *world) newPod(name, res string, units int64) corev1.Pod {
	amount := corev1.ResourceList{corev1.ResourceName(res): *resource.NewQuantity(units, resource.DecimalSI)}
	namespace := "team-" + string(rune('a'+len(name)%3))
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + "/" + name),
			CreationTimestamp: metav1.NewTime(time.Now().Add(-14 * time.Minute)), Annotations: map[string]string{}},
		Spec: corev1.PodSpec{SchedulerName: corev1.DefaultSchedulerName, Containers: []corev1.Container{{Name: "main",
			Resources: corev1.ResourceRequirements{Limits: amount, Requests: amount}}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
}

// running puts a pod on devices of a node, in equal parts, and lets it use a part of what it holds.
func (w *world) running(name, res string, units int64, used float64, node string, devices ...int) corev1.Pod {
	pod := w.newPod(name, res, units)
	pod.Spec.NodeName, pod.Status.Phase = node, corev1.PodRunning
	grant := accel.Grant{Resource: accel.Resource(res), Node: node, Units: accel.Units(units), At: pod.CreationTimestamp.Time,
		Confirmed: true}
	for i, at := range devices {
		s := w.share(node, at)
		if i == 0 {
			grant.Device, grant.Index, grant.DeviceUnits = s.ID, s.Index, s.Units
		} else {
			grant.More = append(grant.More, accel.GrantedDevice{Device: s.ID, Index: s.Index, DeviceUnits: s.Units})
		}
		allocated := uint64(units) * gib / uint64(len(devices))
		bytes := uint64(used * float64(allocated))
		u := &w.usage[node].Devices[at]
		u.UsedBytes += bytes
		u.Containers = append(u.Containers, wire.ContainerUsage{Namespace: pod.Namespace, Pod: name, Container: "main",
			Resource: accel.Resource(res), AllocatedBytes: &allocated, UsedBytes: &bytes})
	}
	text, err := w.signer.EncodeGrant(string(pod.UID), grant)
	if err != nil {
		w.t.Fatal(err)
	}
	pod.Annotations[wire.GrantAnnotation] = text
	return pod
}

func (w *world) run(name, res string, units int64, used float64, node string, devices ...int) {
	w.pods = append(w.pods, w.running(name, res, units, used, node, devices...))
}

func (w *world) wait(name, res string, units int64, message string) *corev1.Pod {
	pod := w.newPod(name, res, units)
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
		Reason: corev1.PodReasonUnschedulable, Message: message}}
	w.pods = append(w.pods, pod)
	return &w.pods[len(w.pods)-1]
}

func (w *world) deny(verbs ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, v := range verbs {
		w.denied[v] = true
	}
}

// client is what the page's server reads by.
func (w *world) client() *fake.Clientset {
	for i := range w.nodes {
		if w.inventories[w.nodes[i].Name] == nil {
			continue
		}
		text, err := wire.EncodeInventory(w.inventories[w.nodes[i].Name])
		if err != nil {
			w.t.Fatal(err)
		}
		w.nodes[i].Annotations[wire.InventoryAnnotation] = text
	}
	c := fake.NewClientset()
	c.PrependReactor("list", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, &corev1.NodeList{Items: w.nodes}, nil
	})
	c.PrependReactor("list", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		return true, &corev1.PodList{Items: slices.DeleteFunc(slices.Clone(w.pods), func(p corev1.Pod) bool {
			return a.GetNamespace() != "" && a.GetNamespace() != p.Namespace
		})}, nil
	})
	c.PrependWatchReactor("pods", func(clienttesting.Action) (bool, watch.Interface, error) { return true, w.watches, nil })
	c.PrependReactor("create", "selfsubjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		review := &authorizationv1.SelfSubjectAccessReview{}
		if create, ok := a.(clienttesting.CreateAction); ok {
			if sent, ok := create.GetObject().(*authorizationv1.SelfSubjectAccessReview); ok {
				review = sent.DeepCopy()
			}
		}
		of := review.Spec.ResourceAttributes
		w.mu.Lock()
		defer w.mu.Unlock()
		review.Status.Allowed = !w.denied[of.Verb+" "+of.Resource] && !w.denied[of.Verb+" "+of.Resource+" in "+of.Namespace]
		return true, review, nil
	})
	return c
}

// serve serves the page of the cluster until the test ends, and waits until all has been read.
func (w *world) serve(usage bool) *ui.Server {
	w.t.Helper()
	o := ui.Options{Client: w.client(), Cluster: "production", Namespace: "team-a", Now: time.Now}
	if usage {
		o.Usage = func(context.Context, []string) (nodeusage.Reports, error) {
			var all nodeusage.Reports
			for _, u := range w.usage {
				all.Reports = append(all.Reports, *u)
			}
			return all, nil
		}
	}
	began := time.Now()
	feed, err := ui.NewFeed(w.t.Context(), o)
	if err != nil {
		w.t.Fatal(err)
	}
	s, err := ui.Listen(w.t.Context(), 0, feed, io.Discard)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !w.openedAgain {
			w.t.Error(err)
		}
	})
	for feed.Status().Reading != "" {
		time.Sleep(10 * time.Millisecond)
	}
	w.t.Logf("the lists were read within %v", time.Since(began).Round(time.Millisecond))
	return s
}
