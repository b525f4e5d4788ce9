package deviceplugin

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

func TestSocketNamesAreThoseOfTheVendorsPlugins(t *testing.T) {
	got := SocketNames("nvidia.com/gpu", "iluvatar.com/gpu", "enflame.com/gcu-memory", "nvidia.com/gpu.shared", "nvidia.org/gpu")
	want := []string{"nvidia-gpu.sock", "iluvatar-gpu.sock", "enflame-gcu-memory.sock", "nvidia-gpu.shared.sock", "nvidia.org_gpu.sock"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The vendor's own plugin may run on the node; its socket is not ours to take.
func TestSocketOfAnotherPluginIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir, nil)
	s := NewServer(dir, "nvidia-gpu.sock", "nvidia.com/gpu", scripted{})
	other, err := net.Listen("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.Lstat(s.socket)
	if err != nil {
		t.Fatal(err)
	}
	run(t, s)
	if err := s.SetUnits([]Unit{{ID: "0"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it says who is in the way", func() bool {
		err := s.Ready()
		return err != nil && strings.Contains(err.Error(), "another device plugin serves on "+s.socket)
	})
	if after, err := os.Lstat(s.socket); err != nil || !os.SameFile(before, after) {
		t.Fatalf("the other plugin's socket was taken away (%v)", err)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it serves once the other has ended", func() bool { return k.last() == "0=Healthy" })
}

// A listener that closes must not remove the socket that somebody else has made
// under its name meanwhile.
func TestStopLeavesTheSocketOfASuccessor(t *testing.T) {
	s := NewServer(t.TempDir(), "gcu.sock", resource, scripted{})
	_, stop, err := s.serve(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(s.socket); err != nil {
		t.Fatal(err)
	}
	successor, err := net.Listen("unix", s.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer successor.Close() //nolint:errcheck // nothing is lost
	stop()
	if _, err := os.Lstat(s.socket); err != nil {
		t.Errorf("the successor's socket is gone: %v", err)
	}
}

// TestStopAtAnyMoment ends the server in each phase of its life: before kubelet
// listens, between the registration and the first ListAndWatch, and with a
// kubelet that does not read. It must end and leave no socket.
func TestStopAtAnyMoment(t *testing.T) {
	tests := map[string]struct {
		kubelet, units bool
		until          func(*Server) bool
	}{
		"before there is anything to offer": {},
		"before kubelet listens":            {units: true},
		"while it registers":                {units: true, kubelet: true},
		"while kubelet watches":             {units: true, kubelet: true, until: func(s *Server) bool { return s.Ready() == nil }},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if tt.kubelet {
				startKubelet(t, dir, nil)
			}
			s := NewServer(dir, "gcu.sock", resource, scripted{})
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error, 1)
			go func() { ended <- s.Run(ctx) }()
			if tt.units {
				if err := s.SetUnits([]Unit{{ID: "0"}}); err != nil {
					t.Fatal(err)
				}
			}
			if tt.until != nil {
				eventually(t, "it gets there", func() bool { return tt.until(s) })
			}
			cancel()
			select {
			case err := <-ended:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(2 * time.Minute):
				t.Fatal("it does not end")
			}
			if _, err := os.Lstat(filepath.Join(dir, "gcu.sock")); err == nil {
				t.Error("the socket is still there")
			}
		})
	}
}

// TestStaleStreamSwallowsNoChange opens two streams, as a kubelet that connects
// anew without having closed the first: both learn of every change, and one that
// is not read any more holds up neither the other nor the end.
func TestStaleStreamSwallowsNoChange(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir, nil)
	s := NewServer(dir, "gcu.sock", resource, scripted{})
	run(t, s)
	if err := s.SetUnits([]Unit{{ID: "0"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "kubelet watches", func() bool { return s.Ready() == nil })
	client, done := k.dial("gcu.sock")
	defer done()
	stale, err := client.ListAndWatch(t.Context(), &pluginapi.Empty{}) // never read
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		if err := s.SetUnits([]Unit{{ID: "0", Unhealthy: i%2 == 0}}); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the stream that is read has the last state", func() bool { return k.last() == "0=Healthy" })
	// One at a time, so that no later change makes up for one that was swallowed.
	for i := range 20 {
		want := "0=Healthy"
		if i%2 == 0 {
			want = "0=Unhealthy"
		}
		if err := s.SetUnits([]Unit{{ID: "0", Unhealthy: i%2 == 0}}); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the stream that is read learns of each change", func() bool { return k.last() == want })
	}
	if first, err := stale.Recv(); err != nil || len(first.GetDevices()) != 1 {
		t.Errorf("a new stream begins with %v, %v; want the whole state", first, err)
	}
}

// Kubelet restarts while the health changes: the new kubelet has the last state.
func TestKubeletRestartWhileHealthFlips(t *testing.T) {
	dir := t.TempDir()
	s := NewServer(dir, "gcu.sock", resource, scripted{})
	run(t, s)
	k := startKubelet(t, dir, nil)
	for i := range 10 {
		if err := s.SetUnits([]Unit{{ID: "0", Unhealthy: i%2 == 0}, {ID: "1"}}); err != nil {
			t.Fatal(err)
		}
		if i%3 == 2 {
			k.stop()
			_ = os.Remove(s.socket) // as kubelet does when it starts
			k = startKubelet(t, dir, nil)
		}
	}
	eventually(t, "the last kubelet has the last state", func() bool { return k.last() == "0=Healthy 1=Healthy" })
}

func TestUnitsCarryTheirNUMANodes(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir, nil)
	s := NewServer(dir, "gcu.sock", accel.Resource(resource), scripted{})
	run(t, s)
	nodes := func() string {
		k.mu.Lock()
		defer k.mu.Unlock()
		var out []string
		if len(k.lists) == 0 {
			return ""
		}
		for _, d := range k.lists[len(k.lists)-1].GetDevices() {
			ids := ""
			for _, n := range d.GetTopology().GetNodes() {
				ids += strconv.FormatInt(n.GetID(), 10)
			}
			out = append(out, ids)
		}
		return strings.Join(out, "|")
	}
	if err := s.SetUnits([]Unit{{ID: "0", NUMANodes: []int{1}}, {ID: "1"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "kubelet knows", func() bool { return nodes() == "1|" })
	// A change of the topology alone is a change.
	if err := s.SetUnits([]Unit{{ID: "0", NUMANodes: []int{1}}, {ID: "1", NUMANodes: []int{0, 1}}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "kubelet learns of the change", func() bool { return nodes() == "1|01" })
}

// A kubelet that was asked too soon after the last listener ended refuses its
// path until it is restarted.
func TestPathThatKubeletTakesForConnectedIsLeft(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir, nil)
	k.connected = 2
	s := NewServer(dir, "nvidia-gpu.sock", "nvidia.com/gpu", scripted{})
	run(t, s)
	if err := s.SetUnits([]Unit{{ID: "0"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "kubelet knows the units", func() bool { return k.last() == "0=Healthy" })
	eventually(t, "it is ready", func() bool { return s.Ready() == nil && s.Alive(t.Context()) == nil })
	k.mu.Lock()
	var got []string
	for _, r := range k.requests {
		got = append(got, r.GetEndpoint())
	}
	k.mu.Unlock()
	if diff := cmp.Diff([]string{"nvidia-gpu.sock", "nvidia-gpu~2.sock", "nvidia-gpu~3.sock"}, got); diff != "" {
		t.Errorf("registered on (-want +got):\n%s", diff)
	}
	files, err := filepath.Glob(filepath.Join(dir, "nvidia*"))
	if err != nil || len(files) != 1 {
		t.Errorf("sockets left: %v, want the last one alone", files)
	}
	// Another kubelet knows nothing of that.
	k.stop()
	for _, f := range files {
		_ = os.Remove(f)
	}
	k = startKubelet(t, dir, nil)
	eventually(t, "the new kubelet knows the units", func() bool { return k.last() == "0=Healthy" })
	k.mu.Lock()
	defer k.mu.Unlock()
	if got := k.requests[len(k.requests)-1].GetEndpoint(); got != "nvidia-gpu.sock" {
		t.Errorf("registered on %s with the new kubelet", got)
	}
}
