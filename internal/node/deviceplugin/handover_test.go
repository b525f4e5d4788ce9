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
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// manager keeps connections to device plugins as kubelet's device manager does: by
// path, as from 1.37 on, or the newest of a resource, as before.
type manager struct {
	pluginapi.UnimplementedRegistrationServer

	t      *testing.T
	dir    string
	byPath bool
	server *grpc.Server
	work   sync.WaitGroup

	mu       sync.Mutex
	newest   *plugin            // what kubelet before 1.37 remembers
	paths    map[string]*plugin // what kubelet from 1.37 on remembers
	endpoint *plugin            // what is asked
	healthy  int
	lists    int
	gaps     []time.Duration // how long there was no healthy unit
	gap      time.Time
	accepted int
}

type plugin struct {
	path    string
	conn    *grpc.ClientConn
	client  pluginapi.DevicePluginClient
	stopped bool
}

func startManager(t *testing.T, byPath bool) *manager {
	t.Helper()
	dir, err := os.MkdirTemp("", "dp") //nolint:usetesting // a socket's path has 107 characters at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	m := &manager{t: t, dir: dir, byPath: byPath, server: grpc.NewServer(), paths: map[string]*plugin{}}
	l, err := net.Listen("unix", filepath.Join(dir, kubeletSocket))
	if err != nil {
		t.Fatal(err)
	}
	pluginapi.RegisterRegistrationServer(m.server, m)
	m.work.Go(func() { _ = m.server.Serve(l) })
	t.Cleanup(func() {
		m.server.Stop()
		m.mu.Lock()
		if m.endpoint != nil {
			_ = m.endpoint.conn.Close()
		}
		m.mu.Unlock()
		m.work.Wait()
	})
	return m
}

func (m *manager) Register(ctx context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	path := filepath.Join(m.dir, r.GetEndpoint())
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	p := &plugin{path: path, conn: conn, client: pluginapi.NewDevicePluginClient(conn)}
	m.mu.Lock()
	if !m.byPath {
		m.newest = p
	}
	m.mu.Unlock()
	if _, err := p.client.GetDevicePluginOptions(ctx, &pluginapi.Empty{}); err != nil {
		m.mu.Lock()
		m.newest = nil
		m.mu.Unlock()
		return nil, errors.Join(err, conn.Close())
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.byPath && m.paths[path] != nil {
		return nil, fmt.Errorf("%s: %s", stillConnected, path)
	}
	m.paths[path], m.endpoint = p, p
	m.accepted++
	m.work.Go(func() { m.watch(p) })
	return &pluginapi.Empty{}, nil
}

func (m *manager) watch(p *plugin) {
	if stream, err := p.client.ListAndWatch(context.Background(), &pluginapi.Empty{}); err == nil {
		for {
			list, err := stream.Recv()
			if err != nil {
				break
			}
			m.mu.Lock()
			m.lists++
			m.healthy = len(list.GetDevices())
			if !m.gap.IsZero() && m.healthy > 0 {
				m.gaps = append(m.gaps, time.Since(m.gap))
				m.gap = time.Time{}
			}
			m.mu.Unlock()
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	ended := p
	if !m.byPath {
		if ended = m.newest; ended == nil {
			return
		}
		m.newest = nil
		m.endpoint.stopped = true
	}
	delete(m.paths, p.path)
	_ = ended.conn.Close()
	if m.byPath {
		for _, other := range m.paths {
			m.endpoint = other
		}
		if len(m.paths) > 0 {
			return
		}
	}
	m.healthy, m.gap = 0, time.Now()
}

// admit asks what kubelet asks for a container and returns who has answered.
func (m *manager) admit() (string, error) {
	m.mu.Lock()
	p, healthy := m.endpoint, m.healthy
	stopped := p != nil && p.stopped
	m.mu.Unlock()
	switch {
	case healthy == 0:
		return "", errors.New("no healthy devices present")
	case stopped:
		return "", errors.New("endpoint stopped")
	}
	ctx, cancel := context.WithTimeout(context.Background(), soonest)
	defer cancel()
	preferred, err := p.client.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
		ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: []string{"0", "1"}, AllocationSize: 1}},
	})
	if err != nil {
		return "", err
	}
	m.mu.Lock()
	p = m.endpoint // as kubelet, which looks again
	m.mu.Unlock()
	answer, err := p.client.Allocate(ctx, &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: preferred.GetContainerResponses()[0].GetDeviceIDs()}},
	})
	if err != nil {
		return "", err
	}
	return answer.GetContainerResponses()[0].GetEnvs()["BY"], nil
}

