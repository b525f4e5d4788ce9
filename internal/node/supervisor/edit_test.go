package supervisor

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// wholeGCU is the resource that the test edits.
const wholeGCU = "enflame.com/gcu"

// kubelet is the sockets of kubelet in a folder. One pod holds devices of it.
type kubelet struct {
	podresourcesv1.UnimplementedPodResourcesListerServer
	pluginapi.UnimplementedRegistrationServer
	t   *testing.T
	dir string

	mu            sync.Mutex // guards what follows
	registrations int
	// health is what the plugin said last of its ids.
	health map[string]string
	// held are the ids of the pod's container; nil when the pod is gone.
	held []string
}

func startKubelet(t *testing.T, dir string, held ...string) *kubelet {
	t.Helper()
	k := &kubelet{t: t, dir: filepath.Join(dir, "device-plugins"), held: held}
	serve := func(folder string, register func(*grpc.Server)) {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("unix", filepath.Join(folder, "kubelet.sock"))
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer()
		register(server)
		served := make(chan error, 1)
		go func() { served <- server.Serve(l) }()
		t.Cleanup(func() {
			server.Stop()
			<-served //nolint:errcheck // it was stopped
		})
	}
	serve(k.dir, func(s *grpc.Server) { pluginapi.RegisterRegistrationServer(s, k) })
	serve(filepath.Join(dir, "pod-resources"), func(s *grpc.Server) { podresourcesv1.RegisterPodResourcesListerServer(s, k) })
	return k
}

// Register follows the plugin's list, as kubelet does.
func (k *kubelet) Register(_ context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	if r.GetResourceName() != wholeGCU {
		k.t.Errorf("%s was registered", r.GetResourceName())
	}
	go k.watch(r.GetEndpoint())
	return &pluginapi.Empty{}, nil
}

func (k *kubelet) watch(endpoint string) {
	conn, err := grpc.NewClient("unix://"+filepath.Join(k.dir, endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return
	}
	defer conn.Close() //nolint:errcheck // read
	stream, err := pluginapi.NewDevicePluginClient(conn).ListAndWatch(k.t.Context(), &pluginapi.Empty{})
	if err != nil {
		return
	}
	k.mu.Lock()
	k.registrations++
	k.mu.Unlock()
	for {
		list, err := stream.Recv()
		if err != nil {
			return
		}
		k.mu.Lock()
		k.health = map[string]string{}
		for _, d := range list.GetDevices() {
			k.health[d.GetID()] = d.GetHealth()
		}
		for _, id := range k.held {
			if k.health[id] != pluginapi.Healthy {
				k.t.Errorf("a container holds %s, and kubelet was told %v", id, k.health)
			}
		}
		k.mu.Unlock()
	}
}

// List is the pod-resources API.
func (k *kubelet) List(context.Context, *podresourcesv1.ListPodResourcesRequest) (*podresourcesv1.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held == nil {
		return &podresourcesv1.ListPodResourcesResponse{}, nil
	}
	return &podresourcesv1.ListPodResourcesResponse{PodResources: []*podresourcesv1.PodResources{{
		Namespace: "default", Name: "p",
		Containers: []*podresourcesv1.ContainerResources{{Name: "c", Devices: []*podresourcesv1.ContainerDevices{{ResourceName: wholeGCU,
			DeviceIds: k.held}}}},
	}}}, nil
}

// healthy returns the ids that new containers may get, and those that are held.
func (k *kubelet) healthy() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var out []string
	for id, h := range k.health {
		if h == pluginapi.Healthy {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// Defect 20 of the IX device plugin: on a node without devices it ended, and was
// started and ended again for ever.
func TestANodeWithoutADriverIsWaitedFor(t *testing.T) {
	d := prepare(t, "healthInterval: 100ms\nlibraries: {enflame: /nowhere/libefml.so}\nresources: [{name: enflame.com/gcu, vendor: "+
		"enflame, mode: exclusive}]\n")
	d.client = fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}})
	d.s = newSupervisor(Options{Node: "node-1", Clients: kube.Clients{Kubernetes: d.client}, Log: d.s.o.Log})
	startKubelet(t, d.dir)
	d.start()
	eventually(t, "it says what is missing", func() bool { return strings.Contains(d.get("/readyz"), "/nowhere/libefml.so") })
	if got := d.get("/healthz"); got != "ok\n" {
		t.Errorf("/healthz: %q", got)
	}
	select {
	case err := <-d.ended:
		t.Fatalf("it ended: %v", err)
	default:
	}
}

