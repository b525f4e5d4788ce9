package dra

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// register does what kubelet does with a socket for registration, and returns the server's socket.
func (p *plane) register(socket string) string {
	p.t.Helper()
	client := registerapi.NewRegistrationClient(p.dial(filepath.Join(p.dir, "plugins_registry", socket)))
	info, err := client.GetInfo(p.t.Context(), &registerapi.InfoRequest{})
	if err != nil {
		p.t.Fatal(err)
	}
	_, err = client.NotifyRegistrationStatus(p.t.Context(), &registerapi.RegistrationStatus{PluginRegistered: true})
	if err != nil {
		p.t.Fatal(err)
	}
	return filepath.Base(info.GetEndpoint())
}

// exists waits until there is a socket, or until it is gone.
func (p *plane) exists(socket string, want bool) {
	p.t.Helper()
	p.await(socket, func() bool {
		_, err := os.Lstat(filepath.Join(p.dir, socket))
		return want == (err == nil)
	})
}

// TestHandover: kubelet's calls during a handover are answered by the successor, and those that
// the predecessor has begun are not lost.
func TestHandover(t *testing.T) {
	p := newPlane(t, gcus()...)
	p.stop()
	p.patience = time.Minute
	p.start()
	p.devices(4)
	if got, err := p.server.Socket(); err == nil {
		t.Errorf("before kubelet has registered the driver, its socket is %q", got)
	}
	p.register("enflame.divvy.dev-reg.sock")
	old, stopOld := p.server, p.stop
	defer stopOld()
	if got, err := old.Socket(); got != "dra.sock" || err != nil {
		t.Errorf("the socket is %q, %v", got, err)
	}
	all := p.allocate("all", allocatedPart("gcu-a", "16Gi"))
	if _, failed := p.prepare(all); failed != "" {
		t.Fatal(failed)
	}
	// One that waits for the other to be released.
	part := p.allocate("part", allocatedPart("gcu-a", "10Gi"))
	prepared, released := make(chan string), make(chan string)
	go func() {
		_, failed := p.prepare(part)
		prepared <- failed
	}()
	p.await("the claim does not wait", func() bool {
		p.keeper.mu.Lock()
		defer p.keeper.mu.Unlock()
		return p.keeper.rejected > 0
	})

	if p.predecessor = old.Yield(); p.predecessor != "dra.sock" {
		t.Errorf("the predecessor yields %q", p.predecessor)
	}
	go func() { released <- p.unprepare(all) }()
	p.await("no call waits", func() bool { return old.door.calls.Load() == 2 })
	p.start()
	p.exists("plugins_registry/enflame.divvy.dev-next-reg.sock", true)
	socket := p.register("enflame.divvy.dev-next-reg.sock")
	if got, err := p.server.Socket(); got != "dra-next.sock" || got != socket || err != nil {
		t.Errorf("the successor's socket is %q, %v", got, err)
	}
	if len(p.keeper.Claims("enflame")) != 1 {
		t.Errorf("before the calls were passed, the claims are %v", p.keeper.Claims("enflame"))
	}
	if err := old.Pass(socket); err != nil {
		t.Fatal(err)
	}
	if failed := <-released; failed != "" {
		t.Error(failed)
	}
	if failed := <-prepared; failed != "" {
		t.Error(failed)
	}
	if _, failed := p.prepare(part); failed != "" { // still by the socket of the predecessor
		t.Error(failed)
	}
	old.Leave(t.Context())
	stopOld()
	p.exists("plugins/enflame.divvy.dev/dra.sock", false)
	p.exists("plugins/enflame.divvy.dev/dra-next.sock", true)
	if p.spec(part) == nil || p.spec(all) != nil || len(p.devices(4)) != 4 {
		t.Errorf("after the handover: %v, %v", p.spec(part), p.spec(all))
	}

	// Back to the first name, and a start after a crash, which leaves sockets.
	second, stopSecond := p.server, p.stop
	defer stopSecond()
	p.predecessor = second.Yield()
	p.start()
	p.exists("plugins/enflame.divvy.dev/dra.sock", true)
	if err := second.Pass("dra.sock"); err != nil {
		t.Fatal(err)
	}
	if failed := p.unprepare(part); failed != "" {
		t.Error(failed)
	}
	stopSecond()
	p.stop()
	if err := os.WriteFile(filepath.Join(p.dir, "plugins/enflame.divvy.dev/dra-next.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p.predecessor = ""
	p.start()
	p.exists("plugins/enflame.divvy.dev/dra.sock", true)
	p.exists("plugins/enflame.divvy.dev/dra-next.sock", false)
}

// TestHandoverToNone: a call is not left waiting where the successor serves no claims.
func TestHandoverToNone(t *testing.T) {
	p := newPlane(t, gcus()...)
	p.devices(4)
	p.server.Yield()
	if err := p.server.Pass(""); err != nil {
		t.Fatal(err)
	}
	client := drapb.NewDRAPluginClient(p.dial(filepath.Join(p.dir, "plugins/enflame.divvy.dev/dra.sock")))
	_, err := client.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{})
	if err == nil || !strings.Contains(err.Error(), "does not serve claims of these devices any more") {
		t.Errorf("the call is answered with %v", err)
	}
}
