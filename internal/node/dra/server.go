package dra

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/utils/ptr"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

const (
	// DefaultPatience is how long Prepare waits for devices that another holder may be
	// about to leave; kubelet waits 45 s, and repeats a Prepare that failed after a minute.
	DefaultPatience = 25 * time.Second
	// firstPause is the pause before the second attempt; each is twice as long as the one before,
	// as kubelet admits no pod during an attempt.
	firstPause = 250 * time.Millisecond
	// releasedFor is how long a claim is remembered that was released: a Prepare that was
	// delayed until then would revive it.
	releasedFor = 10 * time.Minute
	// probeInterval is the pause between two attempts to find out what the API server keeps,
	// and probeTimeout bounds each.
	probeInterval, probeTimeout = 10 * time.Second, 10 * time.Second
	// reprobeInterval is the pause after an attempt that succeeded: a feature gate may be
	// switched.
	reprobeInterval = time.Hour
	// syncDelay is how long after slices were changed by others they are published again.
	syncDelay = 2 * time.Second
	// firstRetry and lastRetry are the pauses before a write of slices is repeated that failed: each is
	// twice as long as the one before. The default of a work queue reaches 1000 s, and devices would
	// lack their taints for so long after an outage.
	firstRetry, lastRetry = 5 * time.Millisecond, 10 * time.Second
	// refreshInterval is how often kubelet is told how devices are: it believes a report
	// for 30 s.
	refreshInterval = 10 * time.Second
)

// Keeper keeps what claims hold. Its methods are safe for concurrent use; what they change
// is saved when they return nil. After an error of Hold nothing is changed; after one of Prepared or
// Release the change counts until the process ends, and the caller takes it back or repeats it.
type Keeper interface {
	// Hold records a claim. Another attempt may succeed after an error that may pass
	// (alloc.MayPass).
	Hold(ctx context.Context, claim alloc.Claim) (alloc.Claim, error)
	// Prepared notes that containers can reach the devices of claims, and what they have together
	// with each request. Release forgets a claim.
	Prepared(ctx context.Context, claims []alloc.Claim) error
	Release(ctx context.Context, key alloc.ClaimKey) error
	// Claims returns the claims that hold devices of a vendor.
	Claims(vendor string) []alloc.Claim
	// Devices returns the devices of a vendor that claims get.
	Devices(vendor string) []alloc.ClaimDevice
	// Facts returns what else is known of devices of a vendor. It reads files of the host.
	Facts(vendor string, devices []alloc.ClaimDevice) Facts
	// Uses returns what the containers of this node's pods use of claims, among them the pods with
	// these UIDs.
	Uses(ctx context.Context, pods ...string) ([]Use, error)
	// Edits returns what a container needs to reach the chips that it has with a request, and the
	// variables that name all that it has.
	Edits(vendor string, own, all []alloc.Portion) (cdispecs.ContainerEdits, error)
	// Sized reports whether Edits depends on how much of the memory of a chip a container has.
	Sized(vendor string) bool
}

// Options are what a Server needs.
type Options struct {
	Vendor, Node string
	// KubeletDir is kubelet's folder, and CDIDir that of CDI specifications.
	KubeletDir, CDIDir string
	Client             kubernetes.Interface
	Keeper             Keeper
	// Answered is called with each answer to a Prepare of kubelet, which is for the claims of one
	// pod: how long it took, and why it was rejected. Misused is called every few seconds with each
	// container that does not have what it uses. Both may be nil.
	Answered func(claims []*resourceapi.ResourceClaim, took time.Duration, err error)
	Misused  func(Use, error)
	// Predecessor is the name of the socket of the driver that yielded to this one, "" if there
	// was none.
	Predecessor string
	// Patience is DefaultPatience if zero.
	Patience time.Duration
}

// Server is the DRA driver of a vendor on this node. Its methods may be called while Run runs.
type Server struct {
	o       Options
	pool    string
	gates   gates
	writer  writer
	changed chan struct{}
	// described is raised when containers get something else with a device.
	described chan struct{}
	claims    keyedLocks
	door      *door
	// publishing is held while the server publishes devices and looks after what containers get.
	publishing sync.Mutex

	mu sync.Mutex // guards what follows
	// socket is the name of the socket that the server listens on, "" before it does.
	socket string
	// unregistered and unpublished are why kubelet does not know the driver, and why the API
	// server does not know its devices.
	unregistered, unpublished error
	// leftOut are the devices that are not published, by what the API server keeps; probed is whether
	// that is known.
	leftOut []string
	probed  bool
	// released are the claims that were released lately, by UID.
	released map[string]time.Time
	// watchers are woken when devices have changed.
	watchers map[chan struct{}]bool
}