// soonest is how long an answer may take, with what a handover may add.
const soonest = 20 * time.Second

// named is an Allocator that says who it is, and counts its answers.
type named struct {
	name    string
	answers *atomic.Int64
}

func (n named) Prefer(_ context.Context, available, _ []string, size int) ([]string, error) {
	n.answers.Add(1)
	return available[:size], nil
}

func (n named) Allocate(context.Context, []string) (*pluginapi.ContainerAllocateResponse, error) {
	n.answers.Add(1)
	return &pluginapi.ContainerAllocateResponse{Envs: map[string]string{"BY": n.name}}, nil
}

// life is a server that runs.
type life struct {
	*Server
	answers atomic.Int64
	cancel  context.CancelFunc
	ended   chan error
}

func (m *manager) begin(name string, predecessor *life) *life {
	m.t.Helper()
	l := &life{ended: make(chan error, 1)}
	l.Server = NewServer(m.dir, "gcu.sock", resource, named{name, &l.answers})
	l.lingering = 100 * time.Millisecond // questions are sent at once, on a busy machine too
	if !m.byPath {
		l.noticing = 300 * time.Millisecond // it will not
	}
	if predecessor != nil {
		l.TakeOver(filepath.Base(predecessor.path()))
	}
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	go func() { l.ended <- l.Run(ctx) }()
	m.t.Cleanup(cancel)
	if err := l.SetUnits([]Unit{{ID: "0"}, {ID: "1"}}); err != nil {
		m.t.Fatal(err)
	}
	eventually(m.t, name+" is watched", func() bool { return l.Ready() == nil })
	return l
}

// kinds are the ways in which kubelet keeps connections, by whether it does so by
// path.
var kinds = map[string]bool{"kubelet before 1.37": false, "kubelet from 1.37 on": true}

// TestHandoverWithoutAGap hands a resource over thirty times while kubelet asks
// without a pause: each question is answered, by one server alone, and kubelet
// never has no healthy unit.
func TestHandoverWithoutAGap(t *testing.T) {
	for name, byPath := range kinds {
		t.Run(name, func(t *testing.T) {
			m := startManager(t, byPath)
			now := m.begin("server 0", nil)
			eventually(t, "kubelet has the list", func() bool { _, err := m.admit(); return err == nil })
			var asking sync.WaitGroup
			var stop atomic.Bool
			var asked, failed atomic.Int64
			asking.Go(func() {
				for !stop.Load() {
					if _, err := m.admit(); err != nil {
						failed.Add(1)
						t.Error(err)
					}
					asked.Add(1)
				}
			})
			handovers := int64(30)
			if !m.byPath {
				handovers = 8 // each takes as long as kubelet may take to notice
			}
			for i := int64(1); i <= handovers; i++ {
				socket := now.Yield()
				if socket == "" {
					t.Fatalf("server %d is not watched", i-1)
				}
				last := now.answers.Load()
				next := m.begin(fmt.Sprint("server ", i), now)
				if err := now.Pass(next.Socket()); err != nil {
					t.Fatal(err)
				}
				if noticed := now.Leave(t.Context()); noticed != m.byPath {
					t.Errorf("handover %d: kubelet noticed: %v", i, noticed)
				} else if !noticed {
					before := next.Registrations()
					next.Renew()
					eventually(t, "it is registered again", func() bool { return next.Registrations() > before && next.Ready() == nil })
				}
				if err := <-now.ended; err != nil {
					t.Fatal(err)
				}
				if n := now.answers.Load(); n != last {
					t.Errorf("server %d gave %d answers after it had yielded", i-1, n-last)
				}
				if _, err := os.Lstat(filepath.Join(m.dir, socket)); err == nil {
					t.Errorf("server %d left its socket", i-1)
				}
				now = next
			}
			stop.Store(true)
			asking.Wait()
			m.mu.Lock()
			gaps := m.gaps
			m.mu.Unlock()
			t.Logf("%d handovers, %d admissions, %d failed, gaps %v", handovers, asked.Load(), failed.Load(), gaps)
			if len(gaps) > 0 || asked.Load() < handovers {
				t.Errorf("%d admissions, and kubelet had no healthy unit for %v", asked.Load(), gaps)
			}
			// Kubelet takes the end of the last one for what it is.
			now.cancel()
			if err := <-now.ended; err != nil {
				t.Fatal(err)
			}
			eventually(t, "kubelet has no healthy unit", func() bool {
				_, err := m.admit()
				return err != nil && strings.Contains(err.Error(), "no healthy devices")
			})
		})
	}
}

