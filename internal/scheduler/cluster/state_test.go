package cluster

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

func TestMain(m *testing.M) {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

var (
	shareLabel = Label{Key: "enflame.com/gcushare", Value: "true"}
	testKey    = bytes.Repeat([]byte("k"), wire.MinKeyBytes)
)

// fixture is books over a real ledger.
type fixture struct {
	t      *testing.T
	ledger *ledger.Ledger
	keys   *kube.Keyring
	file   string // of the key
	books  *State
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{t: t, ledger: ledger.New(ledger.Options{}), file: filepath.Join(t.TempDir(), "key")}
	f.writeKey(testKey)
	f.keys = kube.NewKeyring(f.file)
	f.books = NewState(Config{
		Ledger: f.ledger, Grants: f.keys, Resources: []accel.Resource{gcuMemory},
		NodeLabels: map[accel.Resource]Labels{gcuMemory: {{Key: "divvy.dev/enabled", Value: "true"}, shareLabel}},
	})
	return f
}

func (f *fixture) writeKey(key []byte) {
	f.t.Helper()
	if err := os.WriteFile(f.file, key, 0o600); err != nil {
		f.t.Fatal(err)
	}
}

// ok fails the test on an error of a store.
func (f *fixture) ok(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

// node publishes cards named after the node; no units publish nothing.
func (f *fixture) node(name string, units ...accel.Units) *metav1.PartialObjectMetadata {
	f.t.Helper()
	n := &metav1.PartialObjectMetadata{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{shareLabel.Key: shareLabel.Value}},
	}
	if len(units) == 0 {
		return n
	}
	inv := accel.Inventory{Resource: gcuMemory, Unit: "1"}
	for i, u := range units {
		inv.Shares = append(inv.Shares,
			accel.Share{Units: u, Device: accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprintf("%s-%d", name, i)),
				NUMANode: accel.NoNUMA}})
	}
	value, err := wire.EncodeInventory([]accel.Inventory{inv})
	f.ok(err)
	n.Annotations = map[string]string{wire.InventoryAnnotation: value}
	return n
}

// grant signs a grant for the pod with the key and puts it on the pod.
func (f *fixture) grant(pod *v1.Pod, key []byte, index int) *v1.Pod {
	f.t.Helper()
	signer, err := wire.NewSigner(key)
	f.ok(err)
	value, err := signer.EncodeGrant(string(pod.UID), accel.Grant{
		Resource: gcuMemory, Node: pod.Spec.NodeName, Device: accel.DeviceID(fmt.Sprintf("%s-%d", pod.Spec.NodeName, index)),
		Index: index, DeviceUnits: 16, Units: 4, At: time.Unix(1, 0),
	})
	f.ok(err)
	pod.Annotations = map[string]string{wire.GrantAnnotation: value}
	return pod
}

// state renders the books: "node: used of card 0, of card 1, ... +unplaced".
func (f *fixture) state() string {
	var out []string
	for n := range f.ledger.Nodes(gcuMemory) {
		var parts []string
		for _, d := range n.Devices {
			parts = append(parts, fmt.Sprint(d.Used))
		}
		line := n.Name + ": " + strings.Join(parts, " ")
		if len(n.Unplaced) > 0 {
			var units accel.Units
			for _, p := range n.Unplaced {
				units += p.Units
			}
			line += fmt.Sprintf(" +%d", units)
		}
		out = append(out, line)
	}
	return strings.Join(out, "; ")
}

func (f *fixture) want(state string) {
	f.t.Helper()
	if got := f.state(); got != state {
		f.t.Errorf("books %q, want %q", got, state)
	}
}

