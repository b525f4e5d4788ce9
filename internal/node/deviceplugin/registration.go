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

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// kubeletSocket is the name of kubelet's registration socket.
const kubeletSocket = "kubelet.sock"

// Intervals of the registration.
const (
	// callTimeout bounds one call of kubelet or of ourselves.
	callTimeout = 5 * time.Second
	// checkInterval is how often it is made sure that kubelet still listens,
	// beside what the file system tells.
	checkInterval = 5 * time.Second
	// streamGrace is how long kubelet may take from the registration to
	// ListAndWatch.
	streamGrace = 15 * time.Second
	// letGo is how long kubelet is left to notice that a stream or a listener has
	// ended, before the next registration: see stillConnected.
	letGo = 50 * time.Millisecond
)

// stillConnected is kubelet's answer to a registration on a socket whose last
// listener it has not seen ending. In that moment it forgets who was connected,
// and so it never sees that listener ending: it refuses the same path until it is
// restarted (connectClient and deregisterClient in its
// plugin/v1beta1/handler.go). Another path is the only way out.
const stillConnected = "device plugin already connected"

// errKubeletStarts ends a session because there is another kubelet.
var errKubeletStarts = errors.New("kubelet has started")

// Server offers one resource to the kubelet of this node.
type Server struct {
	dir     string
	socket  string
	service *service

	// predecessor is the path of the server that this one takes over from, ""
	// without one. It does not change once Run was called.
	predecessor string
	noticing    time.Duration
	lingering   time.Duration
	// renewing is true while the end of kubelet's stream is that of Renew.
	renewing atomic.Bool

	mu sync.Mutex
	// aside counts the paths that kubelet has refused; 0 while socket is used.
	aside int
	// conns counts kubelet's connections to the listener that is open now.
	conns *countedListener
	// registered is when kubelet last accepted the registration of the
	// listener that is open now; zero when it has not.
	registered time.Time
	// problem is why kubelet does not list the resource, nil when it does.
	problem error
	// registrations counts those that kubelet accepted.
	registrations int
}

// SocketNames returns the file names of the resources' sockets, each as the
// vendors' own plugins call theirs: the first label of the domain and the name,
// "nvidia-gpu.sock" for "nvidia.com/gpu". A resource whose name would be that of
// one before it gets its whole name instead.
func SocketNames(resources ...accel.Resource) []string {
	out := make([]string, len(resources))
	taken := map[string]bool{kubeletSocket: true}
	for i, r := range resources {
		domain, name, _ := strings.Cut(string(r), "/")
		label, _, _ := strings.Cut(domain, ".")
		out[i] = label + "-" + name + ".sock"
		if taken[out[i]] {
			out[i] = strings.ReplaceAll(string(r), "/", "_") + ".sock"
		}
		taken[out[i]] = true
	}
	return out
}

// NewServer returns the server of a resource on a socket of that name in dir,
// kubelet's device-plugins folder.
func NewServer(dir, socket string, resource accel.Resource, allocator Allocator) *Server {
	return &Server{
		dir:    dir,
		socket: filepath.Join(dir, socket),
		service: &service{
			resource:  resource,
			allocator: allocator,
			changed:   make(chan struct{}),
			cut:       make(chan struct{}),
			alone:     make(chan struct{}, 1),
			yielded:   make(chan struct{}),
			passed:    make(chan struct{}),
			left:      make(chan struct{}),
		},
		noticing: noticing, lingering: lingering,
		problem: errors.New("not registered with kubelet yet"),
	}
}

// TakeOver makes Run register beside the server on that socket, on another one. Call
// it before Run.
func (s *Server) TakeOver(socket string) { s.predecessor = filepath.Join(s.dir, socket) }

// SetUnits replaces the units that kubelet knows. The first call lets Run
// register; until then kubelet knows nothing of the resource. A list that
// kubelet would not accept is a *TooManyUnitsError and changes nothing.
func (s *Server) SetUnits(units []Unit) error { return s.service.setUnits(units) }

// Ready returns nil while kubelet is connected and watches the units, else what
// is missing.
func (s *Server) Ready() error {
	watched := s.service.watched()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.problem != nil {
		return fmt.Errorf("%s: %w", s.service.resource, s.problem)
	}
	if !watched {
		return fmt.Errorf("%s: kubelet accepted the registration but does not watch the units", s.service.resource)
	}
	return nil
}

