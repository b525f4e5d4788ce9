package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// stubKubelet accepts registrations on the socket of a kubelet and then calls
// the plugin as kubelet does.
type stubKubelet struct {
	pluginapi.UnimplementedRegistrationServer

	t      *testing.T
	dir    string
	server *grpc.Server
	refuse error
	// connected makes kubelet refuse the first so many paths.
	connected int

	mu       sync.Mutex
	requests []*pluginapi.RegisterRequest
	lists    []*pluginapi.ListAndWatchResponse
	cancel   context.CancelFunc
	watching sync.WaitGroup
}

func startKubelet(t *testing.T, dir string, refuse error) *stubKubelet {
	t.Helper()
	k := &stubKubelet{t: t, dir: dir, server: grpc.NewServer(), refuse: refuse}
	path := filepath.Join(dir, kubeletSocket)
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	pluginapi.RegisterRegistrationServer(k.server, k)
	k.watching.Go(func() { _ = k.server.Serve(l) })
	t.Cleanup(k.stop)
	return k
}

// stop ends kubelet as a crash does: connections break, the socket stays.
func (k *stubKubelet) stop() {
	k.mu.Lock()
	if k.cancel != nil {
		k.cancel()
	}
	k.mu.Unlock()
	k.server.Stop()
	k.watching.Wait()
}

func (k *stubKubelet) Register(_ context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	if k.refuse != nil {
		return nil, k.refuse
	}
	ctx, cancel := context.WithCancel(context.Background())
	k.mu.Lock()
	defer k.mu.Unlock()
	k.requests = append(k.requests, r)
	if len(k.requests) <= k.connected {
		cancel()
		return nil, fmt.Errorf("device plugin already connected: %s", filepath.Join(k.dir, r.GetEndpoint()))
	}
	k.cancel = cancel
	k.watching.Go(func() { k.watch(ctx, r.GetEndpoint()) })
	return &pluginapi.Empty{}, nil
}

func (k *stubKubelet) dial(endpoint string) (pluginapi.DevicePluginClient, func()) {
	conn, err := grpc.NewClient("unix://"+filepath.Join(k.dir, endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		k.t.Error(err)
		return nil, func() {}
	}
	return pluginapi.NewDevicePluginClient(conn), func() { _ = conn.Close() }
}

func (k *stubKubelet) watch(ctx context.Context, endpoint string) {
	client, done := k.dial(endpoint)
	defer done()
	stream, err := client.ListAndWatch(ctx, &pluginapi.Empty{})
	if err != nil {
		return // it registers again, as with kubelet
	}
	for {
		list, err := stream.Recv()
		if err != nil {
			return
		}
		k.mu.Lock()
		k.lists = append(k.lists, list)
		k.mu.Unlock()
	}
}

func (k *stubKubelet) last() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.lists) == 0 {
		return ""
	}
	var out []string
	for _, d := range k.lists[len(k.lists)-1].GetDevices() {
		out = append(out, d.GetID()+"="+d.GetHealth())
	}
	return strings.Join(out, " ")
}

// scripted is an Allocator that takes the first ids.
type scripted struct{ err error }

func (s scripted) Prefer(_ context.Context, available, _ []string, size int) ([]string, error) {
	if s.err != nil {
		return nil, s.err
	}
	return available[:size], nil
}

func (s scripted) Allocate(_ context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	if s.err != nil {
		return nil, s.err
	}
	return &pluginapi.ContainerAllocateResponse{Envs: map[string]string{"IDS": strings.Join(ids, ",")}}, nil
}

func run(t *testing.T, s *Server) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

const resource = "enflame.com/gcu-memory"

