// Package kubelet is the parts of the real kubelet that decide about devices,
// in one process, without root and without a cluster: device manager with its
// checkpoint and sockets, topology manager, allocation manager and pod-resources
// server. What feeds pods to admission and the container runtime are played.
package kubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	_ "unsafe" // for go:linkname

	cadvisorapi "github.com/google/cadvisor/lib/model"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/allocation"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// newManagerImpl is what kubelet's NewManagerImpl calls with the path
// /var/lib/kubelet/device-plugins/kubelet.sock, which only root can use.
//
//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(logger klog.Logger, socketPath string, topology []cadvisorapi.Node,
	store topologymanager.Store) (*devicemanager.ManagerImpl, error)

// Server is the API server as a kubelet sees it: the pods that are bound to its
// node. It is safe for concurrent use.
type Server interface {
	// Pods returns the pods in the order of their creation.
	Pods() []*corev1.Pod
	// Update changes the pod with that uid, if it is there; change gets a copy.
	Update(uid types.UID, change func(*corev1.Pod))
	// Remove deletes the pod with that uid, if it is there.
	Remove(uid types.UID)
}

// Options are what a Kubelet needs.
type Options struct {
	Log klog.Logger
	// Dir is kubelet's root directory. Its path must be short: that of a socket
	// below it has 107 characters at most.
	Dir string
	// Node is the name of the node.
	Node   string
	Server Server
	// Policy is that of the topology manager, which sees two NUMA nodes; none
	// when empty.
	Policy string
	// Lists is how many questions a second the pod-resources API answers;
	// kubelet's own number when zero.
	Lists rate.Limit
}

// Kubelet is the kubelet of one node. Pods are admitted one at a time, as
// kubelet does. Stop and Start make a restart: the checkpoint and the containers
// survive.
type Kubelet struct {
	// Options may be changed while it is stopped.
	Options
	// RefuseLists makes the pod-resources API answer as it does when its rate
	// limit is used up.
	RefuseLists atomic.Bool

	runtime runtime

	// loop is kubelet's syncLoop: held while a pod is added or removed, so
	// that a restart waits for what is going on.
	loop sync.Mutex

	mu sync.Mutex // guards what follows
	// known is kubelet's pod manager, done which of them have ended or were
	// rejected.
	known map[types.UID]*corev1.Pod
	done  map[types.UID]bool

	life life
}

// life is one life of the process.
type life struct {
	ready     atomic.Bool // the sources are
	devices   *devicemanager.ManagerImpl
	topology  topologymanager.Manager
	admission allocation.Manager
	server    *grpc.Server
	serving   sync.WaitGroup
	cancel    context.CancelFunc
	ctx       context.Context //nolint:containedctx // the life of the process that this struct plays
}

// New returns a kubelet that is not started.
func New(o Options) (*Kubelet, error) {
	o.Policy = cmp.Or(o.Policy, topologymanager.PolicyNone)
	o.Lists = cmp.Or(o.Lists, podresources.DefaultQPS)
	k := &Kubelet{Options: o, runtime: runtime{containers: map[types.UID]map[string]*Container{}}}
	for _, sub := range []string{"device-plugins", "pod-resources"} {
		if err := os.MkdirAll(filepath.Join(o.Dir, sub), 0o755); err != nil {
			return nil, fmt.Errorf("kubelet's folders: %w", err)
		}
	}
	return k, nil
}

// AddSource and AllReady implement kubelet's config.SourcesReady.
func (k *Kubelet) AddSource(string) {}

// AllReady reports whether the API server's pods are known.
func (k *Kubelet) AllReady() bool { return k.life.ready.Load() }

// Boot starts the process up to the point at which its sockets answer; it
// knows no pods yet.
func (k *Kubelet) Boot() error {
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), k.Log))
	k.life.ctx, k.life.cancel = ctx, cancel //nolint:fatcontext // each life has its own
	k.mu.Lock()
	k.known, k.done = map[types.UID]*corev1.Pod{}, map[types.UID]bool{}
	k.mu.Unlock()
	k.life.ready.Store(false)

	numa := []cadvisorapi.Node{
		{Id: 0, Cores: []cadvisorapi.Core{{Id: 0}}, Distances: []uint64{10, 20}},
		{Id: 1, Cores: []cadvisorapi.Core{{Id: 1}}, Distances: []uint64{20, 10}},
	}
	var err error
	if k.life.topology, err = topologymanager.NewManager(k.Log, numa, k.Policy, topologymanager.ContainerTopologyScope, nil); err != nil {
		return fmt.Errorf("topology manager: %w", err)
	}
	k.life.devices, err = newManagerImpl(k.Log, filepath.Join(k.Dir, "device-plugins", "kubelet.sock"), numa, k.life.topology)
	if err != nil {
		return fmt.Errorf("device manager: %w", err)
	}
	k.life.topology.AddHintProvider(k.Log, k.life.devices)
	k.life.admission = allocation.NewInMemoryManager(k.Log, nil, func(context.Context, *corev1.Pod) {}, k.GetActivePods,
		func(uid types.UID) (*corev1.Pod, bool) {
			k.mu.Lock()
			defer k.mu.Unlock()
			pod, ok := k.known[uid]
			return pod, ok
		}, k, record.NewFakeRecorder(1))
	k.life.admission.AddPodAdmitHandlers(lifecycle.PodAdmitHandlers{
		k.life.topology,
		lifecycle.NewPredicateAdmitHandler(k.node, lifecycle.NewAdmissionFailureHandlerStub(), k.life.devices.UpdatePluginResources),
	})
	ids, running := k.runtime.containerMap()
	if err := k.life.devices.Start(k.Log, k.GetActivePods, k, ids, running); err != nil {
		return fmt.Errorf("device manager: %w", err)
	}
	return k.servePodResources()
}

