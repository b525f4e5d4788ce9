package doors

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	config "k8s.io/kubernetes/pkg/scheduler/apis/config"
	configscheme "k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"
	"k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/metrics"

	divvy "github.com/divvy-gpu/divvy/internal/app/scheduler"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	placement "github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
	"github.com/divvy-gpu/divvy/internal/scheduler/extender"
	"github.com/divvy-gpu/divvy/internal/scheduler/plugin"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
)

const memory = decisiontest.Memory

// now is when all happens.
var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestMain(m *testing.M) {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	metrics.Register()
	os.Exit(m.Run())
}

// books are a ledger and a cluster of the test's making, and what decides over them.
type books struct {
	ledger  *ledger.Ledger
	cluster *decisiontest.Cluster
	keys    *kube.Keyring
	names   []string
	// extender answers for one door, and has what decides and reports for both.
	extender *extender.Extender
	told     []string
	// woken are the names of pods that were had tried again.
	woken []string
}

// Wake is the extender's way: in a cluster it patches the pod.
func (b *books) Wake(_ context.Context, pod accel.PodRef) error {
	b.woken = append(b.woken, pod.Name)
	return nil
}

// Activate is the plugin's.
func (b *books) Activate(_ klog.Logger, pods map[string]*v1.Pod) {
	for _, pod := range pods {
		b.woken = append(b.woken, pod.Name)
	}
}

// cluster is what both doors are asked about: the same, of which each has its own books.
type cluster struct {
	nodes   []*v1.Node
	offers  map[string]accel.Inventory
	pods    []*v1.Pod
	held    map[string][]accel.DeviceID // by pod
	budgets []*policy.PodDisruptionBudget
	keys    *kube.Keyring
	// waits is a pod that kube-scheduler has in its queue, nil for none.
	waits *v1.Pod
	// clock is that of now where it is nil.
	clock func() time.Time
}

// node adds one with devices of these sizes.
func (c *cluster) node(name string, change func(*accel.Inventory), devices ...accel.Units) {
	inventory := decisiontest.Cards(memory, name+"-", devices...)
	inventory.Several = true
	if change != nil {
		change(&inventory)
	}
	var sum accel.Units
	for _, s := range inventory.Shares {
		sum += s.Units
	}
	if c.offers == nil {
		c.offers, c.held = map[string]accel.Inventory{}, map[string][]accel.DeviceID{}
	}
	c.offers[name] = inventory
	c.nodes = append(c.nodes, &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelHostname: name}},
		Status: v1.NodeStatus{Allocatable: v1.ResourceList{
			v1.ResourceCPU: resource.MustParse("8"), v1.ResourceMemory: resource.MustParse("64Gi"),
			v1.ResourcePods:         resource.MustParse("110"),
			v1.ResourceName(memory): *resource.NewQuantity(int64(sum), resource.DecimalSI),
		}},
	})
}

// runs adds a pod that runs on devices of a node, by their positions.
func (c *cluster) runs(pod *v1.Pod, node string, devices ...int) {
	pod.Spec.NodeName = node
	c.pods = append(c.pods, pod)
	for _, d := range devices {
		c.held[string(pod.UID)] = append(c.held[string(pod.UID)], c.offers[node].Shares[d].Device.ID)
	}
}

func (c *cluster) names() (out []string) {
	for _, n := range c.nodes {
		out = append(out, n.Name)
	}
	return out
}

