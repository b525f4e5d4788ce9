package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
	"github.com/divvy-gpu/divvy/internal/scheduler/extender"
	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

// The operations of the ledger's model test, played on two replicas that race: what
// is Reserve there is a request to bind, what is undo a bind that fails, Observe and
// Forget are what the API server shows, late and to each replica for itself, time
// passes, and nodes change. Besides, replicas die, are cut off, are slow, and lose
// answers. Time is the bubble's, so an hour takes seconds.

const racingMemory accel.Resource = "enflame.com/gcu-memory"

var (
	errRacingAway = errors.New("the API server is away")
	racingNodes   = []string{"n0", "n1", "n2"}
	racingModels  = []string{"S60", "S90"}
)

// racingSteps is how many steps each of two seeds plays; -args -racing-steps=20000 takes a
// minute.
var racingSteps = flag.Int("racing-steps", 4000, "operations of TestRacingReplicas, for each seed")

const racingPods = 30

// racing is an API server with two replicas, and what a naive recount of all binds
// that were written says.
type racing struct {
	t        *testing.T
	server   *kubetest.Server
	metadata *metadatafake.FakeMetadataClient
	keys     *kube.Keyring
	options  Options
	replicas [2]*racer
	nodes    map[string][]accel.Share // what nodes have; of one that is away nil
	sizes    map[string]accel.Units   // of all devices there ever were, by node and device
	names    int
	working  sync.WaitGroup

	chance sync.Mutex // guards rng
	rng    *rand.Rand

	mu    sync.Mutex             // guards what follows
	bound map[string]accel.Grant // by pod UID, as the API server has it
	count map[string]int         // how often what happened
	wrong []string
}

func (w *racing) pick(n int) int {
	w.chance.Lock()
	defer w.chance.Unlock()
	return w.rng.IntN(n)
}

func (w *racing) did(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count[what]++
}

func (w *racing) fault(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wrong = append(w.wrong, fmt.Sprintf(format, args...))
}

// written recounts a device whenever something is written on it.
func (w *racing) written(verb string, obj runtime.Object) {
	p, ok := obj.(*v1.Pod)
	if !ok {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	uid := string(p.UID)
	switch verb {
	case "delete":
		delete(w.bound, uid)
	case "bind":
		w.count["bound"]++
		grant, err := w.keys.DecodeGrant(uid, p.Annotations[wire.GrantAnnotation])
		if err != nil || grant.Node != p.Spec.NodeName {
			w.wrong = append(w.wrong, fmt.Sprintf("pod %s is bound to %s with the grant %+v, %v", p.Name, p.Spec.NodeName, grant, err))
			return
		}
		if _, twice := w.bound[uid]; twice {
			w.wrong = append(w.wrong, fmt.Sprintf("pod %s was bound twice", p.Name))
		}
		w.bound[uid] = grant
		used := w.used(grant.Node)
		for _, device := range devicesOf(&grant) {
			if size := w.sizes[grant.Node+"/"+string(device)]; used[device] > size {
				w.wrong = append(w.wrong, fmt.Sprintf("with pod %s, device %s of %s holds %d of %d units", p.Name, device, grant.Node,
					used[device], size))
			}
		}
		if len(grant.More) > 0 {
			w.count["bound on several"]++
		}
	}
}

func devicesOf(g *accel.Grant) []accel.DeviceID {
	out := []accel.DeviceID{g.Device}
	for _, more := range g.More {
		out = append(out, more.Device)
	}
	return out
}

// used sums what the bound pods hold of a node's devices. w.mu is held.
func (w *racing) used(node string) map[accel.DeviceID]accel.Units {
	used := map[accel.DeviceID]accel.Units{}
	for _, g := range w.bound {
		if g.Node != node {
			continue
		}
		devices := devicesOf(&g)
		for _, d := range devices {
			used[d] += g.Units / accel.Units(len(devices))
		}
	}
	return used
}

// racer is a replica: the parts of a program that hang together, without sockets.
type racer struct {
	w       *racing
	n       int
	program *program
	handler http.Handler
	stop    context.CancelFunc
	done    sync.WaitGroup
	// back is when the driver starts it anew once it is down.
	back time.Time

	mu sync.Mutex // guards what follows
	// alive is false once it was killed or told to end, ended is true when it has; away refuses what it asks of the API server;
	// late is how long its binds take to arrive, lag how far its watch is behind;
	// loses has the answer of each second bind lost.
	alive, ended, away, loses bool
	late, lag                 time.Duration
	binds                     int
	answering                 int // requests
}

func (r *racer) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

func (r *racer) lives() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.alive
}