func TestNodes(t *testing.T) {
	f := newFixture(t)
	nodes := f.books.Nodes()
	f.ok(nodes.Add(f.node("a", 16, 8)))
	f.ok(nodes.Add(f.node("plain")))
	f.want("a: 0 0")

	garbage := f.node("b", 16)
	garbage.Annotations[wire.InventoryAnnotation] = `{"v":1,"resources":[{"resource":"enflame.com/gcu-memory","devices":[{"id":"x",` +
		`"index":0},{"id":"x","index":1}]}]}`
	f.ok(nodes.Add(garbage))
	f.want("a: 0 0") // the others are unaffected
	if got := f.books.Problem("b"); got != "the inventory of the node is invalid" {
		t.Errorf("problem of b: %q", got)
	}
	f.ok(nodes.Update(f.node("b", 32)))
	f.want("a: 0 0; b: 0")
	if got := f.books.Problem("b"); got != "" {
		t.Errorf("problem of b after it was mended: %q", got)
	}
	for _, junk := range []string{"\x00", "{", strings.Repeat("[", 1<<17), `{"v":99}`} {
		garbage.Annotations[wire.InventoryAnnotation] = junk
		f.ok(nodes.Update(garbage))
		f.want("a: 0 0")
	}
	f.ok(nodes.Update(f.node("b", 32)))

	// Without its label a node gets no shared pods, and with it again.
	unlabelled := f.node("a", 16, 8)
	unlabelled.Labels = nil
	f.ok(nodes.Update(unlabelled))
	f.want("b: 0")
	if got := f.books.Problem("a"); got != "the node is not labelled divvy.dev/enabled=true or enflame.com/gcushare=true" {
		t.Errorf("problem of a: %q", got)
	}
	f.ok(nodes.Update(f.node("a", 16, 8)))
	f.want("a: 0 0; b: 0")

	f.ok(nodes.Delete(f.node("b", 32)))
	f.want("a: 0 0")
	f.ok(nodes.Replace([]any{f.node("c", 4)}, "7"))
	f.want("c: 0")
	if err := nodes.Add(&v1.Pod{}); err == nil {
		t.Error("a pod was taken for a node")
	}
	if got := f.books.Size(); got.Nodes != 1 || got.BadNodes != 0 {
		t.Errorf("size %+v", got)
	}
}