// Alive asks the plugin's own socket as kubelet would. Before there is
// anything to serve it is alive.
func (s *Server) Alive(ctx context.Context) error {
	s.mu.Lock()
	serving := !s.registered.IsZero()
	s.mu.Unlock()
	if !serving {
		return nil
	}
	return call(ctx, s.path(), func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := pluginapi.NewDevicePluginClient(conn).GetDevicePluginOptions(ctx, &pluginapi.Empty{})
		return err
	})
}

// Registrations returns how often kubelet accepted the registration.
func (s *Server) Registrations() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.registrations
}

// Run serves until ctx ends: it waits for the first units, listens, registers,
// and begins again whenever kubelet restarts or takes the socket away. It
// returns nil when ctx ends and all that it started has stopped.
func (s *Server) Run(ctx context.Context) error {
	log := klog.FromContext(ctx).WithValues("resource", s.service.resource)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-ctx.Done():
		case <-s.service.left:
			cancel()
		}
	}()
	for {
		list, changed := s.service.current()
		if list != nil {
			break
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
	// Kubelet needs the units again before it looks at its running pods, so
	// the pause stays short.
	backoff := wait.Backoff{Duration: 10 * time.Millisecond, Factor: 2, Steps: 8, Cap: time.Second}
	pause := backoff
	var told string
	var registered bool
	for ctx.Err() == nil {
		if s.service.hasYielded() {
			break
		}
		err := s.session(ctx)
		s.mu.Lock()
		registered = !s.registered.IsZero()
		if registered {
			pause, told = backoff, ""
		}
		s.registered = time.Time{}
		s.problem = err
		switch {
		case errors.Is(err, errKubeletStarts):
			s.aside = 0
		case strings.Contains(err.Error(), stillConnected):
			s.aside++
		}
		s.mu.Unlock()
		if ctx.Err() != nil {
			break
		}
		if reason := err.Error(); reason != told {
			log.Info("Registering with kubelet again", "reason", reason)
			told = reason
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause.Step()):
		}
	}
	if registered && !s.service.hasYielded() {
		<-time.After(letGo)
	}
	return nil
}

// path is the socket that is served on.
func (s *Server) path() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	path := s.nth(s.aside)
	for n := 0; n <= s.aside; n++ {
		if s.nth(n) == s.predecessor {
			return s.nth(s.aside + 1)
		}
	}
	return path
}

// nth returns the paths that a server may use, in their order.
func (s *Server) nth(n int) string {
	if n == 0 {
		return s.socket
	}
	// No resource has a "~" in its name.
	return fmt.Sprintf("%s~%d.sock", strings.TrimSuffix(s.socket, ".sock"), n+1)
}

// session listens and registers once, and returns why that is over. The error
// is never nil.
func (s *Server) session(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch %s: %w", s.dir, err)
	}
	defer watcher.Close() //nolint:errcheck // nothing was written
	// Before looking at the sockets, so that no change is missed.
	if err := watcher.Add(s.dir); err != nil {
		return fmt.Errorf("watch %s: %w", s.dir, err)
	}
	kubelet := filepath.Join(s.dir, kubeletSocket)
	if _, err := os.Stat(kubelet); err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return fmt.Errorf("kubelet is not listening on %s", kubelet)
	}
	s.service.begin()
	own, stop, err := s.serve(ctx)
	if err != nil {
		return err
	}
	defer stop()
	// An event may be about the file that was there before.
	taken := func() bool { return !s.is(own) }
	if err := s.announce(ctx); err != nil {
		return err
	}

	ticker := time.NewTicker(checkInterval)
	defer ticker.Stop()
	var alone time.Duration
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.service.yielded:
			<-ctx.Done() // a restart of kubelet concerns the successor alone
			return ctx.Err()
		case <-s.service.alone:
			// If kubelet restarts, its sockets change first.
			pause := letGo
			if s.renewing.Swap(false) {
				pause = s.service.settling()
			}
			again = time.After(pause)
		case <-again:
			if s.service.watched() || taken() {
				continue
			}
			if err := s.announce(ctx); err != nil {
				if strings.Contains(err.Error(), stillConnected) {
					return err
				}
				s.mu.Lock()
				s.problem = err
				s.mu.Unlock()
			}
		case err, ok := <-watcher.Errors:
			if !ok {
				return errors.New("the file watch ended")
			}
			// Events may be lost, so nothing is certain: begin again.
			return fmt.Errorf("watch %s: %w", s.dir, err)
		case event, ok := <-watcher.Events:
			if !ok {
				return errors.New("the file watch ended")
			}
			switch {
			case event.Name == kubelet && event.Has(fsnotify.Create):
				return errKubeletStarts
			case event.Name == s.path() && taken():
				return fmt.Errorf("the socket was removed: %w", errKubeletStarts)
			}
		case <-ticker.C:
			if taken() {
				return errors.New("the socket is gone")
			}
			if alone += checkInterval; s.service.watched() {
				alone = 0
			}
			if _, err := os.Stat(kubelet); err == nil && alone >= streamGrace {
				return errors.New("kubelet is there but does not watch the units")
			}
		}
	}
}

