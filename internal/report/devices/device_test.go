package devices

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

var since = time.Date(2026, 7, 1, 10, 0, 0, 0, time.UTC)

// node is node-1 with the devices a to d: a is well, b in quarantine, c ill, d given out
// whole and free as memory; e is in quarantine and not there. Answered is what its
// daemon answered last.
func node(t *testing.T, answered wire.RequestAnswer) *corev1.Node {
	t.Helper()
	b := accel.Quarantine{Device: "b", Vendor: "nvidia", Index: 1, Cause: "xid-79", Reason: "critical error XID 79", Since: since}
	e := accel.Quarantine{Device: "e", Vendor: "nvidia", Index: 4, Cause: accel.CauseAdministrator,
		Reason: "fan\x1b[31m", Since: since.Add(time.Hour)}
	share := func(index int, id accel.DeviceID, h accel.Health) accel.Share {
		return accel.Share{Units: 1, Device: accel.Device{Index: index, ID: id, Model: "A100", MemoryBytes: 1, NUMANode: accel.NoNUMA,
			Health: h}}
	}
	ill := accel.Health{Unhealthy: true, Reason: "too hot"}
	inventory, err := wire.EncodeInventory([]accel.Inventory{
		{Resource: "nvidia.com/gpu", Shares: []accel.Share{
			share(0, "a", accel.Health{}), share(1, "b", b.Health()), share(2, "c", ill),
			share(3, "d", accel.Health{Unhealthy: true, Reason: "given out as x"}),
		}},
		{Resource: "nvidia.com/gpu-memory", Shares: []accel.Share{share(3, "d", accel.Health{}), share(2, "c", ill)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	status, err := wire.EncodeQuarantine(wire.QuarantineStatus{Devices: []accel.Quarantine{b, e}, Answered: answered})
	if err != nil {
		t.Fatal(err)
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "node-1", ResourceVersion: "7", Annotations: map[string]string{
			wire.InventoryAnnotation: inventory, wire.QuarantineAnnotation: status,
		}},
		Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
}

// serve acts on requests as the node's daemon does, with these answers, until the test
// ends, and returns what was asked.
func serve(t *testing.T, client *fake.Clientset, answer func(wire.DeviceRequest) wire.RequestAnswer) func() []wire.DeviceRequest {
	t.Helper()
	var mu sync.Mutex
	var asked []wire.DeviceRequest
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ; ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
			object, err := client.Tracker().Get(corev1.SchemeGroupVersion.WithResource("nodes"), "", "node-1")
			if err != nil {
				continue
			}
			text, ok := object.(*corev1.Node).Annotations[wire.DeviceRequestAnnotation]
			if !ok {
				continue
			}
			r, err := wire.DecodeDeviceRequest(text)
			if err != nil {
				t.Errorf("the request %q: %v", text, err)
			}
			mu.Lock()
			asked = append(asked, r)
			mu.Unlock()
			given := answer(r)
			given.ID = r.ID
			if err := client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), node(t, given), ""); err != nil {
				t.Error(err)
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return func() []wire.DeviceRequest {
		mu.Lock()
		defer mu.Unlock()
		return asked
	}
}

func ask(t *testing.T, client *fake.Clientset, r Request, node string, uuids ...string) (out string, err error) {
	t.Helper()
	if r.Timeout == 0 {
		r.Timeout = 20 * time.Second
	}
	var text bytes.Buffer
	err = r.Run(t.Context(), client, node, uuids, &text, &text)
	return text.String(), err
}

func TestRequestsAreCarriedOut(t *testing.T) {
	for name, tt := range map[string]struct {
		r       Request
		uuids   []string
		warning string
		want    wire.DeviceRequest
		out     string
	}{
		"release": {
			Request{Verb: wire.ReleaseDevices}, []string{"b", "e", "b"}, "",
			wire.DeviceRequest{Verb: wire.ReleaseDevices, Devices: []accel.DeviceID{"b", "e"}},
			"device b of node node-1 was released from quarantine; new pods are placed on it once it is healthy\n" +
				"device e of node node-1 was released from quarantine; new pods are placed on it once it is healthy\n",
		},
		"quarantine": {
			Request{Verb: wire.QuarantineDevices, Reason: "fan"}, []string{"a"}, "",
			wire.DeviceRequest{Verb: wire.QuarantineDevices, Devices: []accel.DeviceID{"a"}, Reason: "fan"},
			"device a of node node-1 is in quarantine; to release it, run: kubectl divvy device release node-1 a\n",
		},
		"with a warning": {
			Request{Verb: wire.ReleaseDevices}, []string{"b"}, "not saved",
			wire.DeviceRequest{Verb: wire.ReleaseDevices, Devices: []accel.DeviceID{"b"}},
			"Warning: not saved\ndevice b of node node-1 was released from quarantine; new pods are placed on it once it is healthy\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset(node(t, wire.RequestAnswer{ID: "before"}))
			asked := serve(t, client, func(wire.DeviceRequest) wire.RequestAnswer { return wire.RequestAnswer{Warning: tt.warning} })
			out, err := ask(t, client, tt.r, "node-1", tt.uuids...)
			if err != nil || out != tt.out {
				t.Errorf("%v, printed\n%s\nwant\n%s", err, out, tt.out)
			}
			got := asked()
			if len(got) != 1 || got[0].ID == "" {
				t.Fatalf("asked for %+v", got)
			}
			got[0].ID = ""
			if diff := cmp.Diff(tt.want, got[0]); diff != "" {
				t.Errorf("asked for (-want +got):\n%s", diff)
			}
		})
	}
}

// TestRequestsThatCannotBeCarriedOut: one sentence each, and nothing is left on the node.
func TestRequestsThatCannotBeCarriedOut(t *testing.T) {
	release, quarantine := Request{Verb: wire.ReleaseDevices}, Request{Verb: wire.QuarantineDevices}
	impatient := Request{Verb: wire.ReleaseDevices, Timeout: time.Second}
	refuse := func(err error) func(*fake.Clientset) {
		return func(c *fake.Clientset) {
			c.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, err })
		}
	}
	nodes := schema.GroupResource{Resource: "nodes"}
	for name, tt := range map[string]struct {
		change  func(*corev1.Node)
		prepare func(*fake.Clientset)
		answer  string // of the daemon; "" for none
		r       Request
		node    string
		uuid    string
		want    string
	}{
		"no such node": {r: release, node: "node-9", uuid: "b", want: "node node-9 not found"},
		"unknown uuid": {r: quarantine, uuid: "x", want: "node node-1 has no device x; to list its devices, run: kubectl divvy device " +
			"list node-1"},
		"nothing shared": {change: func(n *corev1.Node) { n.Annotations = nil }, r: release,
			uuid: "b", want: "node node-1 shares no devices: divvy-node has not published any"},
		"not in it":      {r: release, uuid: "a", want: "device a of node node-1 is not in quarantine"},
		"not in it, ill": {r: release, uuid: "c", want: "device c of node node-1 is not in quarantine"},
		"no uuid":        {r: release, uuid: "", want: `encode device request: the device "" is empty`},
		"node is offline": {
			change: func(n *corev1.Node) {
				n.Status.Conditions[0].Status, n.Status.Conditions[0].Message = corev1.ConditionUnknown,
					"Kubelet stopped posting node status."
			},
			r: release, uuid: "b",
			want: "node node-1 is not ready, so divvy-node cannot process the request; try again when it is ready (Kubelet stopped " +
				"posting node status.)",
		},
		"another request": {
			change: func(n *corev1.Node) { n.Annotations[wire.DeviceRequestAnnotation] = "theirs" },
			r:      release, uuid: "b", want: "another device request is pending on node node-1; try again later, or withdraw it with: " +
				"kubectl annotate node node-1 divvy.dev/device-request-",
		},
		"no rights": {
			prepare: refuse(apierrors.NewForbidden(nodes, "node-1", errors.New("RBAC"))), r: release, uuid: "b",
			want: "patch node node-1: permission to patch nodes is required: ",
		},
		"always changed": {
			prepare: refuse(apierrors.NewConflict(nodes, "node-1", errors.New("changed"))), r: release, uuid: "b",
			want: "write device request to node node-1: ",
		},
		"rejected": {answer: "device b of node node-1 is not in quarantine", r: release,
			uuid: "b", want: "device b of node node-1 is not in quarantine"},
		"no answer": {r: impatient, uuid: "b", want: "divvy-node on node node-1 did not process the request within 1s, so the request " +
			"was withdrawn and nothing was changed"},
		"garbage on the node": {
			change: func(n *corev1.Node) { n.Annotations[wire.QuarantineAnnotation] = "{" }, r: release, uuid: "b",
			want: "node node-1: unreadable quarantine: ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := node(t, wire.RequestAnswer{})
			if tt.change != nil {
				tt.change(n)
			}
			client := fake.NewClientset(n)
			if tt.prepare != nil {
				tt.prepare(client)
			}
			if tt.answer != "" {
				serve(t, client, func(wire.DeviceRequest) wire.RequestAnswer { return wire.RequestAnswer{Error: tt.answer} })
			}
			where := tt.node
			if where == "" {
				where = "node-1"
			}
			out, err := ask(t, client, tt.r, where, tt.uuid)
			if err == nil || !strings.HasPrefix(err.Error(), tt.want) || out != "" {
				t.Errorf("printed %q, error %v\nwant %s...", out, err, tt.want)
			}
			left, err := client.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if text, there := left.Annotations[wire.DeviceRequestAnnotation]; there && text != "theirs" {
				t.Errorf("the request is left on the node: %s", text)
			}
		})
	}
}

