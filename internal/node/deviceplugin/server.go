// Package deviceplugin is kubelet's side of a resource: the device-plugin gRPC
// service, its registration, and the list of units that kubelet is told.
// Which units a container gets is decided by an Allocator.
//
// The protocol is k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1.
package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// APIVersion is the version of the protocol, which registration tells kubelet.
const APIVersion = pluginapi.Version

// Allocator decides which units a container gets. Kubelet admits one pod at a
// time and waits for each answer, so an answer must not take longer than about
// a second.
type Allocator interface {
	// Prefer returns size of the available ids, all of must among them.
	Prefer(ctx context.Context, available, must []string, size int) ([]string, error)
	// Allocate returns what the container that got ids needs. A change of the
	// answer's maps is the caller's own.
	Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error)
}

// Unit is one id of the resource.
type Unit struct {
	ID        string
	Unhealthy bool
	// NUMANodes are the NUMA nodes that it is near to, for kubelet's topology
	// manager; none when that is not known or not to be weighed.
	NUMANodes []int
}

// maxListBytes is what kubelet's gRPC client accepts in one message, gRPC's
// default.
const maxListBytes = 4 << 20

// maxRequestBytes is what this server accepts: kubelet sends all free ids with
// GetPreferredAllocation, 1.3 MB for 256 000.
const maxRequestBytes = 16 << 20

// TooManyUnitsError says that kubelet would not accept the list of units.
type TooManyUnitsError struct {
	Resource accel.Resource
	Units    int
	Bytes    int
}

func (e *TooManyUnitsError) Error() string {
	return fmt.Sprintf("%s: the list of %d units takes %d bytes and kubelet accepts %d at most; choose a larger memoryUnit or fewer "+
		"replicas",
		e.Resource, e.Units, e.Bytes, maxListBytes)
}

// service is the gRPC service. It outlives the listeners that Server opens for
// it, one after the other.
type service struct {
	pluginapi.UnimplementedDevicePluginServer

	resource  accel.Resource
	allocator Allocator

	mu sync.Mutex
	// list is what kubelet is to know, nil before the first SetUnits. It is
	// replaced, never changed.
	list *pluginapi.ListAndWatchResponse
	// changed is closed and replaced whenever list is.
	changed chan struct{}
	// streams counts the open ListAndWatch calls of the listener that is open now:
	// kubelet has one.
	streams int
	// epoch counts the listeners.
	epoch int
	// cut is closed and replaced to end the open ListAndWatch calls.
	cut chan struct{}
	// alone has a token after the last ListAndWatch call has ended.
	alone chan struct{}

	// answering is held for reading by each question that is under way.
	answering sync.RWMutex
	// yielded is closed once questions are not answered here any more. Guarded by
	// answering.
	yielded chan struct{}
	// passed is closed once successor is set, which is nil where nothing answers in
	// place of this server.
	passed    chan struct{}
	successor *grpc.ClientConn
	// left is closed once the server is to end.
	left chan struct{}
}

// setUnits replaces the list, unless it is the same.
func (s *service) setUnits(units []Unit) error {
	devices := make([]pluginapi.Device, len(units))
	list := &pluginapi.ListAndWatchResponse{Devices: make([]*pluginapi.Device, len(units))}
	for i, u := range units {
		devices[i].ID, devices[i].Health = u.ID, pluginapi.Healthy
		if u.Unhealthy {
			devices[i].Health = pluginapi.Unhealthy
		}
		if len(u.NUMANodes) > 0 {
			devices[i].Topology = topologyOf(u.NUMANodes)
		}
		list.Devices[i] = &devices[i]
	}
	if size := proto.Size(list); size > maxListBytes {
		return &TooManyUnitsError{Resource: s.resource, Units: len(units), Bytes: size}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.list != nil && slices.EqualFunc(s.list.GetDevices(), list.GetDevices(), sameDevice) {
		return nil
	}
	s.list = list
	close(s.changed)
	s.changed = make(chan struct{})
	return nil
}

func topologyOf(nodes []int) *pluginapi.TopologyInfo {
	info := &pluginapi.TopologyInfo{}
	for _, n := range nodes {
		info.Nodes = append(info.Nodes, &pluginapi.NUMANode{ID: int64(n)})
	}
	return info
}

func sameDevice(a, b *pluginapi.Device) bool {
	return a.GetID() == b.GetID() && a.GetHealth() == b.GetHealth() &&
		slices.EqualFunc(a.GetTopology().GetNodes(), b.GetTopology().GetNodes(), func(x, y *pluginapi.NUMANode) bool {
			return x.GetID() == y.GetID()
		})
}

func (s *service) current() (*pluginapi.ListAndWatchResponse, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.list, s.changed
}

// begin is called before a listener opens.
func (s *service) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.epoch++
	s.streams = 0
	select {
	case <-s.alone:
	default:
	}
}

// watched reports whether kubelet watches the units.
func (s *service) watched() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.streams > 0
}

// countStream counts a ListAndWatch call, which has ended once end is called, and
// returns what cuts it off.
func (s *service) countStream() (cut <-chan struct{}, end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.streams++
	epoch := s.epoch
	return s.cut, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.epoch != epoch {
			return // of a listener before
		}
		if s.streams--; s.streams == 0 {
			select {
			case s.alone <- struct{}{}:
			default:
			}
		}
	}
}

func options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}
}

// GetDevicePluginOptions tells kubelet to ask GetPreferredAllocation.
func (s *service) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return options(), nil
}

// ListAndWatch sends the list of units now and after each change, until kubelet
// hangs up or the server stops. It never returns an error of its own: kubelet
// would take all units for unhealthy.
func (s *service) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	cut, end := s.countStream()
	defer end()
	for {
		list, changed := s.current()
		if list != nil && !s.hasYielded() {
			if err := stream.Send(list); err != nil {
				return err
			}
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-cut:
			return nil
		case <-changed:
		}
	}
}

// GetPreferredAllocation names the units that kubelet then asks Allocate for.
func (s *service) GetPreferredAllocation(ctx context.Context,
	r *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	next, done, err := s.answerer(ctx)
	if err != nil {
		return nil, s.refuse(ctx, err)
	}
	defer done()
	if next != nil {
		return next.GetPreferredAllocation(ctx, r)
	}
	answer := &pluginapi.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		ids, err := s.allocator.Prefer(ctx, c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize()))
		if err != nil {
			return nil, s.refuse(ctx, err)
		}
		answer.ContainerResponses = append(answer.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return answer, nil
}

// Allocate answers what the containers need.
func (s *service) Allocate(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	next, done, err := s.answerer(ctx)
	if err != nil {
		return nil, s.refuse(ctx, err)
	}
	defer done()
	if next != nil {
		return next.Allocate(ctx, r)
	}
	answer := &pluginapi.AllocateResponse{}
	for _, c := range r.GetContainerRequests() {
		one, err := s.allocator.Allocate(ctx, c.GetDevicesIds())
		if err != nil {
			return nil, s.refuse(ctx, err)
		}
		answer.ContainerResponses = append(answer.ContainerResponses, one)
	}
	return answer, nil
}

// refuse logs an error where it leaves the program and gives it the form that
// kubelet puts into the pod's status.
func (s *service) refuse(ctx context.Context, err error) error {
	klog.FromContext(ctx).Error(err, "Rejected an allocation", "resource", s.resource)
	code := codes.ResourceExhausted
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		code = codes.DeadlineExceeded
	}
	text := err.Error()
	if prefix := string(s.resource) + ": "; !strings.HasPrefix(text, prefix) {
		text = prefix + text
	}
	return status.Error(code, text)
}