func (r *racer) before(clienttesting.Action) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.away || !r.alive {
		return errRacingAway
	}
	return nil
}

// start makes a replica that knows nothing, as after a restart.
func (w *racing) start(n int) *racer {
	w.t.Helper()
	r := &racer{w: w, n: n, alive: true}
	client := w.server.Client(r.before)
	plain := client.WatchReactionChain[0]
	client.PrependWatchReactor("pods", func(action clienttesting.Action) (bool, watch.Interface, error) {
		if err := r.before(action); err != nil {
			return true, nil, err
		}
		handled, from, err := plain.React(action)
		if err != nil {
			return handled, nil, err
		}
		return handled, r.lagging(from), nil
	})
	placed := w.options.Placement.parse(&mistakes{})
	p := &program{
		options: w.options, placement: placed, replica: replica{fmt.Sprint("replica-", n), fmt.Sprint("replica-", n, ":1")},
		clients: kube.Clients{Kubernetes: client, Metadata: w.metadata}, keys: w.keys,
	}
	p.ledger = ledger.New(ledger.Options{Policy: placed.policy, ReservationTTL: w.options.ReservationTTL,
		MaxBindDelay: w.options.MaxBindDelay})
	p.binder = cluster.NewBinder(client, placed.resources, false)
	p.books = cluster.NewState(cluster.Config{Ledger: p.ledger, Grants: p.keys, Resources: placed.resources,
		NodeLabels: placed.labels})
	var err error
	if p.election, err = p.newElection(); err != nil {
		w.t.Fatal(err)
	}
	config := p.withElection(extender.Config{Config: decision.Config{
		Ledger: p.ledger, Cluster: p.books, Binder: unsteady{p.binder, r, cluster.NewBinder(w.server.Client(nil), placed.resources, false)},
		Signer: p.keys.Signer, Ready: p.ready, Resources: placed.resources,
	}})
	config.Forward = w
	e, err := extender.New(config)
	if err != nil {
		w.t.Fatal(err)
	}
	r.program, r.handler = p, e.Handler()
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	r.done.Go(func() { p.books.Run(ctx, p.clients) })
	r.done.Go(func() { p.sweeper().Run(ctx) })
	r.done.Go(func() {
		if err := p.election.Run(ctx); err != nil {
			w.t.Error(err)
		}
	})
	for !p.books.Synced() {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(time.Millisecond) // the stand-in for the API server tells nobody what was deleted between list and watch
	return r
}

// lagging shows what a watch shows as much later as the replica's lag says.
func (r *racer) lagging(from watch.Interface) watch.Interface {
	l := &lagging{out: make(chan watch.Event), stop: make(chan struct{})}
	go func() {
		defer close(l.out)
		type late struct {
			event watch.Event
			at    time.Time
		}
		var queue []late
		for {
			var out chan watch.Event
			var first watch.Event
			var wait <-chan time.Time
			if len(queue) > 0 {
				if left := time.Until(queue[0].at); left > 0 {
					wait = time.After(left)
				} else {
					out, first = l.out, queue[0].event
				}
			}
			select {
			case event, ok := <-from.ResultChan():
				if !ok {
					return
				}
				r.mu.Lock()
				queue = append(queue, late{event, time.Now().Add(r.lag)})
				r.mu.Unlock()
			case <-wait:
			case out <- first:
				queue = queue[1:]
			case <-l.stop:
				from.Stop()
				for range from.ResultChan() { // what it still sends must not wait for ever
				}
				return
			}
		}
	}()
	return l
}

type lagging struct {
	out  chan watch.Event
	stop chan struct{}
	once sync.Once
}

func (l *lagging) ResultChan() <-chan watch.Event { return l.out }
func (l *lagging) Stop()                          { l.once.Do(func() { close(l.stop) }) }

// unsteady writes binds late, or not at all, or loses the answer. As the API server
// does, it writes none after the deadline that came with it.
type unsteady struct {
	*cluster.Binder
	r *racer
	// sent is for what was sent before the replica died or was cut off.
	sent *cluster.Binder
}

func (u unsteady) Bind(ctx context.Context, ref accel.PodRef, node string, annotations map[string]string) error {
	if u.r.before(nil) != nil {
		return u.Binder.Bind(ctx, ref, node, annotations)
	}
	var late time.Duration
	var loses bool
	u.r.set(func() {
		u.r.binds++
		late, loses = u.r.late, u.r.loses && u.r.binds%2 == 0
	})
	if late > 0 {
		select {
		case <-time.After(late):
		case <-ctx.Done():
			u.r.w.did("timed out")
			return fmt.Errorf("%w: %w", cluster.ErrOutcomeUnknown, context.Cause(ctx))
		}
	}
	if u.r.w.replica(1 - u.r.n).program.election.Leading() {
		u.r.w.fault("replica %d writes a bind while the other leads", u.r.n)
	}
	err := u.sent.Bind(ctx, ref, node, annotations)
	if err == nil && loses {
		u.r.w.did("answer lost")
		return cluster.ErrOutcomeUnknown
	}
	return err
}

// RoundTrip hands a request to the replica of that address.
func (w *racing) RoundTrip(request *http.Request) (*http.Response, error) {
	n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(request.URL.Host, "replica-"), ":1"))
	if err != nil {
		return nil, err
	}
	w.did("forwarded")
	status, body, err := w.replica(n).serve(request)
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {"application/json"}},
		Body: readCloser{bytes.NewReader(body)}}, nil
}

