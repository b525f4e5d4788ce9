package agent

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/quarantine"
)

// newWard is a stage with two GPUs, of which an XID 79 is fatal, and a quarantine in
// the state folder.
func newWard(t *testing.T) *stage {
	t.Helper()
	s := newStage(t)
	zero := config.Duration(0)
	s.config.Vendors = map[string]config.Vendor{"nvidia": {Health: config.Health{RecoverAfter: &zero, NeverRecover: []string{"xid-79"}}}}
	s.quarantine = quarantine.Open(t.Context(), s.config.StateDir)
	s.xid("")
	return s
}

// xid makes the first GPU ill for a cause, or well.
func (s *stage) xid(cause string) {
	d := gpuDevice(0, "a")
	if cause != "" {
		d.Health = accel.Health{Unhealthy: true, Cause: cause, Reason: "critical error " + cause}
	}
	s.vendors["nvidia"].set(nil, d, gpuDevice(1, "b"))
}

func (s *stage) node() *corev1.Node {
	s.t.Helper()
	node, err := s.client.CoreV1().Nodes().Get(s.t.Context(), thisNode, metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return node
}

// offered says of each GPU what the inventory says of it.
func (s *stage) offered() string {
	s.t.Helper()
	all, err := wire.DecodeInventory(s.node().Annotations[wire.InventoryAnnotation])
	if err != nil {
		return err.Error()
	}
	var words []string
	for _, in := range all {
		if in.Resource != "nvidia.com/gpu" {
			continue
		}
		for _, share := range in.Shares {
			word := string(share.ID)
			switch h := share.Health; {
			case !h.Quarantined.IsZero():
				word += " quarantined"
			case h.Unhealthy:
				word += " unhealthy"
			}
			words = append(words, word)
		}
	}
	return strings.Join(words, ", ")
}

func (s *stage) wantOffered(want string) {
	s.t.Helper()
	eventually(s.t, "the inventory shows "+want, func() bool { return s.offered() == want })
}

// shown is what the node's object says of the quarantine, without times.
func (s *stage) shown() wire.QuarantineStatus {
	s.t.Helper()
	q, err := wire.DecodeQuarantine(s.node().Annotations[wire.QuarantineAnnotation])
	if err != nil {
		s.t.Fatal(err)
	}
	for i := range q.Devices {
		if q.Devices[i].Since.IsZero() {
			s.t.Errorf("%+v is in quarantine since no time", q.Devices[i])
		}
		q.Devices[i].Since = metav1.Time{}.Time
	}
	return q
}

// ask writes a request and returns what becomes of it. The fake API server loses one of
// two patches at the same time, so the agent's have to be over.
func (s *stage) ask(text string) wire.RequestAnswer {
	s.t.Helper()
	eventually(s.t, "the node shows what is in quarantine", func() bool { return len(s.shown().Devices) == len(s.quarantine.All()) })
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"annotations": map[string]string{wire.DeviceRequestAnnotation: text}}})
	if err != nil {
		s.t.Fatal(err)
	}
	if _, err := s.client.CoreV1().Nodes().Patch(s.t.Context(), thisNode, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		s.t.Fatal(err)
	}
	eventually(s.t, "the request is taken away: "+text, func() bool {
		_, there := s.node().Annotations[wire.DeviceRequestAnnotation]
		return !there
	})
	return s.shown().Answered
}

func (s *stage) request(r wire.DeviceRequest) wire.RequestAnswer {
	s.t.Helper()
	text, err := wire.EncodeDeviceRequest(r)
	if err != nil {
		s.t.Fatal(err)
	}
	return s.ask(text)
}

// event waits for an event of that reason on the node and returns its message.
func (s *stage) event(reason string) (message string) {
	s.t.Helper()
	eventually(s.t, "event "+reason, func() bool {
		list, err := s.client.CoreV1().Events(metav1.NamespaceDefault).List(s.t.Context(), metav1.ListOptions{})
		if err != nil {
			s.t.Fatal(err)
		}
		for _, e := range list.Items {
			if e.Reason == reason && e.InvolvedObject.Name == thisNode {
				message = e.Message
			}
		}
		return message != ""
	})
	return message
}