func TestPods(t *testing.T) {
	f := newFixture(t)
	nodes, pods := f.books.Nodes(), f.books.Pods()
	f.ok(nodes.Add(f.node("a", 16, 16)))

	// Waiting pods hold nothing, but a bind can ask for them.
	f.ok(pods.Add(waitingPod("p", "u1", "4")))
	f.ok(pods.Add(waitingPod("other", "u9", "")))
	f.want("a: 0 0")
	if got, ok := f.books.Pod("team", "p"); !ok || got.Ref.UID != "u1" || len(got.Requests) != 1 {
		t.Errorf("Pod(p) = %+v, %v", got, ok)
	}
	if _, ok := f.books.Pod("team", "other"); ok {
		t.Error("the books remember a pod that asks for nothing of ours")
	}

	// Bound with a grant; on no device without one, or with somebody else's.
	f.ok(pods.Update(f.grant(boundPod("p", "u1", "4", "a"), testKey, 1)))
	f.want("a: 0 4")
	f.ok(pods.Update(f.grant(boundPod("p", "u1", "4", "a"), testKey, 1)))
	f.want("a: 0 4")
	f.ok(pods.Add(boundPod("byhand", "u2", "2", "a")))
	f.want("a: 0 4 +2")
	stolen := boundPod("thief", "u3", "1", "a")
	stolen.Annotations = f.grant(boundPod("p", "u1", "4", "a"), testKey, 0).Annotations
	f.ok(pods.Add(stolen))
	f.want("a: 0 4 +3")
	forged := boundPod("forger", "u4", "1", "a")
	forged.Annotations = map[string]string{
		"enflame.com/gcu-device-id": "0", "enflame.com/gcu-device-memory-request": "0", wire.GrantAnnotation: "{}",
	}
	f.ok(pods.Add(forged))
	f.want("a: 0 4 +4")
	elsewhere := f.grant(boundPod("moved", "u5", "1", "b"), testKey, 0)
	elsewhere.Spec.NodeName = "a"
	f.ok(pods.Add(elsewhere))
	f.want("a: 0 4 +5")
	if got, want := f.books.Size(), (Size{Nodes: 1, Granted: 1, Ungranted: 4}); got != want {
		t.Errorf("size %+v, want %+v", got, want)
	}

	// The node names the device later.
	f.ok(pods.Update(f.grant(boundPod("byhand", "u2", "2", "a"), testKey, 0)))
	f.want("a: 2 4 +3")

	// A pod that is being deleted still holds its units; one that ended does
	// not, and neither does one that is gone.
	leaving := f.grant(boundPod("p", "u1", "4", "a"), testKey, 1)
	leaving.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	f.ok(pods.Update(leaving))
	f.want("a: 2 4 +3")
	leaving.Status.Phase = v1.PodSucceeded
	f.ok(pods.Delete(leaving))
	f.want("a: 2 0 +3")
	failed := boundPod("thief", "u3", "1", "a")
	failed.Status.Phase = v1.PodFailed
	f.ok(pods.Update(failed))
	f.want("a: 2 0 +2")

	// A StatefulSet's pod is re-created under its name, and the deletion of
	// the first arrives late or never.
	f.ok(pods.Add(f.grant(boundPod("set-0", "s1", "4", "a"), testKey, 1)))
	f.want("a: 2 4 +2")
	f.ok(pods.Add(waitingPod("set-0", "s2", "4")))
	f.want("a: 2 0 +2")
	f.ok(pods.Delete(boundPod("set-0", "s1", "4", "a")))
	if got, ok := f.books.Pod("team", "set-0"); !ok || got.Ref.UID != "s2" {
		t.Errorf("after the late deletion the books have %+v, %v", got, ok)
	}

	// A whole list replaces everything, a node that left and returned
	// included.
	f.ok(nodes.Delete(f.node("a", 16, 16)))
	f.want("")
	f.ok(nodes.Add(f.node("a", 16, 16)))
	f.want("a: 2 0 +2")
	f.ok(pods.Replace([]any{f.grant(boundPod("new", "n1", "8", "a"), testKey, 1), waitingPod("other", "u9", "")}, "9"))
	f.want("a: 0 8")
	f.ok(pods.Replace(nil, "10"))
	f.want("a: 0 0")
	if err := pods.Add(f.node("a", 1)); err == nil {
		t.Error("a node was taken for a pod")
	}
}

// A reservation of a pod that the books never showed goes with the pod.
func TestDeletedBeforeSeen(t *testing.T) {
	f := newFixture(t)
	f.ok(f.books.Nodes().Add(f.node("a", 16)))
	pod := waitingPod("p", "u1", "4")
	if _, _, err := f.ledger.Reserve(accel.PodRef{UID: "u1", Namespace: "team", Name: "p"}, time.Time{},
		"a", kube.RequestOf(pod, gcuMemory)); err != nil {
		t.Fatal(err)
	}
	f.want("a: 4")
	f.ok(f.books.Pods().Delete(pod))
	f.want("a: 0")
}

// Events of a waiting pod leave its reservation alone.
func TestWaitingPodKeepsReservation(t *testing.T) {
	f := newFixture(t)
	f.ok(f.books.Nodes().Add(f.node("a", 16)))
	pod := waitingPod("p", "u1", "4")
	f.ok(f.books.Pods().Add(pod))
	grant, undo, err := f.ledger.Reserve(accel.PodRef{UID: "u1", Namespace: "team", Name: "p"}, time.Time{},
		"a", kube.RequestOf(pod, gcuMemory))
	f.ok(err)
	f.ok(f.books.Pods().Update(pod))
	f.ok(f.books.Pods().Replace([]any{pod}, "3"))
	f.want("a: 4")
	f.ok(f.books.Pods().Update(f.grant(boundPod("p", "u1", "4", "a"), testKey, grant.Index)))
	undo() // too late
	f.want("a: 4")
}

