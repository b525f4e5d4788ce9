package devicemanager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	_ "unsafe" // for go:linkname

	cadvisorapi "github.com/google/cadvisor/lib/model"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/allocation"
	apisgrpc "k8s.io/kubernetes/pkg/kubelet/apis/grpc"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// newManagerImpl is what kubelet's NewManagerImpl calls with the path
// /var/lib/kubelet/device-plugins/kubelet.sock, which only root can use.
//
//go:linkname newManagerImpl k8s.io/kubernetes/pkg/kubelet/cm/devicemanager.newManagerImpl
func newManagerImpl(logger klog.Logger, socketPath string, topology []cadvisorapi.Node, store topologymanager.Store) (*devicemanager.ManagerImpl, error)

// containerRuntime is the container runtime: what it knows outlives kubelet.
type containerRuntime struct {
	mu         sync.Mutex
	containers map[types.UID]map[string]*container // by pod and name
}

// container is one that was started at least once.
type container struct {
	running bool
	env     map[string]string // at its last start
}

func (c *container) id(uid types.UID, name string) string { return string(uid) + "-" + name }

// kubelet is the parts of kubelet that decide about devices, and a small play
// of the rest. Pods are admitted one at a time, as kubelet does. stop and start
// make a restart: the checkpoint and the containers survive.
type kubelet struct {
	t       *testing.T
	log     klog.Logger
	dir     string
	api     *apiServer
	runtime containerRuntime
	// policy is that of the topology manager, with two NUMA nodes.
	policy string
	// refuseLists makes the pod-resources API answer as it does when its rate
	// limit is used up.
	refuseLists atomic.Bool
	// lists is how many questions a second the pod-resources API answers.
	lists rate.Limit

	// loop is kubelet's syncLoop: held while a pod is added or removed, so
	// that a restart waits for what is going on.
	loop sync.Mutex

	mu sync.Mutex // guards what follows
	// known is kubelet's pod manager, done which of them have ended or were
	// rejected.
	known map[types.UID]*corev1.Pod
	done  map[types.UID]bool

	// One life of the process.
	ready     atomic.Bool // the sources are
	devices   *devicemanager.ManagerImpl
	topology  topologymanager.Manager
	admission allocation.Manager
	server    *grpc.Server
	serving   sync.WaitGroup
	cancel    context.CancelFunc
	ctx       context.Context //nolint:containedctx // the life of the process that this struct plays
}

