package program

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/scheduler"
	config "k8s.io/kubernetes/pkg/scheduler/apis/config"
	configscheme "k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/profile"

	divvy "github.com/divvy-gpu/divvy/internal/app/scheduler"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	divvyevents "github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
	"github.com/divvy-gpu/divvy/internal/scheduler/plugin"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

func TestMain(m *testing.M) {
	if os.Getenv("DIVVY_TEST_LOG") == "" {
		klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	}
	os.Exit(m.Run())
}

const memory = decisiontest.Memory

// patience bounds what is waited for; a test that passes takes far less.
const patience = 90 * time.Second

// world is the whole of kube-scheduler with the plugin, over an API server of the test's making.
type world struct {
	t      *testing.T
	server *kubetest.Server
	ledger *ledger.Ledger
	keys   *kube.Keyring
	sched  *scheduler.Scheduler
	stop   context.CancelFunc

	mu       sync.Mutex // guards what follows
	leads    func(context.Context)
	refuses  func(clienttesting.Action) error
	narrowed int
	told     []string
	binds    map[string]int // by UID
}

// node is one with devices of these sizes.
func node(name string, devices ...accel.Units) (*v1.Node, accel.Inventory) {
	var sum accel.Units
	for _, d := range devices {
		sum += d
	}
	inventory := decisiontest.Cards(memory, name+"-", devices...)
	inventory.Several = true
	value, err := wire.EncodeInventory([]accel.Inventory{inventory})
	if err != nil {
		panic(err)
	}
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{wire.InventoryAnnotation: value},
			Labels: map[string]string{v1.LabelHostname: name}},
		Status: v1.NodeStatus{Allocatable: v1.ResourceList{
			v1.ResourceCPU: resource.MustParse("64"), v1.ResourceMemory: resource.MustParse("64Gi"),
			v1.ResourcePods:         resource.MustParse("110"),
			v1.ResourceName(memory): *resource.NewQuantity(int64(sum), resource.DecimalSI),
		}},
	}, inventory
}

// pod asks for so many units.
func pod(name string, units int64, change ...func(*v1.Pod)) *v1.Pod {
	p := decisiontest.NewPod(name)
	if units > 0 {
		p = decisiontest.NewPod(name, units)
	}
	p.Spec.SchedulerName = "divvy-scheduler"
	p.Status.Phase = v1.PodPending
	for _, f := range change {
		f(p)
	}
	return p
}

func priority(value int32) func(*v1.Pod) { return func(p *v1.Pod) { p.Spec.Priority = &value } }