// announce registers the listener that is open.
func (s *Server) announce(ctx context.Context) error {
	if err := s.register(ctx, s.path()); err != nil {
		return err
	}
	s.mu.Lock()
	s.registered, s.problem = time.Now(), nil
	s.registrations++
	s.mu.Unlock()
	klog.FromContext(ctx).Info("Registered with kubelet", "resource", s.service.resource, "socket", s.path())
	return nil
}

// vacant returns nil when nobody listens on the plugin's socket. One that somebody
// listens on is not ours to take: it may be the vendor's own plugin, or a second
// divvy-node with another state folder, and its pods would lose their plugin.
func (s *Server) vacant(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", s.path())
	if err != nil {
		return nil // not there, no socket, or the process behind it has ended
	}
	_ = conn.Close()
	return fmt.Errorf("another device plugin serves on %s; waiting until it ends", s.path())
}

// serve listens on the plugin's socket, whose file own describes. stop ends it
// and removes the socket.
func (s *Server) serve(ctx context.Context) (own fs.FileInfo, stop func(), err error) {
	if err := s.vacant(ctx); err != nil {
		return nil, nil, err
	}
	if err := os.Remove(s.path()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("remove the socket of an earlier run: %w", err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.path(), Net: "unix"})
	if err != nil {
		return nil, nil, fmt.Errorf("listen: %w", err)
	}
	// By itself it would remove whatever has the name when it is closed, which
	// may be another plugin's by then.
	listener.SetUnlinkOnClose(false)
	own, err = os.Lstat(s.path())
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("the socket is gone: %w", err), listener.Close())
	}
	counted := &countedListener{Listener: listener}
	s.mu.Lock()
	s.conns = counted
	s.mu.Unlock()
	server := grpc.NewServer(
		grpc.MaxRecvMsgSize(maxRequestBytes),
		// Handlers log with the logger that Run was given.
		grpc.UnaryInterceptor(func(rpc context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			return handler(klog.NewContext(rpc, klog.FromContext(ctx)), req)
		}),
	)
	pluginapi.RegisterDevicePluginServer(server, s.service)
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(counted); err != nil {
			klog.FromContext(ctx).Error(err, "Serving kubelet ended", "resource", s.service.resource)
		}
	})
	return own, func() {
		// Not gracefully: kubelet's ListAndWatch never ends by itself.
		server.Stop()
		serving.Wait()
		s.mu.Lock()
		s.conns = nil
		s.mu.Unlock()
		if s.is(own) {
			_ = os.Remove(s.path()) // a file that stays is taken over by the next listener
		}
	}, nil
}

// is reports whether the socket's file is still the one that own describes.
func (s *Server) is(own fs.FileInfo) bool {
	now, err := os.Lstat(s.path())
	return err == nil && os.SameFile(own, now)
}

// register asks kubelet to connect to the listener on that path.
func (s *Server) register(ctx context.Context, path string) error {
	err := call(ctx, filepath.Join(s.dir, kubeletSocket), func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
			Version:      APIVersion,
			Endpoint:     filepath.Base(path),
			ResourceName: string(s.service.resource),
			Options:      options(),
		})
		return err
	})
	if err != nil {
		return fmt.Errorf("register with kubelet: %w", err)
	}
	return nil
}

// call connects to a socket of this node for one call.
func call(ctx context.Context, socket string, do func(context.Context, *grpc.ClientConn) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // the call's own error says what matters
	return do(ctx, conn)
}