// TestQuarantineOutlivesConfigurationsAndRestarts, and ends with a request alone.
func TestQuarantineOutlivesConfigurationsAndRestarts(t *testing.T) {
	s := newWard(t)
	_, stop := s.play()
	s.wantOffered("a, b")
	s.xid("xid-79")
	s.wantOffered("a quarantined, b")
	s.xid("")
	if m := s.event("DeviceQuarantined"); !strings.Contains(m, "nvidia device 0 (a) is in quarantine since 20") ||
		!strings.Contains(m, "critical error xid-79") || !strings.HasSuffix(m, "kubectl divvy device release "+thisNode+" a") {
		t.Errorf("the event says %q", m)
	}
	want := wire.QuarantineStatus{Devices: []accel.Quarantine{{Device: "a", Vendor: "nvidia", Cause: "xid-79",
		Reason: "critical error xid-79"}}}
	eventually(t, "the node shows it", func() bool { return cmp.Equal(want, s.shown()) })
	stop()

	// Another configuration, which knows no fatal cause.
	s.config.Vendors = map[string]config.Vendor{"nvidia": {Health: config.Health{NeverRecover: []string{}}}}
	_, stop = s.play()
	s.wantOffered("a quarantined, b")
	stop()
	// Another process.
	s.quarantine = quarantine.Open(t.Context(), s.config.StateDir)
	_, stop = s.play()
	s.wantOffered("a quarantined, b")
	stop()
	// Another process that finds no state folder.
	if err := os.RemoveAll(s.config.StateDir); err != nil {
		t.Fatal(err)
	}
	s.quarantine = quarantine.Open(t.Context(), s.config.StateDir)
	_, stop = s.play()
	eventually(t, "the device is in quarantine, as the node's object says",
		func() bool { return s.count("divvy_node_device_quarantined") == 1 })
	s.wantOffered("a quarantined, b")

	answer := s.request(wire.DeviceRequest{ID: "1", Verb: wire.ReleaseDevices, Devices: []accel.DeviceID{"a"}})
	if answer != (wire.RequestAnswer{ID: "1"}) {
		t.Errorf("the answer is %+v", answer)
	}
	s.wantOffered("a, b")
	if m := s.event("DeviceReleased"); !strings.Contains(m, "nvidia device 0 (a) was released from quarantine") {
		t.Errorf("the event says %q", m)
	}
	eventually(t, "the metric is gone", func() bool { return s.count("divvy_node_device_quarantined") == 0 })
	stop()
	s.quarantine = quarantine.Open(t.Context(), s.config.StateDir)
	s.play()
	s.wantOffered("a, b")
}

// TestReleaseOfADeviceThatStillHasTheError puts it into quarantine again.
func TestReleaseOfADeviceThatStillHasTheError(t *testing.T) {
	s := newWard(t)
	s.play()
	s.xid("xid-79")
	s.wantOffered("a quarantined, b")
	first, _ := s.quarantine.Of("a")
	s.request(wire.DeviceRequest{ID: "1", Verb: wire.ReleaseDevices, Devices: []accel.DeviceID{"a"}})
	eventually(t, "it is in quarantine again", func() bool { _, there := s.quarantine.Of("a"); return there })
	if again, _ := s.quarantine.Of("a"); again.Since.Before(first.Since) {
		t.Errorf("in quarantine since %v, before %v", again.Since, first.Since)
	}
	s.wantOffered("a quarantined, b")
}

func TestQuarantineByHand(t *testing.T) {
	s := newWard(t)
	_, stop := s.play()
	s.wantOffered("a, b")
	answer := s.request(wire.DeviceRequest{ID: "1", Verb: wire.QuarantineDevices, Devices: []accel.DeviceID{"a", "b"},
		Reason: "fan replacement"})
	if answer != (wire.RequestAnswer{ID: "1"}) {
		t.Errorf("the answer is %+v", answer)
	}
	s.wantOffered("a quarantined, b quarantined")
	if m := s.event("DeviceQuarantined"); !strings.Contains(m, ": fan replacement; no new pods are placed on it until") {
		t.Errorf("the event says %q", m)
	}
	for i, d := range s.shown().Devices {
		if want := (accel.Quarantine{Device: []accel.DeviceID{"a", "b"}[i], Vendor: "nvidia", Index: i,
			Cause: "administrator", Reason: "fan replacement"}); d != want {
			t.Errorf("the node shows %+v, want %+v", d, want)
		}
	}
	// A device that is not there any more can be released, and comes back as usual.
	s.vendors["nvidia"].set(nil, gpuDevice(0, "a"))
	s.request(wire.DeviceRequest{ID: "2", Verb: wire.ReleaseDevices, Devices: []accel.DeviceID{"b"}})
	s.xid("")
	s.wantOffered("a quarantined, b")
	stop()
}

