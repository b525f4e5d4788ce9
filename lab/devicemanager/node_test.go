package devicemanager

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/agent"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/node/podresources"
	"github.com/divvy-gpu/divvy/internal/node/quarantine"
	"github.com/divvy-gpu/divvy/internal/node/state"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

const (
	gcuMemory = accel.Resource("enflame.com/gcu-memory")
	grantKey  = "0123456789abcdef0123456789abcdef"
	// soon is how long the books may take to be right again.
	soon = 5 * time.Second
	// patience is for machines that do other things as well.
	patience = 30 * time.Second
)

// libefml is the stand-in for the vendor's library, built once.
var libefml string

// libnvidia is the one for NVIDIA. A process has room for one library of theirs,
// and this file must stay: one node at a time uses it, whose topology a link
// beside it leads to.
var libnvidia string

func TestMain(m *testing.M) {
	// The tests wait more than they compute.
	_ = flag.Set("test.parallel", "8") // the command line decides, if it says something
	klog.SetLogger(textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(io.Discard))))
	dir, err := os.MkdirTemp("", "efml")
	if err == nil {
		libefml, err = vendorsim.Build(context.Background(), vendorsim.Enflame, dir)
	}
	if err == nil {
		libnvidia, err = vendorsim.Build(context.Background(), vendorsim.NVIDIA, filepath.Join(dir, vendorsim.NVIDIA))
	}
	code := 1
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// node is one node: its cards, its kubelet and its divvy-node.
type node struct {
	t       *testing.T
	log     klog.Logger
	dir     string
	unit    string
	api     *apiServer
	kubelet *kubelet
	signer  *wire.Signer
	pods    int // created so far

	topology vendorsim.Topology
	// configure changes the configuration of the next divvy-node, wrap its
	// backend; nil for neither.
	configure func(*config.NodeConfig)
	wrap      func(backend.Backend) backend.Backend
	// others are vendors that are there beside Enflame.
	others  []string
	metrics *prometheus.Registry

	agent *agent.Agent
	stop  func() // the agent, waits
	// closeLibraries lets go of what the agent uses, once.
	closeLibraries func()
}

// newNode starts a node with everything running and agreed.
func newNode(t *testing.T, unit string, cards []vendorsim.Card) *node {
	t.Helper()
	n := prepareNode(t, unit, cards)
	n.kubelet.start()
	n.startAgent()
	n.awaitReady()
	return n
}

// prepareNode makes a node on which nothing runs yet.
func prepareNode(t *testing.T, unit string, cards []vendorsim.Card) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "dm") //nolint:usetesting // a socket's path has 107 characters at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	signer, err := wire.NewSigner([]byte(grantKey))
	if err != nil {
		t.Fatal(err)
	}
	library, err := os.ReadFile(libefml)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"key": []byte(grantKey), vendorsim.LibraryName(vendorsim.Enflame): library} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	tail := &tail{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("what kubelet and divvy-node logged last:\n%s", tail)
		}
	})
	log := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(tail), textlogger.Verbosity(2)))
	n := &node{t: t, log: log, dir: dir, unit: unit, api: newAPIServer(t), signer: signer, stop: func() {}}
	n.kubelet = newKubelet(t, klog.LoggerWithName(log, "kubelet"), dir, n.api)
	n.setCards(cards...)
	t.Cleanup(func() {
		n.stop()
		if n.kubelet.Started() {
			n.kubelet.stop()
		}
	})
	return n
}

// setCards changes the hardware.
func (n *node) setCards(cards ...vendorsim.Card) {
	n.topology.Cards = slices.Clone(cards)
	n.writeTopology()
}

func (n *node) writeTopology() {
	n.t.Helper()
	if err := n.topology.Write(filepath.Join(n.dir, vendorsim.TopologyName)); err != nil {
		n.t.Fatal(err)
	}
}

// startAgent starts divvy-node as its main does.
func (n *node) startAgent() {
	n.t.Helper()
	n.startSuccessor(agent.Handoff{})
}