// NewServer returns a server that is not running yet.
func NewServer(o Options) *Server {
	if o.Patience == 0 {
		o.Patience = DefaultPatience
	}
	return &Server{
		o: o, pool: PoolName(o.Node, o.Vendor),
		unregistered: fmt.Errorf("driver %s is not registered with kubelet yet", wire.Driver(o.Vendor)),
		unpublished:  fmt.Errorf("the devices of driver %s are not published yet", wire.Driver(o.Vendor)),
		changed:      make(chan struct{}, 1), described: make(chan struct{}, 1), door: newDoor(),
		gates: gates{client: o.Client, vendor: o.Vendor, node: o.Node, pool: PoolName(o.Node, o.Vendor),
			stored: Stored{Counters: true, Taints: true, Shares: true}},
		writer:   writer{specs: specs{o.CDIDir}, keeper: o.Keeper, vendor: o.Vendor, misused: o.Misused},
		released: map[string]time.Time{}, watchers: map[chan struct{}]bool{},
	}
}

// Run serves kubelet and publishes devices until ctx ends. What claims hold must be known: it
// removes the CDI specifications of all others.
func (s *Server) Run(ctx context.Context) error {
	driver := wire.Driver(s.o.Vendor)
	ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("driver", driver))
	if err := s.writer.specs.tidy(s.o.Vendor, s.o.Keeper.Claims(s.o.Vendor)); err != nil {
		klog.FromContext(ctx).Error(err, "Could not remove unused files")
	}
	data := filepath.Join(s.o.KubeletDir, "plugins", driver)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return fmt.Errorf("make the folder of driver %s: %w", driver, err)
	}
	instance, err := s.instance()
	if err != nil {
		return fmt.Errorf("remove unused sockets of driver %s: %w", driver, err)
	}
	helper, err := kubeletplugin.Start(ctx, s,
		kubeletplugin.DriverName(driver), kubeletplugin.NodeName(s.o.Node), kubeletplugin.KubeClient(s.o.Client),
		kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(s.o.KubeletDir, "plugins_registry")),
		// One claim that waits must not hold up the others.
		kubeletplugin.Serialize(false), kubeletplugin.RollingUpdate(instance),
		kubeletplugin.GRPCInterceptor(s.onRegistration), kubeletplugin.GRPCInterceptor(s.door.intercept),
	)
	if err != nil {
		return fmt.Errorf("start driver %s: %w", driver, err)
	}
	defer helper.Stop()
	s.mu.Lock()
	s.socket = socketOf(instance)
	s.mu.Unlock()
	if err := s.publish(ctx); err != nil {
		return fmt.Errorf("publish the devices of driver %s: %w", driver, err)
	}
	<-ctx.Done()
	return nil
}

// publish publishes devices until ctx ends or the server yields.
func (s *Server) publish(ctx context.Context) error {
	s.publishing.Lock()
	defer s.publishing.Unlock()
	var work sync.WaitGroup
	defer work.Wait()
	ctx, cancel := s.door.until(ctx)
	defer cancel()
	work.Go(func() { s.writer.settleAlways(ctx) })
	last := order{used: map[string]float64{}}
	var controller *resourceslice.Controller
	defer func() { controller.Stop() }()
	for probed := false; ; {
		probed = s.gates.probeIfDue(ctx) || probed
		stored, probeAt := s.gates.keeps()
		// Nothing in which two claims could overlap is published before it is known to be safe.
		stored.Counters = stored.Counters && probed
		devices := s.o.Keeper.Devices(s.o.Vendor)
		wake := last.keep(devices, time.Now())
		pool := Pool(s.o.Vendor, devices, s.o.Keeper.Facts(s.o.Vendor, devices), stored)
		resources := &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{s.pool: pool}}
		if controller != nil {
			controller.Update(resources)
		} else {
			var err error
			controller, err = resourceslice.StartController(ctx, resourceslice.Options{
				DriverName: wire.Driver(s.o.Vendor), KubeClient: s.o.Client, Resources: resources, ErrorHandler: s.HandleError,
				Owner: &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: s.o.Node},
				// Kubelet may delete the slices of its node after it has registered the driver.
				SyncDelay: ptr.To(syncDelay),
				Queue: workqueue.NewTypedRateLimitingQueue(
					workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry)),
			})
			if err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return err
			}
		}
		s.mu.Lock()
		s.unpublished, s.leftOut, s.probed = nil, leftOut(devices, pool), probed
		s.mu.Unlock()
		if wake.IsZero() || probeAt.Before(wake) {
			wake = probeAt
		}
		again := time.NewTimer(time.Until(wake))
		select {
		case <-ctx.Done():
		case <-s.changed:
		case <-s.described:
			s.writer.describeAll(ctx)
		case <-again.C:
		}
		again.Stop()
		if ctx.Err() != nil {
			return nil
		}
	}
}