// TestRequestIsWithdrawnWhenInterrupted, and when somebody else takes it away that is
// said.
func TestRequestIsWithdrawn(t *testing.T) {
	client := fake.NewClientset(node(t, wire.RequestAnswer{}))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	r := Request{Verb: wire.ReleaseDevices, Timeout: time.Minute}
	var out bytes.Buffer
	if err := r.Run(ctx, client, "node-1", []string{"b"}, &out, &out); err == nil ||
		!strings.Contains(err.Error(), "so the request was withdrawn and nothing was changed") {
		t.Errorf("interrupted: %v", err)
	}
	left, err := client.CoreV1().Nodes().Get(t.Context(), "node-1", metav1.GetOptions{})
	if err != nil || left.Annotations[wire.DeviceRequestAnnotation] != "" {
		t.Errorf("%v, left is %v", err, left.Annotations)
	}
	gone := time.AfterFunc(time.Second, func() {
		if err := client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), node(t, wire.RequestAnswer{}), ""); err != nil {
			t.Error(err)
		}
	})
	defer gone.Stop()
	if _, err := ask(t, client, r, "node-1", "b"); err == nil ||
		!strings.Contains(err.Error(), "was withdrawn or replaced by another one") {
		t.Errorf("taken away: %v", err)
	}
}