// TestQuestionWaitsForASuccessor: what kubelet asks after Yield is answered by the
// successor, and fails where there is none.
func TestQuestionWaitsForASuccessor(t *testing.T) {
	for name, byPath := range kinds {
		t.Run(name, func(t *testing.T) {
			m := startManager(t, byPath)
			first := m.begin("first", nil)
			eventually(t, "kubelet has the list", func() bool { _, err := m.admit(); return err == nil })
			first.Yield()
			answered := make(chan string, 1)
			go func() {
				by, err := m.admit()
				answered <- fmt.Sprint(by, err)
			}()
			select {
			case by := <-answered:
				t.Fatalf("answered before there was a successor: %s", by)
			case <-time.After(100 * time.Millisecond):
			}
			second := m.begin("second", first)
			if err := first.Pass(second.Socket()); err != nil {
				t.Fatal(err)
			}
			if by := <-answered; by != "second<nil>" {
				t.Errorf("answered by %s", by)
			}
			second.Yield()
			go func() {
				_, err := m.admit()
				answered <- fmt.Sprint(err)
			}()
			if err := second.Pass(""); err != nil {
				t.Fatal(err)
			}
			if err := <-answered; !strings.Contains(err, "the node does not offer the resource any more") {
				t.Errorf("without a successor: %s", err)
			}
		})
	}
}

// TestQuestionSentLate: kubelet chose the connection of the first before the second
// registered, and was then kept from sending its question for a while.
func TestQuestionSentLate(t *testing.T) {
	for name, byPath := range kinds {
		t.Run(name, func(t *testing.T) {
			m := startManager(t, byPath)
			first := m.begin("first", nil)
			first.lingering = 2 * time.Second
			eventually(t, "kubelet has the list", func() bool { _, err := m.admit(); return err == nil })
			m.mu.Lock()
			chosen := m.endpoint.client
			m.mu.Unlock()
			first.Yield()
			second := m.begin("second", first)
			if err := first.Pass(second.Socket()); err != nil {
				t.Fatal(err)
			}
			left := make(chan struct{})
			go func() {
				defer close(left)
				first.Leave(t.Context())
			}()
			time.Sleep(200 * time.Millisecond)
			answer, err := chosen.Allocate(t.Context(), &pluginapi.AllocateRequest{
				ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{"0"}}},
			})
			if err != nil {
				t.Errorf("the late question: %v", err)
			} else if by := answer.GetContainerResponses()[0].GetEnvs()["BY"]; by != "second" {
				t.Errorf("answered by %q, want the second", by)
			}
			<-left
		})
	}
}

// TestDeathAfterTheSuccessorRegistered: kubelet before 1.37 takes the death of the
// first for that of the second, which notices and registers again.
func TestDeathAfterTheSuccessorRegistered(t *testing.T) {
	for name, byPath := range kinds {
		t.Run(name, func(t *testing.T) {
			m := startManager(t, byPath)
			first := m.begin("first", nil)
			eventually(t, "kubelet has the list", func() bool { _, err := m.admit(); return err == nil })
			first.Yield()
			second := m.begin("second", first)
			first.cancel()
			if err := <-first.ended; err != nil {
				t.Error(err)
			}
			eventually(t, "the second serves", func() bool {
				by, err := m.admit()
				return err == nil && by == "second" && second.Ready() == nil
			})
			third := m.begin("third", second)
			second.Yield()
			third.cancel() // it dies before it was passed to
			if err := <-third.ended; err != nil {
				t.Error(err)
			}
			if err := second.Pass(""); err != nil {
				t.Fatal(err)
			}
			second.Leave(t.Context())
			fourth := m.begin("fourth", second)
			eventually(t, "the fourth serves", func() bool {
				by, err := m.admit()
				return err == nil && by == "fourth" && fourth.Ready() == nil
			})
		})
	}
}