// Ready returns nil once kubelet knows the driver and the API server its devices.
func (s *Server) Ready() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return errors.Join(s.unregistered, s.unpublished)
}

// Changed makes the server publish the devices again.
func (s *Server) Changed() {
	select {
	case s.changed <- struct{}{}:
	default: // it is about to
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watchers {
		select {
		case w <- struct{}{}:
		default:
		}
	}
}

// Redescribe makes the server describe again what containers get with the claims that are held: when
// the devices were found, since the folder of CDI specifications is in memory, and when containers
// need something else to reach them.
func (s *Server) Redescribe() {
	select {
	case s.described <- struct{}{}:
	default:
	}
}

// onRegistration publishes again once kubelet has registered the driver: kubelet deletes the
// slices of its node when it starts.
func (s *Server) onRegistration(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	answer, err := handler(ctx, request)
	status, ok := request.(*registerapi.RegistrationStatus)
	if !ok {
		return answer, err
	}
	var failed error
	if !status.GetPluginRegistered() {
		failed = fmt.Errorf("kubelet did not register driver %s: %s", wire.Driver(s.o.Vendor), status.GetError())
	}
	s.mu.Lock()
	s.unregistered = failed
	s.mu.Unlock()
	if failed == nil {
		s.gates.again()
		s.Changed()
	}
	return answer, err
}

// PrepareResourceClaims implements kubeletplugin.DRAPlugin.
func (s *Server) PrepareResourceClaims(ctx context.Context,
	claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	start := time.Now()
	devices, err := s.prepare(ctx, claims...)
	if s.o.Answered != nil {
		s.o.Answered(claims, time.Since(start), err)
	}
	out := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		out[claim.UID] = kubeletplugin.PrepareResult{Devices: devices[claim.UID], Err: err}
		log := klog.FromContext(ctx).WithValues("claim", klog.KObj(claim), "uid", claim.UID)
		if err != nil {
			log.Error(err, "Could not prepare a claim")
		} else {
			log.Info("Prepared a claim", "devices", len(devices[claim.UID]))
		}
	}
	return out, nil
}

// prepare makes the devices of a pod's claims reachable for its containers: all or none, as kubelet
// starts no container before all are prepared, and asks again for all of them.
func (s *Server) prepare(ctx context.Context, claims ...*resourceapi.ResourceClaim) (map[types.UID][]kubeletplugin.Device, error) {
	uids := make([]string, len(claims))
	for i, claim := range claims {
		uids[i] = string(claim.UID)
	}
	defer s.claims.lock(uids...)()
	held, err := s.holdAll(ctx, claims)
	if err == nil {
		err = s.writer.arrange(ctx, held)
	}
	if err != nil {
		return nil, errors.Join(err, s.writer.undo(ctx, held))
	}
	s.Changed()
	out := map[types.UID][]kubeletplugin.Device{}
	for i := range held {
		out[types.UID(held[i].UID)] = devicesOfClaim(&held[i], s.pool)
	}
	return out, nil
}

// holdAll records claims, and returns those that are recorded, as they were if they were before.
func (s *Server) holdAll(ctx context.Context, claims []*resourceapi.ResourceClaim) (held []alloc.Claim, err error) {
	var wanted []alloc.Claim
	for _, claim := range claims {
		if claim, err = s.current(ctx, claim); err != nil {
			return nil, err
		}
		one, err := Read(claim, s.o.Vendor, s.pool)
		if err != nil {
			return nil, err
		}
		wanted = append(wanted, one)
	}
	for _, one := range wanted {
		got, err := s.hold(ctx, one)
		if err != nil {
			return held, fmt.Errorf("claim %s/%s: %w", one.Namespace, one.Name, err)
		}
		held = append(held, got)
	}
	return held, nil
}

// current returns the claim as it is, where it may have been released since it was read.
func (s *Server) current(ctx context.Context, claim *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, error) {
	s.mu.Lock()
	_, released := s.released[string(claim.UID)]
	s.mu.Unlock()
	if !released {
		return claim, nil
	}
	now, err := s.o.Client.ResourceV1().ResourceClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
	switch {
	case err != nil:
		return nil, fmt.Errorf("claim %s/%s was released, and its state is not known: %w", claim.Namespace, claim.Name, err)
	case now.UID != claim.UID, now.Status.Allocation == nil, len(now.Status.ReservedFor) == 0:
		return nil, fmt.Errorf("claim %s/%s was released, and no pod uses it", claim.Namespace, claim.Name)
	}
	return now, nil
}