func TestList(t *testing.T) {
	bare := &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: "bare"}}
	full := node(t, wire.RequestAnswer{})
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	client := metadatafake.NewSimpleMetadataClient(scheme, bare,
		&metav1.PartialObjectMetadata{TypeMeta: bare.TypeMeta, ObjectMeta: full.ObjectMeta})
	for _, tt := range []struct{ node, output, want string }{
		{"", "table", `
NODE    INDEX  UUID  MODEL  STATE                SINCE                 REASON
node-1  0      a     A100   healthy              -                     -
node-1  1      b     A100   quarantine           2026-07-01T10:00:00Z  critical error XID 79
node-1  2      c     A100   unhealthy            -                     too hot
node-1  3      d     A100   healthy              -                     -
node-1  4      e     -      quarantine, missing  2026-07-01T11:00:00Z  fan?[31m
`},
		{"bare", "table", "\nno node shares devices\n"},
		{"bare", "json", "\n[]\n"},
	} {
		var out bytes.Buffer
		if err := List(t.Context(), client, tt.node, tt.output, &out); err != nil || out.String() != tt.want[1:] {
			t.Errorf("list %s -o %s: %v\n%s\nwant\n%s", tt.node, tt.output, err, &out, tt.want[1:])
		}
	}
	var out bytes.Buffer
	err := List(t.Context(), client, "node-1", "json", &out)
	for _, want := range []string{`"state": "quarantine",`, `"since": "2026-07-01T10:00:00Z"`, `"cause": "xid-79"`, `"uuid": "a"`} {
		if err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v: no %s in\n%s", err, want, &out)
		}
	}
	if err := List(t.Context(), client, "node-9", "table", &out); err == nil || err.Error() != "node node-9 not found" {
		t.Errorf("of an unknown node: %v", err)
	}
	if err := List(t.Context(), client, "", "xml", &out); err == nil {
		t.Error("xml is an output format")
	}
}