func newKubelet(t *testing.T, log klog.Logger, dir string, api *apiServer) *kubelet {
	t.Helper()
	k := &kubelet{t: t, log: log, dir: dir, api: api, policy: topologymanager.PolicyNone, lists: podresources.DefaultQPS}
	k.runtime.containers = map[types.UID]map[string]*container{}
	for _, sub := range []string{"device-plugins", "pod-resources"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return k
}

// AddSource and AllReady implement kubelet's config.SourcesReady.
func (k *kubelet) AddSource(string) {}
func (k *kubelet) AllReady() bool   { return k.ready.Load() }

// boot starts the process up to the point at which its sockets answer; it
// knows no pods yet.
func (k *kubelet) boot() {
	k.t.Helper()
	k.ctx, k.cancel = context.WithCancel(klog.NewContext(context.Background(), k.log))
	k.mu.Lock()
	k.known, k.done = map[types.UID]*corev1.Pod{}, map[types.UID]bool{}
	k.mu.Unlock()
	k.ready.Store(false)

	numa := []cadvisorapi.Node{
		{Id: 0, Cores: []cadvisorapi.Core{{Id: 0}}, Distances: []uint64{10, 20}},
		{Id: 1, Cores: []cadvisorapi.Core{{Id: 1}}, Distances: []uint64{20, 10}},
	}
	var err error
	if k.topology, err = topologymanager.NewManager(k.log, numa, k.policy, topologymanager.ContainerTopologyScope, nil); err != nil {
		k.t.Fatal(err)
	}
	k.devices, err = newManagerImpl(k.log, filepath.Join(k.dir, "device-plugins", "kubelet.sock"), numa, k.topology)
	if err != nil {
		k.t.Fatal(err)
	}
	k.topology.AddHintProvider(k.log, k.devices)
	k.admission = allocation.NewInMemoryManager(k.log, nil, func(context.Context, *corev1.Pod) {}, k.GetActivePods,
		func(uid types.UID) (*corev1.Pod, bool) {
			k.mu.Lock()
			defer k.mu.Unlock()
			pod, ok := k.known[uid]
			return pod, ok
		}, k, record.NewFakeRecorder(1))
	k.admission.AddPodAdmitHandlers(lifecycle.PodAdmitHandlers{
		k.topology,
		lifecycle.NewPredicateAdmitHandler(k.node, lifecycle.NewAdmissionFailureHandlerStub(), k.devices.UpdatePluginResources),
	})
	ids, running := k.containerMap()
	if err := k.devices.Start(k.log, k.GetActivePods, k, ids, running); err != nil {
		k.t.Fatal(err)
	}
	k.servePodResources()
}

// start is boot, then all pods that the API server shows and that have not
// ended, in the order of their creation, as kubelet's first update brings them.
func (k *kubelet) start() {
	k.t.Helper()
	k.boot()
	k.readd()
}

func (k *kubelet) readd() {
	for _, pod := range k.api.all() {
		if !ended(pod) {
			_ = k.add(pod) // a refusal stands in the pod's status
		}
	}
	k.ready.Store(true)
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// stop ends the process. Calls that wait for a plugin fail; nothing of what
// they lead to is told to the API server.
func (k *kubelet) stop() {
	k.t.Helper()
	k.cancel()
	if err := k.devices.Stop(k.log); err != nil {
		k.t.Error(err)
	}
	k.server.Stop()
	k.serving.Wait()
	k.loop.Lock() // an admission that was going on has ended
	k.ready.Store(false)
	k.loop.Unlock()
}

// containerMap is what a starting kubelet asks the container runtime.
func (k *kubelet) containerMap() (containermap.ContainerMap, sets.Set[string]) {
	ids, running := containermap.NewContainerMap(), sets.New[string]()
	k.runtime.mu.Lock()
	defer k.runtime.mu.Unlock()
	for uid, containers := range k.runtime.containers {
		for name, c := range containers {
			ids.Add(string(uid), name, c.id(uid, name))
			if c.running {
				running.Insert(c.id(uid, name))
			}
		}
	}
	return ids, running
}

func (k *kubelet) servePodResources() {
	k.t.Helper()
	path := filepath.Join(k.dir, "pod-resources", "kubelet.sock")
	if err := os.RemoveAll(path); err != nil {
		k.t.Fatal(err)
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		k.t.Fatal(err)
	}
	// As ListenAndServePodResources in pkg/kubelet/server, which never stops.
	k.server = grpc.NewServer(grpc.ChainUnaryInterceptor(
		apisgrpc.LimiterUnaryServerInterceptor(rate.NewLimiter(k.lists, podresources.DefaultBurstTokens)),
		func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			if k.refuseLists.Load() {
				return nil, apisgrpc.ErrorLimitExceeded
			}
			return handler(klog.NewContext(ctx, k.log), req)
		},
	))
	podresourcesv1.RegisterPodResourcesListerServer(k.server, podresources.NewV1PodResourcesServer(k.ctx, podresources.PodResourcesProviders{
		Pods: k, Devices: provider{k.devices}, Cpus: nothing{}, Memory: nothing{}, DynamicResources: nothing{},
	}))
	server := k.server
	k.serving.Go(func() { _ = server.Serve(listener) })
}

// errStopped is the outcome of an admission that the end of kubelet cut off.
var errStopped = errors.New("kubelet stopped meanwhile")

// add gives kubelet a pod, as HandlePodAdditions does: it is known, then it is
// admitted, or it fails with the text that users see.
func (k *kubelet) add(pod *corev1.Pod) error {
	k.loop.Lock()
	defer k.loop.Unlock()
	ctx := k.ctx
	if ctx.Err() != nil {
		return errStopped
	}
	k.mu.Lock()
	k.known[pod.UID] = pod
	k.mu.Unlock()
	ok, reason, message := k.admission.AddPod(ctx, k.GetActivePods(), pod)
	if ctx.Err() != nil {
		return errStopped
	}
	if ok {
		return nil
	}
	k.mu.Lock()
	k.done[pod.UID] = true
	k.mu.Unlock()
	k.kill(pod)
	k.api.update(pod.UID, func(p *corev1.Pod) {
		p.Status.Phase, p.Status.Reason, p.Status.Message = corev1.PodFailed, reason, message
	})
	return fmt.Errorf("%s: %s", reason, message)
}

// run starts the containers of an admitted pod: plain init containers run to
// their end, the others keep running.
func (k *kubelet) run(pod *corev1.Pod) error {
	var statuses, inits []corev1.ContainerStatus
	for i, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		options, err := k.devices.GetDeviceRunContainerOptions(k.ctx, pod, &c)
		if err != nil {
			return fmt.Errorf("start container %s of %s: %w", c.Name, pod.Name, err)
		}
		one := &container{running: i >= len(pod.Spec.InitContainers) || isSidecar(&c), env: map[string]string{}}
		if options != nil {
			for _, e := range options.Envs {
				one.env[e.Name] = e.Value
			}
		}
		k.runtime.mu.Lock()
		if k.runtime.containers[pod.UID] == nil {
			k.runtime.containers[pod.UID] = map[string]*container{}
		}
		k.runtime.containers[pod.UID][c.Name] = one
		k.runtime.mu.Unlock()
		status := corev1.ContainerStatus{Name: c.Name, ContainerID: "containerd://" + one.id(pod.UID, c.Name)}
		if i < len(pod.Spec.InitContainers) {
			inits = append(inits, status)
		} else {
			statuses = append(statuses, status)
		}
	}
	k.api.update(pod.UID, func(p *corev1.Pod) {
		p.Status.Phase, p.Status.InitContainerStatuses, p.Status.ContainerStatuses = corev1.PodRunning, inits, statuses
	})
	return nil
}

func isSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// env returns the environment that a started container got from its devices.
func (k *kubelet) env(uid types.UID, name string) map[string]string {
	k.runtime.mu.Lock()
	defer k.runtime.mu.Unlock()
	if c := k.runtime.containers[uid][name]; c != nil {
		return c.env
	}
	return nil
}

// kill ends the containers of a pod.
func (k *kubelet) kill(pod *corev1.Pod) {
	k.runtime.mu.Lock()
	defer k.runtime.mu.Unlock()
	delete(k.runtime.containers, pod.UID)
}

// finish lets the pod complete; its object stays. Kubelet's pod workers do this
// beside the admission of other pods.
func (k *kubelet) finish(pod *corev1.Pod) {
	k.kill(pod)
	k.mu.Lock()
	k.done[pod.UID] = true
	k.mu.Unlock()
	k.api.update(pod.UID, func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })
}

// remove deletes the pod everywhere.
func (k *kubelet) remove(pod *corev1.Pod) {
	k.loop.Lock()
	defer k.loop.Unlock()
	k.kill(pod)
	k.mu.Lock()
	delete(k.known, pod.UID)
	delete(k.done, pod.UID)
	k.mu.Unlock()
	k.api.remove(pod.UID)
}

// GetActivePods implements podresources.PodsProvider: kubelet lists the pods
// that it was given and that have not ended.
func (k *kubelet) GetActivePods() []*corev1.Pod {
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
func (k *kubelet) GetPods() []*corev1.Pod { return k.GetActivePods() }

// GetPodByName implements podresources.PodsProvider.
func (k *kubelet) GetPodByName(namespace, name string) (*corev1.Pod, bool) {
	for _, pod := range k.GetActivePods() {
		if pod.Namespace == namespace && pod.Name == name {
			return pod, true
		}
	}
	return nil, false
}

// capacity is what the node's status shows of the resource: all units and the
// healthy ones.
func (k *kubelet) capacity() (capacity, allocatable int64) {
	c, a, _ := k.devices.GetCapacity(k.log)
	whole, healthy := c[corev1.ResourceName(gcuMemory)], a[corev1.ResourceName(gcuMemory)]
	return whole.Value(), healthy.Value()
}

// node is the node's object as the predicates of kubelet's admission read it.
func (k *kubelet) node(context.Context, bool) (*corev1.Node, error) {
	_, allocatable, _ := k.devices.GetCapacity(k.log)
	for name, n := range map[corev1.ResourceName]string{"pods": "10000", "cpu": "1000", "memory": "1Ti"} {
		allocatable[name] = resource.MustParse(n)
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: thisNode},
		Status:     corev1.NodeStatus{Capacity: allocatable, Allocatable: allocatable},
	}, nil
}

// ids returns the units that kubelet keeps for a container, those of plain init
// containers too.
func (k *kubelet) ids(uid types.UID, name string) []string {
	var out []string
	for id := range k.devices.GetDevices(string(uid), name)[string(gcuMemory)] {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}

// provider gives kubelet's pod-resources server what the device manager knows,
// as kubelet's container manager does.
type provider struct{ *devicemanager.ManagerImpl }

func (p provider) GetDevices(uid, name string) []*podresourcesv1.ContainerDevices {
	return flat(p.ManagerImpl.GetDevices(uid, name))
}

func (p provider) GetAllocatableDevices(log klog.Logger) []*podresourcesv1.ContainerDevices {
	return flat(p.ManagerImpl.GetAllocatableDevices(log))
}

// flat has one entry per id, as in containerDevicesFromResourceDeviceInstances.
func flat(all devicemanager.ResourceDeviceInstances) []*podresourcesv1.ContainerDevices {
	var out []*podresourcesv1.ContainerDevices
	for name, devices := range all {
		for id := range devices {
			out = append(out, &podresourcesv1.ContainerDevices{ResourceName: name, DeviceIds: []string{id}})
		}
	}
	return out
}

// nothing is a kubelet that manages no CPUs, memory or claims.
type nothing struct{}

func (nothing) GetCPUs(*corev1.Pod, *corev1.Container) []int64 { return nil }
func (nothing) GetPodCPUs(string) []int64                      { return nil }
func (nothing) GetAllocatableCPUs() []int64                    { return nil }
func (nothing) GetMemory(klog.Logger, *corev1.Pod, *corev1.Container) []*podresourcesv1.ContainerMemory {
	return nil
}
func (nothing) GetPodMemory(klog.Logger, string) []*podresourcesv1.ContainerMemory { return nil }
func (nothing) GetAllocatableMemory(klog.Logger) []*podresourcesv1.ContainerMemory { return nil }
func (nothing) GetDynamicResources(klog.Logger, *corev1.Pod, *corev1.Container) []*podresourcesv1.DynamicResource {
	return nil
}