// startSuccessor starts divvy-node after another one that has left that.
func (n *node) startSuccessor(left agent.Handoff) {
	n.t.Helper()
	cfg := config.Default()
	cfg.KubeletDir, cfg.StateDir, cfg.CDIDir = n.dir, filepath.Join(n.dir, "state"), filepath.Join(n.dir, "cdi")
	cfg.GrantKeyFile = filepath.Join(n.dir, "key")
	cfg.HealthInterval = config.Duration(200 * time.Millisecond)
	cfg.Resources[0].MemoryUnit = n.unit
	cfg.Vendors = map[string]config.Vendor{"enflame": {Health: config.Health{RecoverAfter: new(config.Duration(300 * time.Millisecond))}}}
	if n.configure != nil {
		n.configure(&cfg)
	}
	vendor, err := vendors.New("enflame", backend.Options{DriverRoot: n.dir,
		LibraryPath: filepath.Join(n.dir, vendorsim.LibraryName(vendorsim.Enflame))})
	if err != nil {
		n.t.Fatal(err)
	}
	served := vendor
	if n.wrap != nil {
		served = n.wrap(vendor)
	}
	if n.metrics == nil {
		n.metrics = prometheus.NewRegistry() // of the process, which may outlive the agent
	}
	backends := map[string]backend.Backend{"enflame": served}
	for _, name := range n.others {
		library := filepath.Join(n.dir, vendorsim.LibraryName(name))
		if name == vendorsim.NVIDIA {
			library = libnvidia
		}
		backends[name], err = vendors.New(name, backend.Options{DriverRoot: n.dir, LibraryPath: library})
		if err != nil {
			n.t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), klog.LoggerWithName(n.log, "divvy-node")))
	n.agent, err = agent.New(ctx, agent.Options{
		Config: cfg, Node: thisNode, Client: n.api, Keys: kube.NewKeyring(cfg.GrantKeyFile),
		Backends: backends, Registry: n.metrics, Quarantine: quarantine.Open(ctx, cfg.StateDir), Handoff: left,
	})
	if err != nil {
		cancel()
		n.t.Fatal(err)
	}
	var running sync.WaitGroup
	agent := n.agent
	running.Go(func() {
		if err := agent.Run(ctx); err != nil {
			n.t.Errorf("divvy-node ended: %v", err)
		}
	})
	n.closeLibraries = sync.OnceFunc(func() {
		for _, b := range backends {
			if err := b.Close(); err != nil {
				n.t.Errorf("close the library of %s: %v", b.Vendor(), err)
			}
		}
	})
	closeLibraries := n.closeLibraries
	n.stop = func() {
		cancel()
		running.Wait()
		closeLibraries()
		n.stop = func() {}
	}
}

func (n *node) restartAgent() {
	n.t.Helper()
	n.stop()
	n.startAgent()
}

func (n *node) restartKubelet() {
	n.t.Helper()
	n.kubelet.stop()
	n.kubelet.start()
}

// awaitReady waits until divvy-node says that it works and kubelet has all
// units.
func (n *node) awaitReady() {
	n.t.Helper()
	eventually(n.t, patience, func() error {
		if err := n.agent.Ready(); err != nil {
			return err
		}
		want, healthy := int64(0), false
		for _, s := range n.inventory().Shares {
			want += int64(s.Units)
			healthy = healthy || !s.Health.Unhealthy
		}
		got, allocatable := n.kubelet.capacity()
		if got != want {
			return fmt.Errorf("kubelet shows %d units, the inventory has %d", got, want)
		}
		if healthy && allocatable == 0 {
			return errors.New("kubelet has not taken in the list of the new connection")
		}
		return nil
	})
}

// eventually polls until check succeeds.
func eventually(t *testing.T, limit time.Duration, check func() error) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %v", limit, err)
		}
		<-tick.C
	}
}