type readCloser struct{ *bytes.Reader }

func (readCloser) Close() error { return nil }

func (w *racing) replica(n int) *racer {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.replicas[n]
}

// serve answers a request; the answer of one that dies meanwhile is lost.
func (r *racer) serve(request *http.Request) (status int, body []byte, err error) {
	if !r.lives() {
		return 0, nil, errors.New("connection refused")
	}
	r.set(func() { r.answering++ })
	defer r.set(func() { r.answering-- })
	request.RemoteAddr = "127.0.0.1:1"
	answer := httptest.NewRecorder()
	r.handler.ServeHTTP(answer, request)
	if !r.lives() {
		return 0, nil, errors.New("connection reset")
	}
	return answer.Code, answer.Body.Bytes(), nil
}

// ask asks as kube-scheduler does. An error is one of the connection.
func (r *racer) ask(verb string, args, result any) error {
	body, err := json.Marshal(args)
	if err != nil {
		return err
	}
	request := httptest.NewRequest(http.MethodPost, extender.Prefix+"/"+verb, bytes.NewReader(body))
	status, answer, err := r.serve(request)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return fmt.Errorf("status %d: %s", status, answer)
	}
	return json.Unmarshal(answer, result)
}

// fits asks on which of all nodes the pod fits.
func (r *racer) fits(pod *v1.Pod) ([]string, error) {
	var result extenderv1.ExtenderFilterResult
	if err := r.ask("filter", extenderv1.ExtenderArgs{Pod: pod, NodeNames: &racingNodes}, &result); err != nil {
		return nil, err
	}
	if result.Error != "" {
		return nil, errors.New(result.Error)
	}
	return *result.NodeNames, nil
}

func (r *racer) bind(pod *v1.Pod, node string) error {
	var result extenderv1.ExtenderBindingResult
	args := extenderv1.ExtenderBindingArgs{PodName: pod.Name, PodNamespace: pod.Namespace, PodUID: pod.UID, Node: node}
	if err := r.ask("bind", args, &result); err != nil {
		return err
	}
	if result.Error != "" {
		return errors.New(result.Error)
	}
	return nil
}

// schedule asks either replica for nodes and has the pod bound: mostly by one of
// them, now and then by both at once, on one node or on two. Now and then it ends in
// between.
func (w *racing) schedule(pod *v1.Pod) {
	nodes, err := w.replica(w.pick(2)).fits(pod)
	if err != nil {
		w.did("filter failed")
		w.gaveUp(pod, err.Error())
		return
	}
	if len(nodes) == 0 {
		w.did("fits nowhere")
		w.gaveUp(pod, "it fits nowhere")
		return
	}
	switch w.pick(12) {
	case 0:
		w.did("scheduler ended")
		return
	case 1: // it waits for a volume
		w.did("bound late")
		time.Sleep(time.Duration(w.pick(20_000)) * time.Millisecond)
	}
	var racers sync.WaitGroup
	for range 1 + w.pick(4)/3 {
		r, node := w.replica(w.pick(2)), nodes[w.pick(len(nodes))]
		racers.Go(func() {
			if err := r.bind(pod, node); err != nil {
				w.did("bind failed")
				if strings.Contains(err.Error(), "no device has enough free units") {
					w.did("another was faster")
				}
				w.gaveUp(pod, err.Error())
			}
		})
	}
	racers.Wait()
}