// books returns new ones. A nil waker is their own.
func (c *cluster) books(tb testing.TB, chooseNode bool, waker decision.Waker) *books {
	tb.Helper()
	if c.keys == nil {
		c.keys = decisiontest.NewKeys(tb)
	}
	b := &books{cluster: decisiontest.NewCluster(), keys: c.keys}
	clock := c.clock
	if clock == nil {
		clock = func() time.Time { return now }
	}
	if waker == nil {
		waker = b
	}
	b.ledger = ledger.New(ledger.Options{Now: clock})
	b.names = c.names()
	for _, name := range b.names { // records name nodes in this order
		if inventory, offers := c.offers[name]; offers {
			b.ledger.SetNode(name, []accel.Inventory{inventory})
		}
	}
	for _, p := range c.pods {
		requests, err := kube.RequestsOf(p, []accel.Resource{memory})
		if err != nil {
			tb.Fatal(err)
		}
		switch {
		case len(requests) == 0:
			continue
		case p.Spec.NodeName == "":
			b.ledger.Nominate(string(p.UID), p.Status.NominatedNodeName, requests[0])
			continue
		}
		h := ledger.Holding{
			Pod: accel.PodRef{UID: string(p.UID), Namespace: p.Namespace, Name: p.Name}, Node: p.Spec.NodeName, Resource: memory,
			Units: requests[0].Peak(), Confirmed: true, Priority: requests[0].Priority, Ending: p.DeletionTimestamp != nil,
			Created: p.CreationTimestamp.Time,
		}
		h.SetDevices(c.held[string(p.UID)])
		b.ledger.Observe(h)
	}
	recorder := &decision.Recorder{Ledger: b.ledger, Log: history.NewLog(now), Now: clock}
	var err error
	b.extender, err = extender.New(extender.Config{Config: decision.Config{
		Ledger: recorder, Cluster: b.cluster, Binder: b.cluster, Signer: b.keys.Signer, Ready: func() error { return nil },
		Resources: []accel.Resource{memory}, Now: clock, ChooseNode: chooseNode, Recorder: recorder,
		Waker: waker,
		Tell: func(ref accel.PodRef, kind events.Kind, message string) {
			b.told = append(b.told, ref.Name+": "+kind.Reason+": "+message)
		},
	}})
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// asked is the extender, over HTTP as its Service is reached.
type asked struct {
	*books
	handler http.Handler
}

func (c *cluster) extender(tb testing.TB, chooseNode bool) *asked {
	tb.Helper()
	b := c.books(tb, chooseNode, nil)
	return &asked{b, b.extender.Handler()}
}

// ask sends a question and reads the answer.
func (a *asked) ask(tb testing.TB, path string, question, answer any) {
	tb.Helper()
	body, err := json.Marshal(question)
	if err != nil {
		tb.Fatal(err)
	}
	r := httptest.NewRequestWithContext(tb.Context(), http.MethodPost, extender.Prefix+path, bytes.NewReader(body))
	r.RemoteAddr = "127.0.0.1:1"
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	a.handler.ServeHTTP(w, r)
	if err := json.Unmarshal(w.Body.Bytes(), answer); w.Code != http.StatusOK || err != nil {
		tb.Fatalf("%s: status %d, %s, %v", path, w.Code, w.Body, err)
	}
}

// compiled is the plugin in kube-scheduler's framework.
type compiled struct {
	*books
	framework.Framework
	snapshot *cache.Snapshot
	divvy    *plugin.Plugin
	last     fwk.CycleState // of the last attempt
}

// quiet has no nominations but those of the test.
type quiet struct {
	fwk.PodNominator
	nominated []fwk.PodInfo
}

func (q quiet) NominatedPodsForNode(node string) (out []fwk.PodInfo) {
	for _, p := range q.nominated {
		if p.GetPod().Status.NominatedNodeName == node {
			out = append(out, p)
		}
	}
	return out
}

// client has no objects: informers get theirs from the test.
var client = sync.OnceValue(func() *fake.Clientset { return fake.NewClientset() })

// plugin has the plugin, or where it counts only what kube-scheduler has without it.
func (c *cluster) plugin(tb testing.TB, chooseNode, counts bool) *compiled {
	tb.Helper()
	running := slices.DeleteFunc(slices.Clone(c.pods), func(p *v1.Pod) bool { return p.Spec.NodeName == "" })
	activator := plugin.NewActivator()
	p := &compiled{books: c.books(tb, false, activator), snapshot: cache.NewSnapshot(running, c.nodes)}
	core, err := plugin.New(plugin.Config{Inside: decision.NewInside(p.extender.Decider(), p.ledger), Activator: activator,
		Policy: placement.Binpack, Resources: []accel.Resource{memory}, ChooseNode: chooseNode})
	if err != nil {
		tb.Fatal(err)
	}
	registry := plugins.NewInTreeRegistry()
	if err := registry.Register(plugin.Name, func(ctx context.Context, args runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
		made, err := core.Factory(ctx, args, handle)
		p.divvy, _ = made.(*plugin.Plugin)
		return made, err
	}); err != nil {
		tb.Fatal(err)
	}
	named := func(names ...string) (set config.PluginSet) {
		for _, name := range names {
			if name != plugin.Name || !counts {
				set.Enabled = append(set.Enabled, config.Plugin{Name: name, Weight: 1})
			}
		}
		return set
	}
	profile := profileOf(tb)
	profile.Plugins = &config.Plugins{
		QueueSort: named("PrioritySort"), PreFilter: named(plugin.Name, "NodeResourcesFit"),
		// Ours comes first, so that its reason is seen where the sum is too small as well.
		Filter:     named("NodeUnschedulable", plugin.Name, "NodeResourcesFit"),
		PostFilter: named(plugin.Name, "DefaultPreemption"), PreScore: named(plugin.Name), Score: named(plugin.Name),
		Reserve: named(plugin.Name), Bind: named(plugin.Name, "DefaultBinder"), PostBind: named(plugin.Name),
	}
	factory := informers.NewSharedInformerFactory(client(), 0)
	for _, b := range c.budgets {
		if err := factory.Policy().V1().PodDisruptionBudgets().Informer().GetIndexer().Add(b); err != nil {
			tb.Fatal(err)
		}
	}
	pods := c.pods
	if c.waits != nil {
		pods = append(slices.Clone(pods), c.waits)
	}
	for _, pod := range pods {
		if err := factory.Core().V1().Pods().Informer().GetIndexer().Add(pod); err != nil {
			tb.Fatal(err)
		}
	}
	ctx, stop := context.WithCancel(tb.Context())
	tb.Cleanup(stop)
	p.Framework, err = frameworkruntime.NewFramework(ctx, registry, profile, frameworkruntime.WithClientSet(client()),
		frameworkruntime.WithInformerFactory(factory), frameworkruntime.WithSnapshotSharedLister(p.snapshot),
		frameworkruntime.WithMutableSnapshotLister(p.snapshot), frameworkruntime.WithPodNominator(quiet{}),
		frameworkruntime.WithPodActivator(p.books), frameworkruntime.WithWaitingPods(frameworkruntime.NewWaitingPodsMap()),
		frameworkruntime.WithPodsInPreBind(frameworkruntime.NewPodsInPreBindMap()))
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

// profileOf is the only one of the configuration that is documented.
func profileOf(tb testing.TB) *config.KubeSchedulerProfile {
	tb.Helper()
	object, _, err := configscheme.Codecs.UniversalDecoder().Decode([]byte(divvy.Example), nil, nil)
	if err != nil {
		tb.Fatal(err)
	}
	all, ok := object.(*config.KubeSchedulerConfiguration)
	if !ok || len(all.Profiles) != 1 {
		tb.Fatalf("a %T", object)
	}
	return &all.Profiles[0]
}

// attempt is what kube-scheduler does until it has a node: the nodes on which the pod fits, and why it fits
// on none of the others.
func (p *compiled) attempt(tb testing.TB, pod *v1.Pod) (state fwk.CycleState, fits []string, why map[string]*fwk.Status) {
	tb.Helper()
	state, why = framework.NewCycleState(), map[string]*fwk.Status{}
	nodes, err := p.snapshot.NodeInfos().List()
	if err != nil {
		tb.Fatal(err)
	}
	only, status, _ := p.RunPreFilterPlugins(tb.Context(), state, pod)
	for _, n := range nodes {
		name := n.Node().Name
		switch {
		case !status.IsSuccess():
			why[name] = status
		case !only.AllNodes() && !only.NodeNames.Has(name):
			why[name] = fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "another node is named")
		default:
			if s := p.RunFilterPluginsWithNominatedPods(tb.Context(), state, pod, n); s.IsSuccess() {
				fits = append(fits, name)
			} else {
				why[name] = s
			}
		}
	}
	slices.Sort(fits)
	return state, fits, why
}

func newPod(name string, units ...int64) *v1.Pod { return decisiontest.NewPod(name, units...) }