// TestChipsOfBoards: a board has the id of its first chip, and each chip may be in
// quarantine.
func TestChipsOfBoards(t *testing.T) {
	q := accel.Quarantine{Device: "chip-1", Vendor: "iluvatar", Index: 1, Cause: "ecc", Reason: "ecc", Since: since}
	h := q.Health()
	h.Reason = fmt.Sprintf("chip 1 (%s): ecc", q.Device)
	inventory, err := wire.EncodeInventory([]accel.Inventory{{Resource: "iluvatar.com/gpu", Shares: []accel.Share{
		{Units: 1, Chips: 2, Device: accel.Device{ID: "chip-0", Board: "chip-0", NUMANode: accel.NoNUMA, Health: h}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	status, err := wire.EncodeQuarantine(wire.QuarantineStatus{Devices: []accel.Quarantine{q}})
	if err != nil {
		t.Fatal(err)
	}
	n := node(t, wire.RequestAnswer{})
	n.Annotations = map[string]string{wire.InventoryAnnotation: inventory, wire.QuarantineAnnotation: status}
	got, err := describe("node-1", n.Annotations)
	if err != nil || len(got) != 2 || got[0].State != quarantined || got[1].UUID != "chip-1" || got[1].State != quarantined {
		t.Errorf("%v: listed are %+v", err, got)
	}
	client := fake.NewClientset(n)
	serve(t, client, func(wire.DeviceRequest) wire.RequestAnswer { return wire.RequestAnswer{} })
	if _, err := ask(t, client, Request{Verb: wire.ReleaseDevices}, "node-1", "chip-0"); err == nil ||
		err.Error() != "device chip-0 of node node-1 is not in quarantine" {
		t.Errorf("release of the board: %v", err)
	}
	if _, err := ask(t, client, Request{Verb: wire.ReleaseDevices}, "node-1", "chip-1"); err != nil {
		t.Errorf("release of the chip: %v", err)
	}
}

// TestQuarantineOfADeviceWithPartitions: the device is in no inventory, and its partitions
// name it.
func TestQuarantineOfADeviceWithPartitions(t *testing.T) {
	n := node(t, wire.RequestAnswer{})
	inventory, err := wire.EncodeInventory([]accel.Inventory{{Resource: "nvidia.com/mig-1g.5gb", Shares: []accel.Share{
		{Units: 1, Device: accel.Device{
			Index: accel.PartitionIndex(0, 0), ID: "p", Parent: "a", Profile: "1g.5gb", NUMANode: accel.NoNUMA,
		}},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	n.Annotations[wire.InventoryAnnotation] = inventory
	if err := check(n, wire.DeviceRequest{Verb: wire.QuarantineDevices, Devices: []accel.DeviceID{"a", "p"}}); err != nil {
		t.Error(err)
	}
	if err := check(n, wire.DeviceRequest{Verb: wire.ReleaseDevices, Devices: []accel.DeviceID{"a"}}); err == nil {
		t.Error("a device that is not in quarantine can be released")
	}
}