// Start is Boot, then Readd.
func (k *Kubelet) Start() error {
	if err := k.Boot(); err != nil {
		return err
	}
	k.Readd()
	return nil
}

// Readd admits all pods that the API server shows and that have not ended, in
// the order of their creation, as kubelet's first update brings them.
func (k *Kubelet) Readd() {
	for _, pod := range k.Server.Pods() {
		if pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed {
			_ = k.Add(pod) // a refusal stands in the pod's status
		}
	}
	k.life.ready.Store(true)
}

// Started reports whether the process was ever started.
func (k *Kubelet) Started() bool { return k.life.ctx != nil }

// Stop ends the process. Calls that wait for a plugin fail; nothing of what
// they lead to is told to the API server.
func (k *Kubelet) Stop() error {
	k.life.cancel()
	err := k.life.devices.Stop(k.Log)
	k.life.server.Stop()
	k.life.serving.Wait()
	k.loop.Lock() // an admission that was going on has ended
	k.life.ready.Store(false)
	k.loop.Unlock()
	return err
}

// ErrStopped is the outcome of an admission that the end of kubelet cut off.
var ErrStopped = errors.New("kubelet stopped meanwhile")

// Add gives kubelet a pod, as HandlePodAdditions does: it is known, then it is
// admitted, or it fails with the text that users see.
func (k *Kubelet) Add(pod *corev1.Pod) error {
	k.loop.Lock()
	defer k.loop.Unlock()
	ctx := k.life.ctx
	if ctx.Err() != nil {
		return ErrStopped
	}
	k.know(pod)
	ok, reason, message := k.life.admission.AddPod(ctx, k.GetActivePods(), pod)
	if ctx.Err() != nil {
		return ErrStopped
	}
	if ok {
		return nil
	}
	k.mu.Lock()
	k.done[pod.UID] = true
	k.mu.Unlock()
	k.Kill(pod)
	k.Server.Update(pod.UID, func(p *corev1.Pod) {
		p.Status.Phase, p.Status.Reason, p.Status.Message = corev1.PodFailed, reason, message
	})
	return fmt.Errorf("%s: %s", reason, message)
}

func (k *Kubelet) know(pod *corev1.Pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.known[pod.UID] = pod
}

// AddPart gives the first containers of a pod their devices, as if kubelet were
// still admitting it.
func (k *Kubelet) AddPart(pod *corev1.Pod, containers int) error {
	k.loop.Lock()
	defer k.loop.Unlock()
	k.know(pod)
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)[:containers] {
		if err := k.life.devices.Allocate(k.life.ctx, pod, &c, lifecycle.AddOperation); err != nil {
			return err
		}
	}
	return nil
}

// Finish lets the pod complete; its object stays. Kubelet's pod workers do this
// beside the admission of other pods.
func (k *Kubelet) Finish(pod *corev1.Pod) {
	k.Kill(pod)
	k.mu.Lock()
	k.done[pod.UID] = true
	k.mu.Unlock()
	k.Server.Update(pod.UID, func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })
}

// Remove deletes the pod everywhere.
func (k *Kubelet) Remove(pod *corev1.Pod) {
	k.loop.Lock()
	defer k.loop.Unlock()
	k.Kill(pod)
	k.mu.Lock()
	delete(k.known, pod.UID)
	delete(k.done, pod.UID)
	k.mu.Unlock()
	k.Server.Remove(pod.UID)
}

// GetActivePods implements podresources.PodsProvider: kubelet lists the pods
// that it was given and that have not ended.
func (k *Kubelet) GetActivePods() []*corev1.Pod {
	k.mu.Lock()
	defer k.mu.Unlock()
	var out []*corev1.Pod
	for uid, pod := range k.known {
		if !k.done[uid] {
			out = append(out, pod)
		}
	}
	slices.SortFunc(out, func(a, b *corev1.Pod) int { return cmp.Compare(a.UID, b.UID) })
	return out
}

// GetPods implements podresources.PodsProvider.
func (k *Kubelet) GetPods() []*corev1.Pod { return k.GetActivePods() }

// GetPodByName implements podresources.PodsProvider.
func (k *Kubelet) GetPodByName(namespace, name string) (*corev1.Pod, bool) {
	for _, pod := range k.GetActivePods() {
		if pod.Namespace == namespace && pod.Name == name {
			return pod, true
		}
	}
	return nil, false
}

// Capacity is what the node's status shows of a resource: all ids and the
// healthy ones.
func (k *Kubelet) Capacity(name corev1.ResourceName) (capacity, allocatable int64) {
	c, a, _ := k.life.devices.GetCapacity(k.Log)
	whole, healthy := c[name], a[name]
	return whole.Value(), healthy.Value()
}

// node is the node's object as the predicates of kubelet's admission read it.
func (k *Kubelet) node(context.Context, bool) (*corev1.Node, error) {
	_, allocatable, _ := k.life.devices.GetCapacity(k.Log)
	for name, n := range map[corev1.ResourceName]string{"pods": "10000", "cpu": "1000", "memory": "1Ti"} {
		allocatable[name] = resource.MustParse(n)
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: k.Node},
		Status:     corev1.NodeStatus{Capacity: allocatable, Allocatable: allocatable},
	}, nil
}

// IDs returns what kubelet keeps of a resource for a container, that of plain
// init containers too, in order.
func (k *Kubelet) IDs(uid types.UID, container string, name corev1.ResourceName) []string {
	var out []string
	for id := range k.life.devices.GetDevices(string(uid), container)[string(name)] {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}

// Devices is kubelet's device manager, one per life of the process.
func (k *Kubelet) Devices() *devicemanager.ManagerImpl { return k.life.devices }