// Placed tells who holds something, and by which configuration of its node. That
// the configuration changes alone is noticed, too.
func TestPlaced(t *testing.T) {
	f := newFixture(t)
	f.books.config.ConfigLabels = []string{"divvy.dev/config", "nvidia.com/device-plugin.config"}
	node := f.node("a", 16)
	f.ok(f.books.Nodes().Add(node))
	f.ok(f.books.Nodes().Add(f.node("b")))
	f.ok(f.books.Pods().Add(waitingPod("waits", "u0", "4")))
	f.ok(f.books.Pods().Add(f.grant(boundPod("granted", "u1", "4", "a"), testKey, 0)))
	f.ok(f.books.Pods().Add(boundPod("elsewhere", "u2", "4", "b")))
	ended := boundPod("ended", "u3", "4", "a")
	ended.Status.Phase = v1.PodSucceeded
	f.ok(f.books.Pods().Add(ended))
	placed := func() string {
		var out []string
		for _, p := range f.books.Placed() {
			out = append(out, fmt.Sprintf("%s on %s by %q", p.Ref.Name, p.Node, p.Config))
		}
		slices.Sort(out)
		return strings.Join(out, ", ")
	}
	for _, step := range []struct {
		labels map[string]string
		want   string
	}{
		{nil, `elsewhere on b by "", granted on a by ""`},
		{map[string]string{"nvidia.com/device-plugin.config": "fine"}, `elsewhere on b by "", granted on a by "fine"`},
		{map[string]string{"nvidia.com/device-plugin.config": "fine", "divvy.dev/config": "coarse"},
			`elsewhere on b by "", granted on a by "coarse"`},
		{nil, `elsewhere on b by "", granted on a by ""`},
	} {
		changed := node.DeepCopy()
		for key, value := range step.labels {
			changed.Labels[key] = value
		}
		f.ok(f.books.Nodes().Update(changed))
		if got := placed(); got != step.want {
			t.Errorf("with labels %v: %s, want %s", step.labels, got, step.want)
		}
	}
}

func TestNewKey(t *testing.T) {
	newKey, thirdKey := bytes.Repeat([]byte("n"), 40), bytes.Repeat([]byte("t"), 40)
	f := newFixture(t)
	f.ok(f.books.Nodes().Add(f.node("a", 16, 16)))
	f.ok(f.books.Pods().Add(f.grant(boundPod("old", "u1", "4", "a"), testKey, 0)))
	f.ok(f.books.Pods().Add(f.grant(boundPod("new", "u2", "4", "a"), newKey, 1)))
	f.want("a: 4 0 +4")

	for _, bad := range [][]byte{nil, []byte("short"), bytes.Repeat([]byte("x"), 64<<10+1)} {
		f.writeKey(bad)
		if f.keys.Reload() {
			t.Errorf("a key of %d bytes was taken", len(bad))
		}
		if _, err := f.keys.Signer(); err != nil {
			t.Errorf("a bad file took the good key away: %v", err)
		}
	}

	f.writeKey(newKey)
	if !f.keys.Reload() || f.keys.Reload() {
		t.Error("a new key is taken once")
	}
	f.books.KeyChanged()
	f.want("a: 4 4")
	// The old one is good for one more key.
	f.ok(f.books.Pods().Update(f.grant(boundPod("old", "u1", "4", "a"), testKey, 1)))
	f.want("a: 0 8")
	f.writeKey(thirdKey)
	f.keys.Reload()
	if _, err := f.keys.DecodeGrant("u1", f.grant(boundPod("old", "u1", "4", "a"), testKey,
		1).Annotations[wire.GrantAnnotation]); err == nil {
		t.Error("a key from two changes ago still verifies")
	}
}