// TestAnEditReleasesNoDevice from quarantine, whatever it says of fatal causes.
func TestAnEditReleasesNoDevice(t *testing.T) {
	const resources = "healthInterval: 100ms\nresources: [{name: enflame.com/gcu, vendor: enflame, mode: exclusive}]\n"
	d := prepare(t, resources+"vendors: {enflame: {health: {recoverAfter: 0s, neverRecover: [library]}}}\n")
	d.client = fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}})
	withAgents := newSupervisor(Options{Node: "node-1", Clients: kube.Clients{Kubernetes: d.client}, Log: d.s.o.Log})
	var sick atomic.Bool
	withAgents.open = func(config.NodeConfig) (vendors.Set, error) {
		return vendors.Set{"enflame": &fakeBackend{sick: &sick}}, nil
	}
	d.s = withAgents
	if err := os.WriteFile(filepath.Join(d.dir, "key"), []byte("0123456789abcdef0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	k := startKubelet(t, d.dir)
	d.start()
	offered := func(what string, want ...string) {
		t.Helper()
		eventually(t, what, func() bool { return slices.Equal(k.healthy(), want) })
	}
	offered("both cards", "GCU-0", "GCU-1")
	sick.Store(true)
	offered("the card that is well", "GCU-1")
	sick.Store(false)
	for i, edit := range []string{
		resources + "vendors: {enflame: {health: {recoverAfter: 0s}}}\n",
		resources + "vendors: {enflame: {health: {recoverAfter: 0s, neverRecover: []}}}\n",
	} {
		k.mu.Lock()
		registered := k.registrations
		k.mu.Unlock()
		d.write(edit)
		eventually(t, "the edit takes effect", func() bool {
			k.mu.Lock()
			defer k.mu.Unlock()
			return k.registrations > registered
		})
		offered("the card that is well", "GCU-1")
		eventually(t, "devices are looked for", func() bool {
			return strings.Contains(d.get("/metrics"), `divvy_node_device_unhealthy{cause="library"`)
		})
		if got := k.healthy(); !slices.Equal(got, []string{"GCU-1"}) {
			t.Errorf("after edit %d, %v are offered", i, got)
		}
	}
}

// Neither Iluvatar's nor NVIDIA's device plugin takes a new configuration
// without a restart, and a restart forgets what containers hold.
func TestAnEditReachesARunningAgentAndNotWhatContainersHold(t *testing.T) {
	exclusive := "healthInterval: 100ms\nresources: [{name: enflame.com/gcu, vendor: enflame, mode: exclusive}]\n"
	sliced := "healthInterval: 100ms\nresources: [{name: enflame.com/gcu, vendor: enflame, mode: timeSlicing, replicas: 2}]\n"
	d := prepare(t, exclusive)
	d.client = fake.NewClientset(
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}},
		&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "u"},
			Spec: corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{{
				Name: "c", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{wholeGCU: resource.MustParse("1")}},
			}}},
			Status: corev1.PodStatus{Phase: corev1.PodRunning},
		})
	withAgents := newSupervisor(Options{Node: "node-1", Clients: kube.Clients{Kubernetes: d.client}, Log: d.s.o.Log})
	withAgents.open = d.s.open
	d.s = withAgents
	if err := os.WriteFile(filepath.Join(d.dir, "key"), []byte("0123456789abcdef0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	k := startKubelet(t, d.dir, "GCU-0")
	d.start()
	offered := func(what string, want ...string) {
		t.Helper()
		eventually(t, what, func() bool { return slices.Equal(k.healthy(), want) })
	}
	offered("whole cards", "GCU-0", "GCU-1")
	eventually(t, "ready", func() bool { return d.get("/readyz") == "ok\n" })

	d.write(sliced)
	// The card that is held whole is not cut into slices.
	offered("slices of the free card, and the card that is held", "GCU-0", "GCU-1::0", "GCU-1::1")
	d.event("ConfigurationReloaded")

	eventually(t, "the agent has looked around", func() bool {
		text := d.get("/metrics")
		return strings.Contains(text, `divvy_node_resource_offered{resource="enflame.com/gcu"} 1`) &&
			strings.Contains(text, "divvy_node_ready 1")
	})
	text := d.get("/metrics")
	hasAll(t, text, "divvy_node_ready 1", "divvy_node_config_stale 0", `divvy_node_library_available{vendor="enflame"} 1`,
		`divvy_node_resource_offered{resource="enflame.com/gcu"} 1`,
		`divvy_node_refusals_total{reason="noRoom",resource="enflame.com/gcu"} 0`,
		`divvy_node_device_healthy{device="GCU-1",index="1",resource="enflame.com/gcu"} 1`)
	for _, difference := range metrics.Differences(metrics.Node, text) {
		t.Error(difference)
	}
	if problems, err := testutil.GatherAndLint(d.s.gatherer()); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}

	d.write(exclusive + "colour: blue\n")
	d.event("ConfigurationRejected")
	hasAll(t, d.get("/metrics"), "divvy_node_config_stale 1")
	offered("nothing else after a bad edit", "GCU-0", "GCU-1::0", "GCU-1::1")

	k.mu.Lock()
	k.held = nil
	k.mu.Unlock()
	if err := d.client.CoreV1().Pods("default").Delete(t.Context(), "p", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	offered("slices of both cards once the pod is gone", "GCU-0::0", "GCU-0::1", "GCU-1::0", "GCU-1::1")

	d.write(exclusive)
	offered("whole cards again", "GCU-0", "GCU-1")
	eventually(t, "ready", func() bool { return d.get("/readyz") == "ok\n" })
}