// inventory is what the node's object shows; empty before it does.
func (n *node) inventory() accel.Inventory {
	n.t.Helper()
	object, err := n.api.CoreV1().Nodes().Get(context.Background(), thisNode, metav1.GetOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	value := object.Annotations[wire.InventoryAnnotation]
	if value == "" {
		return accel.Inventory{}
	}
	all, err := wire.DecodeInventory(value)
	if err != nil {
		n.t.Fatalf("inventory %q: %v", value, err)
	}
	for _, in := range all {
		if in.Resource == gcuMemory {
			return in
		}
	}
	return accel.Inventory{}
}

// card returns the id of a card by its position in the topology.
func (n *node) card(i int) accel.DeviceID {
	return accel.DeviceID("GCU-" + n.topology.Cards[i].UUID)
}

// layout is what divvy-node keeps on disk of ids and devices.
func (n *node) layout() *sharing.Layout {
	n.t.Helper()
	saved, err := state.NewStore(filepath.Join(n.dir, "state"), alloc.ID{Resource: gcuMemory, Kind: alloc.Memory}).Load()
	if err != nil {
		n.t.Fatal(err)
	}
	if saved == nil {
		saved = &alloc.State{}
	}
	layout, err := sharing.NewLayout(saved.Ranges)
	if err != nil {
		n.t.Fatal(err)
	}
	return layout
}

// shape makes the containers of a pod.
type shape func(*corev1.PodSpec)

func units(name string, n int64) corev1.Container {
	c := corev1.Container{Name: name}
	if n > 0 {
		list := corev1.ResourceList{corev1.ResourceName(gcuMemory): *resource.NewQuantity(n, resource.DecimalSI)}
		c.Resources = corev1.ResourceRequirements{Limits: list, Requests: list}
	}
	return c
}

// app adds one app container per number.
func app(ns ...int64) shape {
	return func(s *corev1.PodSpec) {
		for _, n := range ns {
			s.Containers = append(s.Containers, units(fmt.Sprintf("app%d", len(s.Containers)), n))
		}
	}
}

// initial adds one plain init container per number.
func initial(ns ...int64) shape {
	return func(s *corev1.PodSpec) {
		for _, n := range ns {
			s.InitContainers = append(s.InitContainers, units(fmt.Sprintf("init%d", len(s.InitContainers)), n))
		}
	}
}

// sidecar adds one restartable init container per number.
func sidecar(ns ...int64) shape {
	return func(s *corev1.PodSpec) {
		for _, n := range ns {
			c := units(fmt.Sprintf("side%d", len(s.InitContainers)), n)
			c.RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
			s.InitContainers = append(s.InitContainers, c)
		}
	}
}

// pod makes a pod bound to this node that nobody knows yet.
func (n *node) pod(name string, shapes ...shape) *corev1.Pod {
	n.pods++
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: name, UID: types.UID(fmt.Sprintf("uid-%04d-%s", n.pods, name)),
			CreationTimestamp: metav1.NewTime(time.Unix(1_700_000_000+int64(n.pods), 0)),
			Annotations:       map[string]string{},
		},
		Spec:   corev1.PodSpec{NodeName: thisNode},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
	for _, s := range shapes {
		s(&p.Spec)
	}
	return p
}

// grant writes into the pod what the extender does when it binds.
func (n *node) grant(pod *corev1.Pod, device accel.DeviceID) *corev1.Pod {
	n.t.Helper()
	g := accel.Grant{
		Resource: gcuMemory, Node: thisNode, Device: device, Units: kube.RequestOf(pod, gcuMemory).Peak(),
		At: pod.CreationTimestamp.Time,
	}
	for _, s := range n.inventory().Shares {
		if s.ID == device {
			g.Index, g.DeviceUnits = s.Index, s.Units
		}
	}
	value, err := n.signer.EncodeGrant(string(pod.UID), g)
	if err != nil {
		n.t.Fatal(err)
	}
	pod.Annotations[wire.GrantAnnotation] = value
	maps.Copy(pod.Annotations, wire.LegacyAnnotations(g))
	return pod
}

// bind creates the pod with a grant of the card at that position, or without
// any for -1.
func (n *node) bind(card int, name string, shapes ...shape) *corev1.Pod {
	n.t.Helper()
	pod := n.pod(name, shapes...)
	if card >= 0 {
		n.grant(pod, n.card(card))
	}
	n.api.create(pod)
	return pod
}

// admit gives the pods to kubelet, which must take and start them.
func (n *node) admit(pods ...*corev1.Pod) {
	n.t.Helper()
	for _, pod := range pods {
		if err := n.kubelet.add(pod); err != nil {
			n.t.Fatalf("pod %s: %v", pod.Name, err)
		}
		if err := n.kubelet.run(pod); err != nil {
			n.t.Fatal(err)
		}
	}
}