// TestRequestsThatAreRejected: nothing is done, and the answer and an event say why.
func TestRequestsThatAreRejected(t *testing.T) {
	s := newWard(t)
	a, _ := s.play()
	s.xid("xid-79")
	s.wantOffered("a quarantined, b")
	for i, tt := range []struct{ text, id, want string }{
		{"nonsense", "", "unreadable device request: invalid character"},
		{`{"v":1,"id":"1","verb":"release","devices":["b"]}`, "1", "device b of node " + thisNode + " is not in quarantine"},
		{`{"v":1,"id":"2","verb":"release","devices":["a","GPU-other"]}`, "2", "device GPU-other of node " + thisNode +
			" is not in quarantine"},
		{`{"v":1,"id":"3","verb":"quarantine","devices":["GPU-other","b"]}`, "3", "node " + thisNode + " has no device GPU-other"},
		{`{"v":1,"id":"4","verb":"destroy","devices":["a"]}`, "4", "neither quarantine nor release"},
		{fmt.Sprintf(`{"v":1,"id":"5","verb":"release","devices":["a"],"reason":%q}`, strings.Repeat("x", 40_000)),
			"", "at most 32768 are read"},
	} {
		r, err := wire.DecodeDeviceRequest(tt.text)
		known, _ := a.discoveries.devices()
		answer := a.quarantine.carryOut(t.Context(), r, known, err)
		if answer.ID != tt.id || !strings.Contains(answer.Error, tt.want) {
			t.Errorf("request %d: the answer is %+v, want of %q with %q", i, answer, tt.id, tt.want)
		}
	}
	if answer := s.ask("nonsense"); !strings.Contains(answer.Error, "unreadable device request") {
		t.Errorf("the node shows the answer %+v", answer)
	}
	s.wantOffered("a quarantined, b")
	if m := s.event("DeviceRequestRejected"); !strings.Contains(m, "was rejected") {
		t.Errorf("the event says %q", m)
	}
	// The same request again, as a copy of the node's object that is late shows it.
	release := `{"v":1,"id":"9","verb":"release","devices":["a"]}`
	s.ask(release)
	if again := s.ask(release); again != (wire.RequestAnswer{ID: "9"}) {
		t.Errorf("a request that was carried out is answered again by %+v", again)
	}
}

// TestStateFolderThatCannotBeWritten: devices are put into quarantine and released, and
// whoever asks is warned.
func TestStateFolderThatCannotBeWritten(t *testing.T) {
	s := newWard(t)
	s.play()
	if got := s.gauge("divvy_node_quarantine_unsaved"); got != 0 {
		t.Errorf("divvy_node_quarantine_unsaved is %v when the agent starts", got)
	}
	s.wantOffered("a, b")
	// The file cannot take the place of a folder that is not empty, whoever runs the test.
	path := filepath.Join(s.config.StateDir, quarantine.FileName)
	// The agent writes a file that is gone, possibly before the folder is there.
	eventually(t, "a folder replaces the file", func() bool {
		return os.Remove(path) == nil && os.MkdirAll(filepath.Join(path, "x"), 0o700) == nil
	})
	s.xid("xid-79")
	s.wantOffered("a quarantined, b")
	eventually(t, "the metric says so", func() bool { return s.gauge("divvy_node_quarantine_unsaved") == 1 })
	s.xid("")
	answer := s.request(wire.DeviceRequest{ID: "1", Verb: wire.ReleaseDevices, Devices: []accel.DeviceID{"a"}})
	if answer.Error != "" || !strings.Contains(answer.Warning, "a restart of divvy-node reverts this") {
		t.Errorf("the answer is %+v", answer)
	}
	s.wantOffered("a, b")
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the file is written", func() bool { return s.quarantine.Sync() == nil && s.gauge("divvy_node_quarantine_unsaved") == 0 })
}

// count is how many series a metric has.
func (s *stage) count(name string) int {
	s.t.Helper()
	n, err := testutil.GatherAndCount(s.registry, name)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

// gauge is the value of a metric without labels.
func (s *stage) gauge(name string) float64 {
	s.t.Helper()
	families, err := s.registry.Gather()
	if err != nil {
		s.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	return -1
}