// newWorld starts a scheduler of nodes with devices of these sizes.
func newWorld(t *testing.T, nodes map[string][]accel.Units) *world {
	t.Helper()
	w := &world{t: t, keys: decisiontest.NewKeys(t), binds: map[string]int{}}
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	var objects, metas []runtime.Object
	for name, devices := range nodes {
		n, _ := node(name, devices...)
		objects = append(objects, n)
		metas = append(metas, &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
			ObjectMeta: *n.ObjectMeta.DeepCopy()})
	}
	var err error
	if w.server, err = kubetest.New(objects...); err != nil {
		t.Fatal(err)
	}
	w.server.OnWrite(func(verb string, obj runtime.Object) {
		if p, ok := obj.(*v1.Pod); ok && verb == "bind" {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.binds[string(p.UID)]++
		}
	})
	client := w.server.Client(func(action clienttesting.Action) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.refuses != nil {
			return w.refuses(action)
		}
		return nil
	})
	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	t.Cleanup(group.Wait)
	t.Cleanup(stop)
	w.stop = stop

	w.ledger = ledger.New(ledger.Options{})
	resources := []accel.Resource{memory}
	books := cluster.NewState(cluster.Config{Ledger: w.ledger, Grants: w.keys, Resources: resources})
	binder := cluster.NewBinder(client, resources, false)
	activator := plugin.NewActivator()
	decider, err := decision.New(decision.Config{
		Ledger: w.ledger, Cluster: books, Binder: binder, Waker: activator, Signer: w.keys.Signer, Resources: resources,
		Ready: func() error { return nil },
		Tell: func(ref accel.PodRef, kind divvyevents.Kind, message string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.told = append(w.told, fmt.Sprintf("%s: %s: %s", ref.Name, kind.Reason, message))
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	core, err := plugin.New(plugin.Config{Inside: decision.NewInside(decider, w.ledger), Activator: activator, Resources: resources,
		Policy: place.Binpack, ChooseNode: true, Narrowed: func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.narrowed++
		}, Lead: func(ctx context.Context) (context.Context, context.CancelFunc, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.leads != nil {
				w.leads(ctx)
			}
			return ctx, func() {}, nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	metadata := metadatafake.NewSimpleMetadataClient(scheme, metas...)
	group.Go(func() { books.Run(ctx, kube.Clients{Kubernetes: client, Metadata: metadata}) })
	group.Go(func() {
		cluster.Sweeper{Ledger: w.ledger, State: books, Binder: binder, BindLimit: decision.BindTimeout}.Run(ctx)
	})
	group.Go(func() { decider.Run(ctx) })
	group.Go(func() { activator.Run(ctx) })

	factory := informers.NewSharedInformerFactory(client, 0)
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})
	w.sched, err = scheduler.New(ctx, client, factory, nil, profile.NewRecorderFactory(broadcaster),
		scheduler.WithProfiles(profiles(t, divvy.Example).Profiles...),
		scheduler.WithFrameworkOutOfTreeRegistry(frameworkruntime.Registry{plugin.Name: core.Factory}))
	if err != nil {
		t.Fatal(err)
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	if err := w.sched.WaitForHandlersSync(ctx); err != nil {
		t.Fatal(err)
	}
	w.until("the books are synced", books.Synced)
	group.Go(func() { w.sched.Run(ctx) })
	return w
}

// profiles decodes a configuration, with the defaults.
func profiles(t *testing.T, text string) *config.KubeSchedulerConfiguration {
	t.Helper()
	object, _, err := configscheme.Codecs.UniversalDecoder().Decode([]byte(text), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	c, ok := object.(*config.KubeSchedulerConfiguration)
	if !ok {
		t.Fatalf("a %T", object)
	}
	return c
}

func (w *world) until(what string, done func() bool) {
	w.t.Helper()
	for end := time.Now().Add(patience); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("in vain: %s", what)
		}
	}
}

func (w *world) create(pods ...*v1.Pod) {
	w.t.Helper()
	for _, p := range pods {
		if _, err := w.server.Client(nil).CoreV1().Pods(p.Namespace).Create(w.t.Context(), p, metav1.CreateOptions{}); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *world) delete(name string) {
	w.t.Helper()
	if err := w.server.Client(nil).CoreV1().Pods("team").Delete(w.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// get returns nil for a pod that is gone.
func (w *world) get(name string) *v1.Pod {
	p, err := w.server.Client(nil).CoreV1().Pods("team").Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		return nil
	}
	return p
}

// placed waits for a pod and returns its devices.
func (w *world) placed(name string) string {
	w.t.Helper()
	var p *v1.Pod
	w.until("pod "+name+" has a node", func() bool { p = w.get(name); return p != nil && p.Spec.NodeName != "" })
	value := p.Annotations[wire.GrantAnnotation]
	if value == "" {
		return p.Spec.NodeName
	}
	grant, err := w.keys.DecodeGrant(string(p.UID), value)
	if err != nil || grant.Node != p.Spec.NodeName {
		w.t.Fatalf("pod %s is on %s with the grant %+v, %v", name, p.Spec.NodeName, grant, err)
	}
	devices := []string{string(grant.Device)}
	for _, more := range grant.More {
		devices = append(devices, string(more.Device))
	}
	return strings.Join(devices, "+")
}

// waits waits for a pod to be called unschedulable, and returns why.
func (w *world) waits(name string) string {
	w.t.Helper()
	why := ""
	w.until("pod "+name+" is unschedulable", func() bool {
		p := w.get(name)
		if p == nil {
			return false
		}
		at := slices.IndexFunc(p.Status.Conditions, func(c v1.PodCondition) bool {
			return c.Type == v1.PodScheduled && c.Status == v1.ConditionFalse && c.Reason == v1.PodReasonUnschedulable
		})
		if at >= 0 {
			why = p.Status.Conditions[at].Message
		}
		return at >= 0
	})
	return why
}

// boundTwice are pods that were.
func (w *world) boundTwice() (out []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for uid, n := range w.binds {
		if n > 1 {
			out = append(out, uid)
		}
	}
	return out
}
