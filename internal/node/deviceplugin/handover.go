package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// A server hands its resource over to a successor, in this process or another one,
// and kubelet has a device plugin for the resource all the time:
//
//	Yield   the server stops answering; kubelet's questions wait
//	        the successor registers on a path of its own (TakeOver)
//	Pass    the questions that wait, and later ones, go to the successor
//	Leave   the server makes kubelet drop it
//	Renew   the successor registers again if Leave says so
//
// From 1.37 on kubelet keeps a connection for each path. Earlier releases keep one
// for each resource, the newest, and treat the end of any stream of the resource as
// the end of that one. See docs/design/029-rolling-update.md.

// Durations of a handover.
const (
	// patience is how long a question of kubelet waits for a successor.
	patience = 10 * time.Second
	// noticing is how long kubelet may take to close the connection of a stream
	// that has ended, beside what service.settling says. It takes a millisecond on a
	// machine that has nothing else to do.
	noticing = 2 * time.Second
	// lingering is how long kubelet may take, on a busy machine, from choosing the
	// connection for a question to sending it. The end of a stream closes the
	// connection, and a question on it fails.
	lingering = time.Second
	// perUnit is how long kubelet may take for one entry of a list: some
	// microseconds, while it admits pods.
	perUnit = 20 * time.Microsecond
)

// Yield stops the server from answering and returns once the questions under way are
// answered. It returns the name of the socket that the server listens on, "" if it
// does not listen.
func (s *Server) Yield() (socket string) {
	s.service.answering.Lock()
	close(s.service.yielded)
	s.service.answering.Unlock()
	s.mu.Lock()
	listening := s.conns != nil
	s.mu.Unlock()
	if !listening {
		return ""
	}
	return filepath.Base(s.path())
}

// Socket returns the name of the socket on which kubelet watches the units, "" if
// kubelet does not watch them.
func (s *Server) Socket() string {
	if !s.service.watched() {
		return ""
	}
	return filepath.Base(s.path())
}

// Pass forwards kubelet's questions to the server on that socket, in the same folder.
// This server has yielded. Without a socket the questions fail.
func (s *Server) Pass(socket string) error {
	defer close(s.service.passed)
	if socket == "" {
		return nil
	}
	conn, err := grpc.NewClient("unix://"+filepath.Join(s.dir, socket), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxRequestBytes)))
	if err != nil {
		return fmt.Errorf("connect to %s: %w", socket, err)
	}
	s.service.successor = conn
	return nil
}

// Leave ends the server after Pass, in such a way that kubelet continues with the
// successor. It reports whether kubelet has noticed the end; if not, the successor
// has to Renew.
func (s *Server) Leave(ctx context.Context) (noticed bool) {
	defer close(s.service.left)
	s.mu.Lock()
	conns := s.conns
	s.mu.Unlock()
	if !s.service.watched() || conns == nil {
		return true
	}
	if err := s.distract(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Kubelet may drop the successor, which then registers again", "resource", s.service.resource)
	}
	sleep(ctx, s.lingering)
	s.service.drain()
	if s.service.successor != nil {
		defer s.service.successor.Close() //nolint:errcheck // nothing is lost
	}
	s.service.cutOff()
	for end := time.Now().Add(s.noticing + s.service.settling()); conns.open.Load() > 0; {
		if time.Now().After(end) || !sleep(ctx, time.Millisecond) {
			return false
		}
	}
	return true
}

// Renew makes the server register again soon, on the same socket. Kubelet keeps the
// units and the connection until then.
func (s *Server) Renew() {
	// Kubelet notices the end of a stream once it has taken in the list before.
	time.AfterFunc(s.service.settling(), func() {
		s.renewing.Store(true)
		s.service.cutOff()
	})
}

// distract keeps kubelet before 1.37 from dropping the successor when this server
// ends. It registers a socket on which no device plugin answers. Kubelet replaces its
// entry for the resource by that connection and removes the entry when the connection
// fails; the successor's stays in use. The end of this server then finds no entry.
// Later releases have an entry for each path, so nothing changes there.
func (s *Server) distract(ctx context.Context) error {
	path := strings.TrimSuffix(s.socket, ".sock") + "~0.sock"
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "unix", path)
	if err != nil {
		return err
	}
	nothing := grpc.NewServer()
	var serving sync.WaitGroup
	serving.Go(func() { _ = nothing.Serve(listener) }) // until it is stopped
	defer serving.Wait()
	defer nothing.Stop()
	if s.register(ctx, path) == nil {
		return errors.New("kubelet has accepted a registration without a device plugin")
	}
	return nil
}

// answerer returns the successor if it is to answer a question, nil if this server
// is. Call done afterwards.
func (s *service) answerer(ctx context.Context) (next pluginapi.DevicePluginClient, done func(), err error) {
	s.answering.RLock()
	if !s.hasYielded() {
		return nil, s.answering.RUnlock, nil
	}
	defer func() {
		if err != nil {
			s.answering.RUnlock()
		}
	}()
	select {
	case <-s.passed:
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	case <-time.After(patience):
		return nil, nil, fmt.Errorf("no answer within %v: divvy-node on this node is being replaced", patience)
	}
	if s.successor == nil {
		return nil, nil, errors.New("the node does not offer the resource any more")
	}
	return pluginapi.NewDevicePluginClient(s.successor), s.answering.RUnlock, nil
}

// drain waits for the questions under way.
func (s *service) drain() {
	s.answering.Lock()
	s.answering.Unlock() //nolint:gocritic,staticcheck // those that hold it for reading have ended
}

func (s *service) hasYielded() bool {
	select {
	case <-s.yielded:
		return true
	default:
		return false
	}
}

// settling is how long kubelet is left to take in a list, or to notice that a
// stream has ended.
func (s *service) settling() time.Duration {
	list, _ := s.current()
	return letGo + time.Duration(len(list.GetDevices()))*perUnit
}

// cutOff ends the open ListAndWatch calls.
func (s *service) cutOff() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.cut)
	s.cut = make(chan struct{})
}

// countedListener counts the connections that are open.
type countedListener struct {
	net.Listener
	open atomic.Int64
}

// Accept implements net.Listener.
func (l *countedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.open.Add(1)
	return &countedConn{Conn: conn, closed: sync.OnceFunc(func() { l.open.Add(-1) })}, nil
}

type countedConn struct {
	net.Conn
	closed func()
}

// Close implements net.Conn.
func (c *countedConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
