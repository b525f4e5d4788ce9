package devicemanager

import (
	"encoding/json"
	"hash/crc32"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// The first release called its socket otherwise and named no vendor in its state.
// Pods with memory run on when this one takes over, also when kubelet restarts.
func TestUpgradeFromTheFirstRelease(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
	a := n.bind(0, "a", app(4))
	b := n.bind(1, "b", app(5, 1))
	n.admit(a, b)
	n.on(0, a)
	n.on(1, b)
	pods := []*corev1.Pod{a, b}
	before := n.snapshot(pods)
	n.stop()

	path := filepath.Join(n.dir, "state", "units-enflame.com_gcu-memory.json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Version int             `json:"version"`
		Sum     uint32          `json:"sum"`
		State   json.RawMessage `json:"state"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	var state struct {
		Unit   string          `json:"unit"`
		Ranges json.RawMessage `json:"ranges"`
	}
	if err := json.Unmarshal(file.State, &state); err != nil {
		t.Fatal(err)
	}
	if file.State, err = json.Marshal(state); err != nil {
		t.Fatal(err)
	}
	file.Sum = crc32.ChecksumIEEE(file.State)
	if data, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	// It was killed, so its socket is still there.
	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(n.dir, "device-plugins", "divvy-enflame.com_gcu-memory.sock"),
		Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	old.SetUnlinkOnClose(false)
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}

	n.startAgent()
	n.awaitReady()
	n.same(before, pods)
	for range 2 {
		n.restartKubelet()
		n.awaitReady()
		n.same(before, pods)
	}
	c := n.bind(0, "c", app(12))
	n.admit(c)
	n.on(0, c)
}

// Each configuration is an agent of its own in the same process.
func TestReloadsLeaveNothingBehind(t *testing.T) {
	n := offer(t, vendorsim.GCUs(2, 16<<10), memoryUnits, whole)
	pod := n.start("pod", of(gcuWhole, 1))
	settled := func() int {
		n.stop()
		defer n.startAgent()
		var count int
		for range 40 {
			time.Sleep(50 * time.Millisecond)
			now := runtime.NumGoroutine()
			if now == count {
				break
			}
			count = now
		}
		return count
	}
	first := settled()
	for i := range 6 {
		n.reload([][]config.Resource{{memoryUnits, whole}, {whole, sliced(2)}, {boards}}[i%3]...)
	}
	n.reload(memoryUnits, whole)
	if last := settled(); last > first+3 {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines, then %d after reloads:\n%s", first, last, buf[:runtime.Stack(buf, true)])
	}
	n.awaitOffer()
	if got := n.api.get(pod.UID).Status; got.Phase != corev1.PodRunning {
		t.Errorf("pod %s does not run any more: %s", pod.Name, got.Message)
	}
}