func TestServerFollowsKubelet(t *testing.T) {
	dir := t.TempDir()
	s := NewServer(dir, "gcu.sock", resource, scripted{})
	run(t, s)
	if err := s.Ready(); err == nil {
		t.Error("ready before there is anything to offer")
	}
	if err := s.SetUnits([]Unit{{ID: "0"}, {ID: "1", Unhealthy: true}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it says that kubelet is not there", func() bool {
		err := s.Ready()
		return err != nil && strings.Contains(err.Error(), "kubelet is not listening")
	})

	k := startKubelet(t, dir, nil)
	eventually(t, "kubelet knows the units", func() bool { return k.last() == "0=Healthy 1=Unhealthy" })
	eventually(t, "it is ready", func() bool { return s.Ready() == nil })
	if err := s.Alive(context.Background()); err != nil {
		t.Error(err)
	}
	r := k.requests[0]
	if r.GetResourceName() != resource || r.GetVersion() != "v1beta1" || !r.GetOptions().GetGetPreferredAllocationAvailable() {
		t.Errorf("registered as %v", r)
	}
	if err := s.SetUnits([]Unit{{ID: "0", Unhealthy: true}, {ID: "1"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "kubelet learns of the change", func() bool { return k.last() == "0=Unhealthy 1=Healthy" })

	// A kubelet that starts removes every socket in the folder and listens on a
	// new one of its own.
	k.stop()
	eventually(t, "it is not ready without kubelet", func() bool { return s.Ready() != nil })
	if err := os.RemoveAll(s.socket); err != nil {
		t.Fatal(err)
	}
	k = startKubelet(t, dir, nil)
	eventually(t, "the new kubelet knows the units", func() bool { return k.last() == "0=Unhealthy 1=Healthy" })
	eventually(t, "it is ready again", func() bool { return s.Ready() == nil })
	if n := s.Registrations(); n != 2 {
		t.Errorf("%d registrations, want 2", n)
	}
}

func TestServerTakesOverAStaleSocket(t *testing.T) {
	dir := t.TempDir()
	s := NewServer(dir, "gcu.sock", resource, scripted{})
	if err := os.WriteFile(s.socket, []byte("of a run that was killed"), 0o600); err != nil {
		t.Fatal(err)
	}
	k := startKubelet(t, dir, nil)
	run(t, s)
	if err := s.SetUnits([]Unit{{ID: "0"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "kubelet knows the units", func() bool { return k.last() == "0=Healthy" })
}

func TestServerRetriesARefusedRegistration(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir, errors.New("unsupported version"))
	s := NewServer(dir, "gcu.sock", resource, scripted{})
	run(t, s)
	if err := s.SetUnits([]Unit{{ID: "0"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it says why", func() bool {
		err := s.Ready()
		return err != nil && strings.Contains(err.Error(), "unsupported version")
	})
	k.stop()
	k = startKubelet(t, dir, nil)
	eventually(t, "kubelet knows the units", func() bool { return k.last() == "0=Healthy" })
}

func TestServerRefusesAListThatKubeletWouldNot(t *testing.T) {
	s := NewServer(t.TempDir(), "gcu.sock", resource, scripted{})
	units := make([]Unit, 256000)
	for i := range units {
		units[i].ID = fmt.Sprintf("%03x", i)[:3]
	}
	if err := s.SetUnits(units); err != nil {
		t.Errorf("8 cards of 32 GB in units of 0.001 GB: %v", err)
	}
	for i := range units {
		units[i].ID = "GCU-U53000090104-_-14"
	}
	var tooMany *TooManyUnitsError
	if err := s.SetUnits(units); !errors.As(err, &tooMany) || tooMany.Units != 256000 || tooMany.Bytes <= maxListBytes {
		t.Errorf("want *TooManyUnitsError, got %v", err)
	}
	if list, _ := s.service.current(); list.GetDevices()[0].GetID() != "000" {
		t.Error("the refused list replaced the one before")
	}
}

func TestServiceAnswers(t *testing.T) {
	dir := t.TempDir()
	k := startKubelet(t, dir, nil)
	s := NewServer(dir, "gcu.sock", resource, scripted{})
	run(t, s)
	if err := s.SetUnits([]Unit{{ID: "0"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is ready", func() bool { return s.Ready() == nil })
	client, done := k.dial(filepath.Base(s.socket))
	defer done()
	ctx := context.Background()

	many := make([]string, 256000)
	for i := range many {
		many[i] = formatted(i)
	}
	p, err := client.GetPreferredAllocation(ctx,
		&pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: many, AllocationSize: 4000},
		}})
	if err != nil {
		t.Fatalf("a request with 256 000 free ids: %v", err)
	}
	if got := len(p.GetContainerResponses()[0].GetDeviceIDs()); got != 4000 {
		t.Errorf("%d ids preferred, want 4000", got)
	}
	a, err := client.Allocate(ctx, &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{
		{DevicesIds: []string{"a"}}, {DevicesIds: []string{"b", "c"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if got := a.GetContainerResponses()[1].GetEnvs()["IDS"]; got != "b,c" || len(a.GetContainerResponses()) != 2 {
		t.Errorf("answer is %v", a)
	}
}

func formatted(i int) string { return fmt.Sprintf("%05d", i) }

func TestServiceRefusesWithTheReason(t *testing.T) {
	sv := &service{resource: resource, allocator: scripted{err: errors.New("device a has 3 of the 4 units")}}
	_, err := sv.Allocate(context.Background(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{}}})
	if status.Code(err) != codes.ResourceExhausted ||
		!strings.Contains(err.Error(), "enflame.com/gcu-memory: device a has 3 of the 4 units") {
		t.Errorf("Allocate: %v", err)
	}
	sv.allocator = scripted{err: errors.New("enflame.com/gcu-memory: nothing is free")}
	_, err = sv.Allocate(context.Background(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{}}})
	if got := status.Convert(err).Message(); got != "enflame.com/gcu-memory: nothing is free" {
		t.Errorf("the resource is named otherwise than once: %q", got)
	}
	_, err = sv.GetPreferredAllocation(context.Background(),
		&pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{}}})
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("GetPreferredAllocation: %v", err)
	}
}
