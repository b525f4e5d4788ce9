package dra

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	drapbv1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// A server hands its claims over to a successor, in this process or another one, and kubelet has
// the driver all the time: it calls the one that was registered last.
//
//	Yield   the server stops deciding and publishing; kubelet's calls wait
//	        the successor registers on a socket of another name
//	Pass    the calls that wait, and later ones, go to the successor
//	Leave   the server waits until they are answered
//
// Only one of them decides at any time, which the lock of the node sees to.

// The instance of a driver is part of the names of its sockets. A successor takes the one that
// its predecessor does not have.
const (
	firstInstance types.UID = ""
	otherInstance types.UID = "next"
)

// lingering is how long kubelet may take from choosing the server for a call to calling it.
const lingering = time.Second

// socketOf is the name of the socket of an instance.
func socketOf(instance types.UID) string {
	if instance == firstInstance {
		return "dra.sock"
	}
	return "dra-" + string(instance) + ".sock"
}

// Registers reports whether drivers can be registered with kubelet, whose folder it is: the daemon may
// see only a part of it.
func Registers(kubeletDir string) bool {
	info, err := os.Stat(filepath.Join(kubeletDir, "plugins_registry"))
	return err == nil && info.IsDir()
}

// Sockets are the paths that a vendor's driver may have of sockets, below kubelet's folder.
func Sockets(vendor string) []string {
	driver := wire.Driver(vendor)
	registration := filepath.Base(kubeletplugin.RollingUpdateRegistrarSocketFile("", driver, otherInstance))
	return []string{
		filepath.Join("plugins_registry", driver+"-reg.sock"), filepath.Join("plugins", driver, socketOf(firstInstance)),
		filepath.Join("plugins_registry", registration), filepath.Join("plugins", driver, socketOf(otherInstance)),
	}
}

// instance returns the instance that the server is, and removes the sockets of the other one
// unless the predecessor serves on them.
func (s *Server) instance() (types.UID, error) {
	switch sockets := Sockets(s.o.Vendor); s.o.Predecessor {
	case socketOf(firstInstance):
		return otherInstance, nil
	case socketOf(otherInstance):
		return firstInstance, nil
	default:
		var failed []error
		for _, socket := range sockets[2:] {
			if err := os.Remove(filepath.Join(s.o.KubeletDir, socket)); !errors.Is(err, fs.ErrNotExist) {
				failed = append(failed, err)
			}
		}
		return firstInstance, errors.Join(failed...)
	}
}

// door is where kubelet's calls come in. It is safe for concurrent use.
type door struct {
	// yielding ends with Yield, which interrupts the calls under way.
	yielding context.Context
	yield    context.CancelFunc
	// answering is held for reading while this server answers a call.
	answering sync.RWMutex
	// passed is closed when successor is set, which stays nil if there is none.
	passed    chan struct{}
	successor *grpc.ClientConn
	// calls are under way, here or with the successor.
	calls atomic.Int64
}

func newDoor() *door {
	d := &door{passed: make(chan struct{})}
	d.yielding, d.yield = context.WithCancel(context.Background())
	return d
}

// until returns a context that ends with ctx, and when the server yields.
func (d *door) until(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(d.yielding, cancel)
	return ctx, func() { stop(); cancel() }
}

// intercept answers a call about claims, or lets the successor do so. A call that Yield has
// interrupted is repeated there: all of them may be.
func (d *door) intercept(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	answer := answerTo(request)
	if answer == nil {
		return handler(ctx, request)
	}
	d.calls.Add(1)
	defer d.calls.Add(-1)
	if out, ours, err := d.answer(ctx, request, handler); ours {
		return out, err
	}
	select {
	case <-d.passed:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if d.successor == nil {
		return nil, status.Error(codes.Unavailable, "divvy-node on this node does not serve claims of these devices any more")
	}
	return answer, d.successor.Invoke(ctx, info.FullMethod, request, answer)
}

// answer answers a call unless the server has yielded before its end.
func (d *door) answer(ctx context.Context, request any, handler grpc.UnaryHandler) (out any, ours bool, err error) {
	d.answering.RLock()
	defer d.answering.RUnlock()
	if d.yielding.Err() != nil {
		return nil, false, nil
	}
	ctx, cancel := d.until(ctx)
	defer cancel()
	out, err = handler(ctx, request)
	return out, d.yielding.Err() == nil, err
}

// answerTo returns an empty answer to a call about claims, nil for other calls.
func answerTo(request any) any {
	switch request.(type) {
	case *drapb.NodePrepareResourcesRequest:
		return &drapb.NodePrepareResourcesResponse{}
	case *drapb.NodeUnprepareResourcesRequest:
		return &drapb.NodeUnprepareResourcesResponse{}
	case *drapbv1beta1.NodePrepareResourcesRequest:
		return &drapbv1beta1.NodePrepareResourcesResponse{}
	case *drapbv1beta1.NodeUnprepareResourcesRequest:
		return &drapbv1beta1.NodeUnprepareResourcesResponse{}
	}
	return nil
}

// Yield stops the server from deciding and publishing, and returns once it has stopped: the name
// of its socket, "" if it has none.
func (s *Server) Yield() (socket string) {
	s.door.yield()
	s.door.answering.Lock() // the calls under way have ended then
	defer s.door.answering.Unlock()
	s.publishing.Lock()
	defer s.publishing.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.socket
}

// Socket returns the name of the socket that kubelet calls, or an error while the driver is not
// registered.
func (s *Server) Socket() (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.socket == "" {
		return "", fmt.Errorf("driver %s does not listen yet", wire.Driver(s.o.Vendor))
	}
	return s.socket, s.unregistered
}

// Pass forwards kubelet's calls to the server on that socket. This server has yielded. Without a
// socket the calls fail.
func (s *Server) Pass(socket string) error {
	defer close(s.door.passed)
	if socket == "" {
		return nil
	}
	path := filepath.Join(s.o.KubeletDir, "plugins", wire.Driver(s.o.Vendor), socket)
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to %s: %w", path, err)
	}
	s.door.successor = conn
	return nil
}

// Leave returns when kubelet's calls are answered, after Pass, or when ctx ends. End Run then.
func (s *Server) Leave(ctx context.Context) {
	for pause := lingering; pause == lingering || s.door.calls.Load() > 0; pause = time.Millisecond {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
	if s.door.successor != nil {
		_ = s.door.successor.Close() // nothing is lost
	}
}