// hold records the claim; it waits for a while for a holder that leaves.
func (s *Server) hold(ctx context.Context, wanted alloc.Claim) (alloc.Claim, error) {
	limit := time.NewTimer(s.o.Patience)
	defer limit.Stop()
	for pause := firstPause; ; pause *= 2 {
		held, err := s.o.Keeper.Hold(ctx, wanted)
		if !alloc.MayPass(err) {
			return held, err
		}
		select {
		case <-ctx.Done():
			return held, err
		case <-limit.C:
			return held, err
		case <-time.After(pause):
		}
	}
}

// devicesOfClaim is what kubelet is told of a claim. Only the first device of a request has the
// request's CDI device, since a container gets those of all.
func devicesOfClaim(held *alloc.Claim, pool string) []kubeletplugin.Device {
	var out []kubeletplugin.Device
	named := map[string]bool{}
	for i := range held.Parts {
		part := &held.Parts[i]
		d := kubeletplugin.Device{Requests: []string{part.Request}, PoolName: pool, DeviceName: part.Device}
		if part.Share != "" {
			share := types.UID(part.Share)
			d.ShareID = &share
		}
		if name := deviceName(held, part); !named[name] {
			named[name] = true
			d.CDIDeviceIDs = []string{Kind(held.Vendor) + "=" + name}
		}
		out = append(out, d)
	}
	return out
}

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin.
func (s *Server) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	out := map[types.UID]error{}
	for _, claim := range claims {
		out[claim.UID] = s.Release(ctx, alloc.ClaimKey{Vendor: s.o.Vendor, UID: string(claim.UID)})
		log := klog.FromContext(ctx).WithValues("claim", klog.KRef(claim.Namespace, claim.Name), "uid", claim.UID)
		if err := out[claim.UID]; err != nil {
			log.Error(err, "Could not release a claim")
		} else {
			log.Info("Released a claim")
		}
	}
	return out, nil
}

// Release takes away what containers get with a claim, and forgets it.
func (s *Server) Release(ctx context.Context, key alloc.ClaimKey) error {
	defer s.claims.lock(key.UID)()
	if err := s.writer.forget(ctx, key); err != nil {
		return err
	}
	s.mu.Lock()
	for uid, at := range s.released {
		if time.Since(at) > releasedFor {
			delete(s.released, uid)
		}
	}
	s.released[key.UID] = time.Now()
	s.mu.Unlock()
	s.Changed()
	// What was named beside it is not, from now on.
	if err := s.writer.settle(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Could not rewrite the CDI specifications of claims")
	}
	return nil
}

// HandleError implements kubeletplugin.DRAPlugin.
func (s *Server) HandleError(ctx context.Context, err error, msg string) {
	if errors.Is(err, grpc.ErrServerStopped) {
		return
	}
	klog.FromContext(ctx).Error(err, msg)
	var dropped *resourceslice.DroppedFieldsError
	if errors.As(err, &dropped) && s.gates.lose(dropped.DisabledFeatures()...) {
		s.Changed()
	}
}

// WatchHealthStatus implements kubeletplugin.DRAPlugin.
func (s *Server) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	changed := make(chan struct{}, 1)
	s.mu.Lock()
	s.watchers[changed] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers, changed)
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case reports <- s.healthReport():
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-time.After(refreshInterval):
		}
	}
}

func (s *Server) healthReport() kubeletplugin.DeviceHealthReport {
	var out kubeletplugin.DeviceHealthReport
	devices := s.o.Keeper.Devices(s.o.Vendor)
	for i := range devices {
		d := &devices[i]
		h := kubeletplugin.DeviceHealth{PoolName: s.pool, DeviceName: d.Name, Health: kubeletplugin.HealthStatusHealthy,
			LastUpdated: time.Now()}
		if d.Card.Health.Unhealthy {
			h.Health, h.Message = kubeletplugin.HealthStatusUnhealthy, d.Card.Health.Reason
		}
		out.Devices = append(out.Devices, h)
	}
	return out
}

// keyedLocks are locks by key, kept while they are held or waited for.
type keyedLocks struct {
	mu    sync.Mutex
	locks map[string]*keyedLock
}

type keyedLock struct {
	sync.Mutex
	users int
}

// lock takes the locks of keys, in their order, and returns what releases them.
func (k *keyedLocks) lock(keys ...string) (unlock func()) {
	slices.Sort(keys)
	var held []*keyedLock
	keys = slices.Compact(keys)
	for _, key := range keys {
		l := k.enter(key)
		l.Lock()
		held = append(held, l)
	}
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		for i, l := range held {
			l.Unlock()
			if l.users--; l.users == 0 {
				delete(k.locks, keys[i])
			}
		}
	}
}

// enter returns the lock of a key for one more user.
func (k *keyedLocks) enter(key string) *keyedLock {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.locks == nil {
		k.locks = map[string]*keyedLock{}
	}
	l := k.locks[key]
	if l == nil {
		l = &keyedLock{}
		k.locks[key] = l
	}
	l.users++
	return l
}