// on checks that the pods are on the card at that position, by everything that
// says so, now or soon.
func (n *node) on(card int, pods ...*corev1.Pod) {
	n.t.Helper()
	for _, pod := range pods {
		device, err := n.where(pod)
		if err != nil {
			n.t.Fatal(err)
		}
		if device != n.card(card) {
			n.t.Fatalf("pod %s is on %s, want %s", pod.Name, device, n.card(card))
		}
	}
	n.converged()
}

// where returns the device that the units of all containers of a pod belong
// to, after a check that they are as many as the pod's peak and that each
// container's environment names the device.
func (n *node) where(pod *corev1.Pod) (accel.DeviceID, error) {
	layout := n.layout()
	index := map[string]accel.DeviceID{}
	for _, r := range layout.Ranges() {
		index[strconv.Itoa(r.Index)] = r.Device
	}
	request := kube.RequestOf(pod, gcuMemory)
	var device accel.DeviceID
	all := map[string]bool{}
	for _, c := range request.Containers {
		ids := n.kubelet.ids(pod.UID, c.Name)
		if accel.Units(len(ids)) != c.Units {
			return "", fmt.Errorf("container %s of %s has %d units, wants %d", c.Name, pod.Name, len(ids), c.Units)
		}
		for _, id := range ids {
			all[id] = true
			d, ok := layout.Device(id)
			if !ok {
				return "", fmt.Errorf("container %s of %s has unit %s, which belongs to no device", c.Name, pod.Name, id)
			}
			if device == "" {
				device = d
			}
			if d != device {
				return "", fmt.Errorf("pod %s is on two devices, %s and %s", pod.Name, device, d)
			}
		}
		if env := n.kubelet.env(pod.UID, c.Name); env != nil && index[env["ENFLAME_VISIBLE_DEVICES"]] != device {
			return "", fmt.Errorf("container %s of %s sees device %q, its units are of %s", c.Name, pod.Name,
				env["ENFLAME_VISIBLE_DEVICES"], device)
		}
	}
	if accel.Units(len(all)) != request.Peak() {
		return "", fmt.Errorf("pod %s keeps %d units, its peak is %d", pod.Name, len(all), request.Peak())
	}
	return device, nil
}

// disjoint checks what must hold at any moment: kubelet's books have no unit
// twice and no pod on two devices. It returns how many units each device has
// given away.
func (n *node) disjoint() (map[accel.DeviceID]int, error) {
	layout := n.layout()
	owner := map[string]string{}
	used := map[accel.DeviceID]int{}
	for _, pod := range n.kubelet.GetActivePods() {
		devices := map[accel.DeviceID]bool{}
		for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			for _, id := range n.kubelet.ids(pod.UID, c.Name) {
				d, ok := layout.Device(id)
				if !ok {
					return nil, fmt.Errorf("pod %s holds unit %s of no device", pod.Name, id)
				}
				devices[d] = true
				switch other, taken := owner[id]; {
				case !taken:
					owner[id] = string(pod.UID)
					used[d]++
				case other != string(pod.UID):
					return nil, fmt.Errorf("unit %s of %s was handed out twice, to %s and %s", id, d, other, pod.UID)
				}
			}
		}
		if len(devices) > 1 {
			return nil, fmt.Errorf("pod %s is on %d devices", pod.Name, len(devices))
		}
	}
	for d, u := range used {
		if r, _ := layout.Range(d); accel.Units(u) > r.Units {
			return nil, fmt.Errorf("%d units of %s are held, it has %d", u, d, r.Units)
		}
	}
	return used, nil
}