// The whole way from an API server, as far as the fakes go.
func TestRun(t *testing.T) {
	f := newFixture(t)
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	meta := metadatafake.NewSimpleMetadataClient(scheme, f.node("a", 16, 16))
	client := fake.NewClientset([]runtime.Object{
		f.grant(boundPod("p", "u1", "4", "a"), testKey, 1), boundPod("unrelated", "u2", "", "a"), waitingPod("w", "u3", "8"),
	}...)
	clients := kube.Clients{Kubernetes: client, Metadata: meta}
	once := newFixture(t)
	_, err := LoadView(t.Context(), clients, once.ledger, once.keys)
	once.ok(err)
	once.want("a: 0 4")

	go f.books.Run(t.Context(), clients)
	f.eventually("synced", f.books.Synced)
	f.want("a: 0 4")

	pods := client.CoreV1().Pods("team")
	if _, err := pods.Update(t.Context(), f.grant(boundPod("w", "u3", "8", "a"), testKey, 0), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	f.eventually("the bound pod counts", func() bool { return f.state() == "a: 8 4" })
	if err := pods.Delete(t.Context(), "p", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	f.eventually("the deleted pod is gone", func() bool { return f.state() == "a: 8 0" })
}

func (f *fixture) eventually(what string, done func() bool) {
	f.t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for !done() {
		if time.Now().After(deadline) {
			f.t.Fatalf("not in time: %s; books %q", what, f.state())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// What a reflector's first store keeps is small and found by name.
func TestTransformers(t *testing.T) {
	f := newFixture(t)
	pod := f.grant(boundPod("p", "u1", "4", "a"), testKey, 1)
	slim, err := f.books.Pods().Transformer()(pod)
	f.ok(err)
	again, err := f.books.Pods().Transformer()(slim)
	f.ok(err)
	if again != slim {
		t.Error("a reduced pod was reduced again")
	}
	accessor, ok := slim.(metav1.ObjectMetaAccessor)
	if !ok || accessor.GetObjectMeta().GetName() != "p" || accessor.GetObjectMeta().GetNamespace() != "team" {
		t.Errorf("the reduced pod %+v has no name", slim)
	}
	f.ok(f.books.Nodes().Add(f.node("a", 16, 16)))
	f.ok(f.books.Pods().Replace([]any{slim}, "1"))
	f.want("a: 0 4")

	node := f.node("n", 4)
	node.Annotations["big"], node.ManagedFields = "x", []metav1.ManagedFieldsEntry{{Manager: "kubelet"}}
	reduced, err := f.books.Nodes().Transformer()(node)
	f.ok(err)
	want := &slimNode{name: "n", inventory: node.Annotations[wire.InventoryAnnotation], labels: node.Labels}
	if got, ok := reduced.(*slimNode); !ok || !reflect.DeepEqual(got, want) || got.GetObjectMeta().GetName() != "n" {
		t.Errorf("the reduced node is %+v, want %+v", reduced, want)
	}
	for _, transform := range []func(any) (any, error){f.books.Pods().Transformer(), f.books.Nodes().Transformer()} {
		if _, err := transform("x"); err == nil {
			t.Error("a string was taken")
		}
	}
}

func TestParseLabels(t *testing.T) {
	tests := map[string]string{
		"a.example/b=true":            "a.example/b=true",
		"a.example/b=true,c=d":        "a.example/b=true or c=d",
		"a.example/b=true,c=d,e=,f=g": "a.example/b=true or c=d or e= or f=g",
	}
	for text, want := range tests {
		if l, err := ParseLabels(text); err != nil || l.String() != want {
			t.Errorf("%q: %v, %v", text, l, err)
		}
	}
	for _, bad := range []string{"", "a", "=b", "a=b,", "a=b,c"} {
		if _, err := ParseLabels(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

// Nodes of several vendors are labelled by several words.
func TestAnyOfTheLabelsIsEnough(t *testing.T) {
	labels := Labels{{Key: "a", Value: "1"}, {Key: "b", Value: ""}}
	tests := map[string]struct {
		carried map[string]string
		want    bool
	}{
		"none":              {nil, false},
		"another":           {map[string]string{"c": "1"}, false},
		"another value":     {map[string]string{"a": "2"}, false},
		"the first":         {map[string]string{"a": "1", "c": "1"}, true},
		"one without value": {map[string]string{"b": ""}, true},
	}
	for name, tt := range tests {
		if got := labels.allow(tt.carried); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
	if !(Labels{}).allow(nil) {
		t.Error("no label is asked for, and the node is refused")
	}
}