// gaveUp says on the pod why an attempt has failed, which may be what was said before.
func (w *racing) gaveUp(pod *v1.Pod, why string) {
	pods := w.server.Client(nil).CoreV1().Pods("team")
	now, err := pods.Get(w.t.Context(), pod.Name, metav1.GetOptions{})
	if err == nil && now.UID == pod.UID && now.Spec.NodeName == "" {
		now.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse,
			Reason: "SchedulerError", Message: why}}
		_, err = pods.UpdateStatus(w.t.Context(), now, metav1.UpdateOptions{})
	}
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		w.fault("the condition of pod %s: %v", pod.Name, err)
	}
}

// create makes a pod that asks for up to three devices, now and then for some only.
func (w *racing) create() {
	w.names++
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: fmt.Sprint("p", w.names), Annotations: map[string]string{}}}
	pod.UID = types.UID("uid-" + pod.Name)
	devices := []int64{1, 1, 1, 1, 1, 2, 2, 3}[w.pick(8)]
	if devices > 1 {
		pod.Annotations[wire.CountAnnotation] = strconv.FormatInt(devices, 10)
	}
	switch w.pick(10) {
	case 0:
		pod.Annotations[wire.UseModelsAnnotation] = racingModels[w.pick(2)]
	case 1:
		pod.Annotations[wire.AvoidDevicesAnnotation] = "a"
	case 2:
		pod.Annotations[wire.PolicyAnnotation] = []string{"binpack", "spread"}[w.pick(2)]
	}
	list := v1.ResourceList{v1.ResourceName(racingMemory): *resource.NewQuantity(devices*int64(1+w.pick(9)), resource.DecimalSI)}
	pod.Spec.Containers = []v1.Container{{Name: "c", Resources: v1.ResourceRequirements{Limits: list, Requests: list}}}
	if _, err := w.server.Client(nil).CoreV1().Pods("team").Create(w.t.Context(), pod, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// pods are those of users, in the order of their names.
func (w *racing) pods() []v1.Pod {
	w.t.Helper()
	list, err := w.server.Client(nil).CoreV1().Pods("team").List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	slices.SortFunc(list.Items, func(a, b v1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return list.Items
}

// publish writes what a node has; nil deletes it.
func (w *racing) publish(node string, shares []accel.Share) {
	w.t.Helper()
	tracker, nodes := w.metadata.Tracker(), v1.SchemeGroupVersion.WithResource("nodes")
	before := w.nodes[node]
	w.nodes[node] = shares
	if shares == nil {
		if before != nil {
			if err := tracker.Delete(nodes, "", node); err != nil {
				w.t.Fatal(err)
			}
		}
		return
	}
	value, err := wire.EncodeInventory([]accel.Inventory{{Resource: racingMemory, Unit: "1", Several: true, Shares: shares}})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, s := range shares {
		w.sizes[node+"/"+string(s.ID)] = s.Units
	}
	object := &metav1.PartialObjectMetadata{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: node, Labels: map[string]string{"enflame.com/gcushare": "true"},
			Annotations: map[string]string{wire.InventoryAnnotation: value}},
	}
	if before == nil {
		err = tracker.Create(nodes, object, "")
	} else {
		err = tracker.Update(nodes, object, "")
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// whole are the devices of a node when nothing is wrong with it.
func whole(node string) []accel.Share {
	var out []accel.Share
	for i, id := range []accel.DeviceID{"a", "b", "c"}[:2+int(node[1]-'0')%2] {
		out = append(out, accel.Share{Units: accel.Units(12 + 4*(i%2)), Device: accel.Device{Index: i, ID: id, Model: racingModels[i%2],
			NUMANode: accel.NoNUMA}})
	}
	return out
}

// change changes one thing about a node.
func (w *racing) change() {
	node := racingNodes[w.pick(len(racingNodes))]
	shares := slices.Clone(w.nodes[node])
	switch op := w.pick(8); {
	case len(shares) == 0 || op < 2:
		shares = whole(node)
	case op < 5:
		shares[w.pick(len(shares))].Health.Unhealthy = true
	case op < 7:
		at := w.pick(len(shares))
		shares = append(shares[:at:at], shares[at+1:]...)
		if len(shares) == 0 {
			shares = nil
		}
	default:
		shares = nil
	}
	w.publish(node, shares)
	w.did("node changed")
}

// step does one thing at random, and waits a little.
func (w *racing) step() {
	pods := w.pods()
	r := w.replicas[w.pick(2)]
	for _, r := range w.replicas {
		w.startAnew(r)
	}
	switch op := w.pick(100); {
	case op < 18 && len(pods) < racingPods:
		w.create()
	case op < 62 && len(pods) > 0:
		pod := pods[w.pick(len(pods))]
		if pod.Spec.NodeName == "" || w.pick(20) == 0 { // kube-scheduler may have missed that it is bound
			w.working.Go(func() { w.schedule(&pod) })
		}
	case op < 80 && len(pods) > 0:
		name := pods[w.pick(len(pods))].Name
		if err := w.server.Client(nil).CoreV1().Pods("team").Delete(w.t.Context(), name, metav1.DeleteOptions{}); err != nil {
			w.t.Fatal(err)
		}
		w.did("deleted")
	case op < 83:
		w.change()
	case op < 87: // a bind may take 9 s
		r.set(func() { r.late = time.Duration(w.pick(8900)) * time.Millisecond })
	case op < 92: // the next leader leads after 3 to 6 s
		r.set(func() { r.lag = time.Duration(w.pick(8000)) * time.Millisecond })
	case op < 94:
		r.set(func() { r.loses = !r.loses })
	case op == 94 && w.pick(4) == 0:
		r.set(func() { r.away = true })
	case op < 98:
		r.steady()
	case r.lives() && w.pick(4) == 0:
		w.end(r, w.pick(2) == 0)
	}
	time.Sleep(time.Duration(w.pick(60)) * time.Millisecond)
}

func (r *racer) steady() {
	r.set(func() { r.late, r.lag, r.loses, r.away = 0, 0, false, false })
}

// end ends a replica, in order or as one that is killed.
func (w *racing) end(r *racer, inOrder bool) {
	r.back = time.Now().Add(time.Duration(1000+w.pick(8000)) * time.Millisecond)
	if !inOrder {
		w.did("killed")
		r.set(func() { r.alive, r.ended = false, true }) // it can tell nobody
		r.stop()
		return
	}
	w.did("ended in order")
	r.program.stopping.Store(true)
	w.working.Go(func() {
		for busy := true; busy; { // what is under way is finished first
			time.Sleep(5 * time.Millisecond)
			r.set(func() { busy = r.answering > 0 })
		}
		r.stop()
		r.done.Wait()
		r.set(func() { r.alive, r.ended = false, true })
	})
}

// startAnew starts a replica that has ended when it is time.
func (w *racing) startAnew(r *racer) {
	ended := false
	r.set(func() { ended = r.ended })
	if !ended || time.Now().Before(r.back) {
		return
	}
	r.done.Wait()
	next := w.start(r.n)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.replicas[r.n] = next
}

// close ends everything, whatever became of the test.
func (w *racing) close() {
	w.working.Wait()
	for _, r := range w.replicas {
		r.stop()
		r.done.Wait()
	}
}

// calm lets everything settle, and compares all records with the recount, and what the
// replicas answer with what it says.
func (w *racing) calm() {
	w.t.Helper()
	for _, r := range w.replicas {
		r.steady()
	}
	w.working.Wait()
	time.Sleep(10 * time.Second)
	for _, r := range w.replicas {
		w.startAnew(r)
	}
	time.Sleep(2 * max(w.options.ReservationTTL, w.options.MaxBindDelay)) // longer than any reservation that came to nothing
	leaders := 0
	for _, r := range w.replicas {
		if r.program.election.Leading() {
			leaders++
		}
	}
	if leaders != 1 {
		w.t.Fatalf("%d replicas lead", leaders)
	}
	w.compare()
	// None is lost: whatever fits is bound, by either replica, and nothing else.
	for i, pod := range w.pods() {
		if pod.Spec.NodeName != "" {
			continue
		}
		want := w.recount(&pod)
		for n, r := range w.replicas {
			if got, err := r.fits(&pod); err != nil || !slices.Equal(got, want) {
				w.t.Fatalf("replica %d: pod %s of %v %v fits on %v, %v; by the recount on %v", n, pod.Name,
					pod.Spec.Containers[0].Resources.Requests, pod.Annotations, got, err, want)
			}
		}
		if len(want) == 0 {
			continue
		}
		if err := w.replicas[i%2].bind(&pod, want[0]); err != nil {
			w.t.Fatalf("pod %s: %v", pod.Name, err)
		}
	}
	time.Sleep(time.Second)
	w.compare()
}

// recount returns where the pod fits, by what was bound and what nodes have.
func (w *racing) recount(pod *v1.Pod) []string {
	requests, err := kube.RequestsOf(pod, []accel.Resource{racingMemory})
	if err != nil {
		w.t.Fatal(err)
	}
	request := requests[0]
	devices := max(request.Devices, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	out := []string{}
	for _, node := range racingNodes {
		used, room := w.used(node), 0
		for _, s := range w.nodes[node] {
			if !s.Health.Unhealthy && request.Selection.Allows(s.ID, s.Model, s.Isolation.Memory) &&
				s.Units-used[s.ID] >= request.Peak()/accel.Units(devices) {
				room++
			}
		}
		if room >= devices {
			out = append(out, node)
		}
	}
	return out
}

// compare compares the books of both replicas with the recount.
func (w *racing) compare() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, text := range w.wrong {
		w.t.Attr("second-try", "no") // a busy machine is no reason
		w.t.Error(text)
	}
	if w.t.Failed() {
		w.t.FailNow()
	}
	want := map[string]map[accel.DeviceID]accel.Units{}
	for _, node := range racingNodes {
		if w.nodes[node] == nil {
			continue
		}
		want[node] = map[accel.DeviceID]accel.Units{}
		used := w.used(node)
		for _, s := range w.nodes[node] {
			want[node][s.ID] = used[s.ID]
		}
	}
	for n, r := range w.replicas {
		got := map[string]map[accel.DeviceID]accel.Units{}
		for u := range r.program.ledger.Nodes(racingMemory) {
			got[u.Name] = map[accel.DeviceID]accel.Units{}
			for _, d := range u.Devices {
				got[u.Name][d.ID] = d.Used
			}
		}
		if !reflect.DeepEqual(got, want) {
			w.t.Fatalf("books of replica %d\n got %v\nwant %v", n, got, want)
		}
		if c := r.program.ledger.Counts(); c.Reservations+c.Expected != 0 {
			w.t.Fatalf("replica %d has %d reservations that nobody waits for, and expects %d binds", n, c.Reservations, c.Expected)
		}
	}
}

// TestRacingReplicas: whatever happens to two replicas, no device is given away
// twice, no pod is bound twice, and none is lost.
func TestRacingReplicas(t *testing.T) {
	steps := *racingSteps
	if testing.Short() {
		steps = min(steps, 2000)
	}
	for seed := range uint64(2) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			key := filepath.Join(t.TempDir(), "key")
			if err := os.WriteFile(key, bytes.Repeat([]byte("k"), wire.MinKeyBytes), 0o600); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				w := newRacing(t, key, seed)
				defer w.close()
				for i := range steps {
					w.step()
					if i%400 == 399 {
						w.calm()
					}
				}
				w.calm()
				t.Logf("%d steps: %v", steps, w.count)
				// A test in which nothing happens would pass as well.
				for _, what := range []string{
					"bound", "bound on several", "forwarded", "deleted", "node changed", "killed", "ended in order", "timed out",
					"answer lost",
					"bind failed", "filter failed", "fits nowhere", "scheduler ended", "bound late",
				} {
					if w.count[what] < steps/2000 {
						t.Errorf("%q happened %d times only", what, w.count[what])
					}
				}
			})
		})
	}
}

func newRacing(t *testing.T, key string, seed uint64) *racing {
	t.Helper()
	w := &racing{
		t: t, keys: kube.NewKeyring(key), rng: rand.New(rand.NewPCG(seed, 6)),
		nodes: map[string][]accel.Share{}, sizes: map[string]accel.Units{}, bound: map[string]accel.Grant{}, count: map[string]int{},
	}
	var pods []runtime.Object
	for n := range w.replicas {
		pods = append(pods, &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: release, Name: fmt.Sprint("replica-", n)}})
	}
	var err error
	if w.server, err = kubetest.New(pods...); err != nil {
		t.Fatal(err)
	}
	w.server.OnWrite(w.written)
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	w.metadata = metadatafake.NewSimpleMetadataClient(scheme)
	o := DefaultOptions()
	// With a short Lease more happens in as many steps.
	o.GrantKeyFile, o.TLS.Listen, o.Election.Duration = key, "", 3*time.Second
	if err := o.Validate(); err != nil {
		t.Fatal(err)
	}
	o.Election.Enabled, o.Election.Namespace = true, release
	w.options = o
	for _, node := range racingNodes {
		w.publish(node, whole(node))
	}
	for n := range w.replicas {
		w.replicas[n] = w.start(n)
	}
	return w
}