// books compares all that is written about the pods with what kubelet gave.
func (n *node) books() error {
	if _, err := n.disjoint(); err != nil {
		return err
	}
	client, err := podresources.NewClient(filepath.Join(n.dir, "pod-resources", "kubelet.sock"))
	if err != nil {
		return err
	}
	defer client.Close() //nolint:errcheck // nothing is lost
	listed, err := client.List(context.Background())
	if err != nil {
		return err
	}
	layout := n.layout()
	told := map[types.NamespacedName]accel.DeviceID{}
	for _, p := range listed {
		for _, c := range p.Containers {
			for _, id := range c.Units[gcuMemory] {
				key := types.NamespacedName{Namespace: p.Namespace, Name: p.Name}
				d, _ := layout.Device(id)
				if other, seen := told[key]; seen && other != d {
					return fmt.Errorf("the pod-resources API shows pod %s on %s and %s", key, other, d)
				}
				told[key] = d
			}
		}
	}
	index := map[accel.DeviceID]accel.Share{}
	for _, s := range n.inventory().Shares {
		index[s.ID] = s
	}
	booked := map[accel.DeviceID]accel.Units{}
	var wrong []error
	for _, pod := range n.kubelet.GetActivePods() {
		object := n.api.get(pod.UID)
		if object == nil || object.Status.Phase != corev1.PodRunning || len(kube.RequestOf(pod, gcuMemory).Containers) == 0 {
			continue
		}
		device, err := n.where(pod)
		if err != nil {
			return err
		}
		if d, ok := told[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}]; ok && d != device {
			return fmt.Errorf("the pod-resources API shows pod %s on %s, it is on %s", pod.Name, d, device)
		}
		wrong = append(wrong, n.annotations(object, index[device]))
		booked[device] += kube.RequestOf(pod, gcuMemory).Peak()
	}
	for d, sum := range booked {
		if sum > index[d].Units {
			wrong = append(wrong, fmt.Errorf("the pods of %s add up to %d units, it has %d", d, sum, index[d].Units))
		}
	}
	return errors.Join(wrong...)
}

// annotations checks the pod's object: a confirmed, signed grant of the device
// and the five annotations that tell the same.
func (n *node) annotations(pod *corev1.Pod, device accel.Share) error {
	g, err := n.signer.DecodeGrant(string(pod.UID), pod.Annotations[wire.GrantAnnotation])
	if err != nil {
		return fmt.Errorf("pod %s: %w", pod.Name, err)
	}
	peak := kube.RequestOf(pod, gcuMemory).Peak()
	if g.Device != device.ID || !g.Confirmed || g.Units != peak || g.Node != thisNode || g.Index != device.Index {
		return fmt.Errorf("pod %s has the grant %+v, it is on %s", pod.Name, g, device.ID)
	}
	for key, want := range map[string]string{
		"id": strconv.Itoa(device.Index), "memory": strconv.FormatInt(int64(device.Units), 10),
		"memory-request": strconv.FormatInt(int64(peak), 10), "assigned": "true",
		"assign-time": strconv.FormatInt(g.At.UnixNano(), 10),
	} {
		if got := pod.Annotations["enflame.com/gcu-device-"+key]; got != want {
			return fmt.Errorf("pod %s: annotation %s is %q, want %q", pod.Name, key, got, want)
		}
	}
	return nil
}

// converged waits until the books are right.
func (n *node) converged() {
	n.t.Helper()
	eventually(n.t, soon, n.books)
}

// used returns how many units of the card at that position pods keep.
func (n *node) used(card int) int {
	n.t.Helper()
	used, err := n.disjoint()
	if err != nil {
		n.t.Fatal(err)
	}
	return used[n.card(card)]
}

// refused checks that kubelet refuses the pod with a text that has all parts.
func (n *node) refused(pod *corev1.Pod, parts ...string) {
	n.t.Helper()
	err := n.kubelet.add(pod)
	if err == nil {
		n.t.Fatalf("pod %s was admitted, want an error", pod.Name)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			n.t.Errorf("pod %s was refused with %q, want it to say %q", pod.Name, err, part)
		}
	}
}

// tail keeps the last of what is logged. It is safe for concurrent use.
type tail struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *tail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	const limit = 64 << 10
	if l.buf.Len() > 2*limit {
		l.buf.Next(l.buf.Len() - limit)
	}
	return l.buf.Write(p)
}

func (l *tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// errUnexpected is for eventually, when an error was awaited that says
// something else than err.
func errUnexpected(err error) error { return errors.New("so far: " + fmt.Sprint(err)) }
