package nodeagent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/podresources"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// lookupTimeout bounds a question to kubelet or the API server while kubelet
// waits for an answer: it admits no other pod of the node meanwhile.
const lookupTimeout = time.Second

// askAgain is the pause before kubelet is asked again that was asked too often:
// it answers all of a node 100 times a second (podresources.DefaultQPS in its
// code), and a burst of pods takes more.
const askAgain = 15 * time.Millisecond

// unitSink is the part of deviceplugin.Server that a pool needs.
type unitSink interface {
	SetUnits([]deviceplugin.Unit) error
}

// podSource knows the pods of this node.
type podSource interface {
	// Cached returns what the watch has delivered.
	Cached() []*corev1.Pod
	// Synced reports whether the watch has delivered all pods once.
	Synced() bool
	// Fresh asks the API server.
	Fresh(ctx context.Context) ([]*corev1.Pod, error)
}

// kubeletLister is the part of podresources.Client that a pool needs.
type kubeletLister interface {
	List(ctx context.Context) ([]podresources.Pod, error)
}

// pool is one resource of the node: the devices behind it, the units that they
// are cut into, and who holds them. It decides for kubelet
// (deviceplugin.Allocator). It is safe for concurrent use.
type pool struct {
	resource accel.Resource
	// wanted is the configured memory unit.
	wanted    sharing.MemoryUnit
	injection config.Injection
	backend   backend.Backend
	store     *sharing.Store
	kubelet   kubeletLister
	pods      podSource
	grant     func(*corev1.Pod) (accel.Grant, bool)
	metrics   *metrics
	sink      unitSink
	// changed is called, without locks, when the inventory or what the pods
	// hold may have changed.
	changed func()
	// event tells the users of the node.
	event func(kind, reason, message string)

	// turn is held while kubelet is being answered and while kubelet is asked
	// who holds what. Kubelet forgets units that it is just handing out when
	// it is asked in that moment and a pod has ended since the last time
	// (UpdateAllocatedDevices in its device manager), so the two must not
	// overlap.
	turn sync.Mutex
	// inits, asked and strangers are guarded by turn.
	inits map[string]initServed
	asked question
	// strangers are the pods that kubelet lists and the API server does not
	// know, such as static pods before their mirror, as of the last question;
	// strangerDevice is what the one that was served last got.
	strangers      map[podKey]bool
	strangerDevice accel.DeviceID

	// syncing is held from the derivation of kubelet's list until it is
	// handed over, so that an older list never replaces a newer one.
	syncing sync.Mutex

	mu sync.Mutex // guards what follows
	// unit is the memory unit in force; it differs from wanted while pods hold
	// units of the other size.
	unit   sharing.MemoryUnit
	layout *sharing.Layout
	// lost is true while there is no state although pods may hold units: before
	// the first state was made, and after it was lost or damaged.
	lost      bool
	answer    []podresources.Pod // kubelet's last list
	saved     sharing.State
	found     backend.Found
	foundErr  error
	looked    bool
	listed    map[accel.DeviceID]bool // devices reported to kubelet by this process
	shares    []accel.Share
	held      *holdings // nil until kubelet was asked once
	problem   error     // why the resource cannot be offered as configured
	unhealthy map[accel.DeviceID]string
	offered   []offeredRange // what kubelet's list was made from
}

// offeredRange is what decides about the units of one device in kubelet's list.
type offeredRange struct {
	start     int64
	units     accel.Units
	unhealthy bool
}

// question is the last answer to GetPreferredAllocation.
type question struct {
	uid       string // of the pod that the question was taken to be for, or ""
	stranger  bool   // it is for a pod that the API server does not know
	request   accel.Request
	container int // position in request
	device    accel.DeviceID
	ids       []string
}

// open restores what earlier runs remembered.
func (p *pool) open(ctx context.Context) error {
	log := klog.FromContext(ctx).WithValues("resource", p.resource)
	p.inits = map[string]initServed{}
	p.listed = map[accel.DeviceID]bool{}
	p.unhealthy = map[accel.DeviceID]string{}
	p.unit = p.wanted
	state, layout, err := p.store.Load()
	if errors.Is(err, sharing.ErrDamaged) {
		aside, moveErr := p.store.Quarantine()
		if moveErr != nil {
			return errors.Join(err, moveErr)
		}
		log.Error(err, "Finding out anew which units belong to which device", "movedTo", aside)
		state, layout = sharing.State{}, &sharing.Layout{}
	} else if err != nil {
		return err
	}
	p.layout, p.saved, p.lost = layout, state, state.Unit == ""
	if state.Unit != "" {
		unit, err := sharing.ParseMemoryUnit(state.Unit)
		if err != nil {
			return fmt.Errorf("unit state of %s: %w", p.resource, err)
		}
		p.unit = unit
	}
	return nil
}

// update takes the outcome of a discovery.
func (p *pool) update(ctx context.Context, found backend.Found, err error) {
	p.mu.Lock()
	p.found, p.foundErr, p.looked = found, err, true
	p.mu.Unlock()
	p.sync(ctx)
	p.changed()
}

// list asks kubelet who holds what. The caller holds turn.
func (p *pool) list(ctx context.Context) (*holdings, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	pods, err := p.kubelet.List(ctx)
	for status.Code(err) == codes.ResourceExhausted && sleep(ctx, askAgain) {
		pods, err = p.kubelet.List(ctx)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.metrics.podResourcesErrors.Inc()
		if p.held != nil {
			return p.held, err
		}
		return holdingsOf(nil, p.resource, p.layout), err
	}
	p.answer = pods
	p.hold()
	return p.held, nil
}

// hold derives from kubelet's last list who holds what. The caller holds mu.
func (p *pool) hold() {
	p.held = holdingsOf(p.answer, p.resource, p.layout)
	p.held.complete(p.pods, p.resource, p.grant)
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// sync derives units and inventory from devices, layout and holdings, and tells
// kubelet. The agent's loop calls it too, so it must not wake the loop.
func (p *pool) sync(ctx context.Context) {
	p.syncing.Lock()
	defer p.syncing.Unlock()
	p.mu.Lock()
	units, problem := p.derive(ctx)
	p.mu.Unlock()
	var refused error
	if units != nil {
		refused = p.offerUnits(units)
	}
	p.mu.Lock()
	if refused != nil {
		problem, p.offered = refused, nil
	}
	if problem != nil && (p.problem == nil || p.problem.Error() != problem.Error()) {
		klog.FromContext(ctx).Error(problem, "Cannot offer the resource as configured", "resource", p.resource)
		defer p.event(corev1.EventTypeWarning, "ResourceNotOffered", fmt.Sprintf("%s: %v", p.resource, problem))
	}
	p.problem = problem
	p.mu.Unlock()
}

// offerUnits hands the list to kubelet's server. An entry of an unhealthy unit
// is two bytes longer than one of a healthy unit, so cards that fail may make a
// list too long that was just short enough; then those units, which nobody can
// get anyway, are left out.
func (p *pool) offerUnits(units []deviceplugin.Unit) error {
	err := p.sink.SetUnits(units)
	var tooMany *deviceplugin.TooManyUnitsError
	if !errors.As(err, &tooMany) {
		return err
	}
	healthy := slices.DeleteFunc(units, func(u deviceplugin.Unit) bool { return u.Unhealthy })
	if len(healthy) == 0 || len(healthy) == tooMany.Units {
		return err
	}
	return p.sink.SetUnits(healthy)
}

// derive computes shares and units; nil units mean that kubelet is to keep what
// it has. The caller holds mu.
func (p *pool) derive(ctx context.Context) ([]deviceplugin.Unit, error) {
	var problem error
	switch {
	case !p.looked:
		return nil, errors.New("the devices were not looked for yet")
	case p.foundErr != nil:
		problem = p.foundErr
	case len(p.found.Devices) == 0 && len(p.found.Faults) == 0:
		problem = fmt.Errorf("the vendor's library reports no %s device", p.backend.Vendor())
	}
	if err := p.switchUnit(); err != nil {
		problem = err
	}
	if p.foundErr == nil {
		present := sharing.Cut(p.found.Devices, p.unit)
		for _, s := range present {
			if s.Units == 0 {
				problem = fmt.Errorf("device %s has %d bytes of memory, less than one unit of %s GB; it is left out", s.ID, s.MemoryBytes, p.unit)
			}
		}
		if err := p.restore(present); err != nil {
			return nil, err
		}
		layout, err := p.layout.Place(present, p.heldOf)
		if err != nil {
			problem = err
		}
		p.layout = layout
	}
	p.shares = p.assemble()
	p.tellHealth(ctx)
	if err := p.save(); err != nil {
		// Ids that a restart would give to another device must not be handed out.
		return nil, err
	}
	if len(p.shares) == 0 && len(p.listed) == 0 {
		return nil, problem
	}
	for _, s := range p.shares {
		p.listed[s.ID] = true
	}
	if !p.stale() {
		return nil, problem
	}
	return p.units(), problem
}

// stale reports whether kubelet's list has to be made anew; it may have some
// hundred thousand entries. With an unhealthy device it also depends on who
// holds what.
func (p *pool) stale() bool {
	now := make([]offeredRange, 0, len(p.shares))
	sick := false
	for _, s := range p.shares {
		r, _ := p.layout.Range(s.ID)
		now = append(now, offeredRange{start: r.Start, units: r.Units, unhealthy: s.Health.Unhealthy})
		sick = sick || s.Health.Unhealthy
	}
	same := p.offered != nil && slices.Equal(now, p.offered)
	p.offered = now
	return sick || !same
}

// restore makes a layout where there is no saved one. Units that pods hold
// belong to the device that the pod's grant names, which is signed. Without
// kubelet's whole list there is no telling, and a layout that is merely made
// anew could give ids that a pod holds to another card.
func (p *pool) restore(present []accel.Share) error {
	if !p.lost {
		return nil
	}
	if p.held == nil || p.held.partial {
		return errors.New("there is no saved state; waiting for kubelet and the API server to tell which units are held")
	}
	granted := map[podKey]accel.DeviceID{}
	for _, pod := range p.pods.Cached() {
		if g, ok := p.grant(pod); ok && !terminal(pod) {
			granted[podKey{pod.Namespace, pod.Name}] = g.Device
		}
	}
	claims := map[accel.DeviceID][]string{}
	for _, pod := range p.answer {
		device := granted[podKey{pod.Namespace, pod.Name}]
		for _, c := range pod.Containers {
			ids := c.Units[p.resource]
			if len(ids) > 0 && device == "" {
				return fmt.Errorf("the saved state is lost, and nothing tells on which device pod %s/%s is, which holds units", pod.Namespace, pod.Name)
			}
			claims[device] = append(claims[device], ids...)
		}
	}
	delete(claims, "")
	layout, err := sharing.Recover(present, claims)
	if err != nil {
		return fmt.Errorf("the saved state is lost and cannot be made anew while these pods run: %w", err)
	}
	p.layout, p.lost = layout, false
	p.hold()
	return nil
}

// switchUnit takes over the configured memory unit once nobody holds units of
// the old size.
func (p *pool) switchUnit() error {
	if p.unit == p.wanted || p.lost || len(p.layout.Ranges()) == 0 {
		p.unit = p.wanted
		return nil
	}
	if p.held == nil || p.held.partial {
		return fmt.Errorf("memoryUnit is to change from %s to %s; waiting for kubelet to tell whether pods hold units", p.unit, p.wanted)
	}
	if len(p.held.ids) > 0 {
		var names []string
		for key := range p.held.pods {
			names = append(names, key.namespace+"/"+key.name)
		}
		slices.Sort(names)
		return fmt.Errorf("memoryUnit stays %s until the pods that hold such units are gone, then becomes %s: %s", p.unit, p.wanted, strings.Join(names, ", "))
	}
	p.unit, p.layout = p.wanted, &sharing.Layout{}
	return nil
}

// heldOf counts the units that containers hold of a device. Before kubelet was
// asked, every device counts as held.
func (p *pool) heldOf(d accel.DeviceID) int {
	if p.held == nil || p.held.partial {
		return 1
	}
	return p.held.perDevice[d]
}

// assemble joins layout and discovery into shares: what is there, and what has
// gone away but was offered or is held.
func (p *pool) assemble() []accel.Share {
	devices := map[accel.DeviceID]accel.Device{}
	for _, d := range p.found.Devices {
		devices[d.ID] = d
	}
	faults := map[accel.DeviceID]string{}
	for _, f := range p.found.Faults {
		if f.ID != "" && f.Err != nil {
			faults[f.ID] = f.Err.Error()
		}
	}
	var shares []accel.Share
	taken := map[int]bool{}
	var away []accel.Share
	for _, r := range p.layout.Ranges() {
		if d, ok := devices[r.Device]; ok {
			shares = append(shares, accel.Share{Device: d, Units: r.Units})
			taken[d.Index] = true
			continue
		}
		if !p.listed[r.Device] && p.heldOf(r.Device) == 0 {
			continue
		}
		reason := cmp.Or(faults[r.Device], "the vendor's library does not list the device any more")
		if p.foundErr != nil {
			reason = p.foundErr.Error()
		}
		away = append(away, accel.Share{Units: r.Units, Device: accel.Device{
			Index: r.Index, ID: r.Device, Model: r.Model, MemoryBytes: r.MemoryBytes, NUMANode: r.NUMANode,
			Health: accel.Health{Unhealthy: true, Reason: reason},
		}})
	}
	for _, s := range away {
		// The library may have given its index to another device.
		for taken[s.Index] {
			s.Index++
		}
		taken[s.Index] = true
		shares = append(shares, s)
	}
	slices.SortFunc(shares, func(a, b accel.Share) int { return cmp.Compare(a.Index, b.Index) })
	return shares
}

// tellHealth logs and reports each device whose health changed.
func (p *pool) tellHealth(ctx context.Context) {
	log := klog.FromContext(ctx)
	now := map[accel.DeviceID]string{}
	for _, s := range p.shares {
		if s.Health.Unhealthy {
			now[s.ID] = s.Health.Reason
			if before, known := p.unhealthy[s.ID]; !known || before != s.Health.Reason {
				log.Info("Device is unhealthy; it takes no new pods", "resource", p.resource, "device", s.ID, "index", s.Index, "reason", s.Health.Reason)
				p.event(corev1.EventTypeWarning, "DeviceUnhealthy", fmt.Sprintf("%s device %d (%s) takes no new pods: %s", p.backend.Vendor(), s.Index, s.ID, s.Health.Reason))
			}
		} else if _, before := p.unhealthy[s.ID]; before {
			log.Info("Device is healthy again", "resource", p.resource, "device", s.ID, "index", s.Index)
			p.event(corev1.EventTypeNormal, "DeviceRecovered", fmt.Sprintf("%s device %d (%s) takes pods again", p.backend.Vendor(), s.Index, s.ID))
		}
	}
	p.unhealthy = now
}

// save writes the state when it changed.
func (p *pool) save() error {
	next := sharing.State{Unit: p.unit.String(), Ranges: p.layout.Ranges()}
	if len(next.Ranges) == 0 && len(p.saved.Ranges) == 0 || reflect.DeepEqual(next, p.saved) {
		return nil
	}
	if err := p.store.Save(next); err != nil {
		return err
	}
	p.saved = next
	return nil
}

// units lists what kubelet is told. Units that a container holds stay healthy
// whatever happens to their device: kubelet refuses a running pod after its own
// restart when they are not. No new pod can get them, since this program
// answers which units a container gets.
func (p *pool) units() []deviceplugin.Unit {
	var total accel.Units
	for _, s := range p.shares {
		total += s.Units
	}
	out := make([]deviceplugin.Unit, 0, total)
	var ids []string
	for _, s := range p.shares {
		ids = p.layout.IDs(ids[:0], s.ID)
		for _, id := range ids {
			u := deviceplugin.Unit{ID: id}
			if s.Health.Unhealthy && p.held != nil && !p.held.partial && !p.held.inits[s.ID] {
				_, inUse := p.held.ids[id]
				u.Unhealthy = !inUse
			}
			out = append(out, u)
		}
	}
	return out
}

// inventory is what the node publishes of this resource.
func (p *pool) inventory() accel.Inventory {
	p.mu.Lock()
	defer p.mu.Unlock()
	return accel.Inventory{Resource: p.resource, Unit: p.unit.String(), Shares: slices.Clone(p.shares)}
}

// ready returns why the resource is not offered as configured, or nil.
func (p *pool) ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.looked {
		return fmt.Errorf("%s: the devices were not looked for yet", p.resource)
	}
	if p.problem != nil {
		return fmt.Errorf("%s: %w", p.resource, p.problem)
	}
	return nil
}

// device returns the share of a device.
func (p *pool) device(id accel.DeviceID) (accel.Share, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.shares {
		if s.ID == id {
			return s, true
		}
	}
	return accel.Share{}, false
}

// Prefer implements deviceplugin.Allocator: all units of one device.
func (p *pool) Prefer(ctx context.Context, available, must []string, size int) ([]string, error) {
	p.turn.Lock()
	defer p.turn.Unlock()
	log := klog.FromContext(ctx).WithValues("resource", p.resource, "units", size)
	h, err := p.list(ctx)
	if err != nil {
		// Which pod kubelet asks for and what it holds already would be a guess,
		// and could put the pod on two devices.
		return nil, fmt.Errorf("kubelet does not tell which pod it admits: %w", err)
	}
	p.mu.Lock()
	layout, shares := p.layout, slices.Clone(p.shares)
	p.mu.Unlock()

	mustDevice, err := oneDevice(layout, must)
	if err != nil {
		return nil, err
	}
	pods := p.podsOf(ctx, accel.Units(size), h)
	kept := p.keptByInits(pods, h)
	free := freeUnits(layout, slices.DeleteFunc(available, func(id string) bool { return kept[id] }), must, h)
	slots := make([]place.Slot, 0, len(shares))
	for _, s := range shares {
		slots = append(slots, place.Slot{ID: s.ID, Index: s.Index, Total: s.Units, Free: accel.Units(len(free[s.ID])), Unhealthy: s.Health.Unhealthy})
	}
	waiting := waitingPods(pods, p.resource, h, p.inits, p.grant)
	if d := p.strangersDevice(pods, h); d != "" && mustDevice == "" && !slices.ContainsFunc(waiting, func(w sharing.Waiting) bool { return w.Admitting }) {
		mustDevice = d
	}
	// One that was deleted without a grace period is on its way in kubelet while
	// the API server has forgotten it. Another must not be taken for it.
	for i := range waiting {
		waiting[i].Later = len(p.strangers) > 0 && !waiting[i].Admitting
	}
	choice, err := sharing.Choose(accel.Units(size), mustDevice, accel.Units(len(must)), slots, waiting)
	if err != nil {
		p.metrics.refused.WithLabelValues(string(p.resource)).Inc()
		return nil, err
	}
	more := size - len(must)
	if more < 0 || more > len(free[choice.Device]) {
		return nil, fmt.Errorf("kubelet asks for %d units with %d among them; device %s has %d more: %w", size, len(must), choice.Device, len(free[choice.Device]), sharing.ErrNoRoom)
	}
	ids := append(slices.Clone(must), free[choice.Device][:more]...)
	p.asked = question{device: choice.Device, ids: ids}
	if choice.Pod >= 0 {
		w := waiting[choice.Pod]
		p.asked.uid, p.asked.request, p.asked.container = w.Pod.UID, w.Request, w.Next
		log = log.WithValues("pod", w.Pod, "granted", w.Granted)
	} else {
		p.asked.stranger = true
	}
	log.Info("Preferring units of one device", "device", choice.Device)
	return ids, nil
}

// podsOf returns the pods of this node, among them all that kubelet has taken
// up. When the watch has not delivered one of those yet, or none of those that
// it has delivered can be behind the question for size units, the API server
// is asked.
func (p *pool) podsOf(ctx context.Context, size accel.Units, h *holdings) []*corev1.Pod {
	pods := p.pods.Cached()
	seen := make(map[podKey]bool, len(pods))
	for _, pod := range pods {
		seen[podKey{pod.Namespace, pod.Name}] = true
	}
	late := !slices.ContainsFunc(waitingPods(pods, p.resource, h, p.inits, p.grant), func(w sharing.Waiting) bool {
		return w.Admitting && w.Request.Containers[w.Next].Units == size
	})
	for key := range h.active {
		late = late || !seen[key]
	}
	for _, pod := range pods {
		late = late || p.replaced(pod, h)
	}
	if !late {
		return pods
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	fresh, err := p.pods.Fresh(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Answering kubelet from what the watch has delivered", "resource", p.resource)
		return pods
	}
	return fresh
}

// keptByInits returns the ids that kubelet keeps for plain init containers of
// active pods. They are not on kubelet's list, and kubelet itself may have
// forgotten them (see turn).
func (p *pool) keptByInits(pods []*corev1.Pod, h *holdings) map[string]bool {
	kept := map[string]bool{}
	for _, pod := range pods {
		if s, ok := p.inits[string(pod.UID)]; ok && !terminal(pod) && h.active[podKey{pod.Namespace, pod.Name}] {
			for _, id := range s.ids {
				kept[id] = true
			}
		}
	}
	return kept
}

// replaced reports whether kubelet has taken up another pod of the same name:
// one that is shown as served holds less than it must.
func (p *pool) replaced(pod *corev1.Pod, h *holdings) bool {
	key := podKey{pod.Namespace, pod.Name}
	if !h.active[key] {
		return false
	}
	if g, ok := p.grant(pod); !started(pod) && (!ok || !g.Confirmed) {
		return false
	}
	for _, c := range kube.RequestOf(pod, p.resource).Containers {
		if c.Kind != accel.InitContainer && h.pods[key].containers[c.Name].units != c.Units {
			return true
		}
	}
	return false
}

// strangersDevice returns the device of a pod that the API server does not know
// and that kubelet may be in the midst of, "" when there is none. Kubelet takes
// up one pod, admits it, and takes up the next: with a pod that was not there
// at the last question, this is the first question for it or another new one;
// without, it is for the one that was served last.
func (p *pool) strangersDevice(pods []*corev1.Pod, h *holdings) accel.DeviceID {
	unknown := maps.Clone(h.active)
	for _, pod := range pods {
		delete(unknown, podKey{pod.Namespace, pod.Name})
	}
	holds := false
	for key := range unknown {
		if !p.strangers[key] {
			p.strangerDevice = ""
		}
		holds = holds || h.pods[key].device == p.strangerDevice
	}
	p.strangers = unknown
	if !holds {
		return ""
	}
	return p.strangerDevice
}

// freeUnits groups the ids that kubelet offers by device, without those that
// kubelet itself says are held (see turn) and without must, lowest first.
func freeUnits(layout *sharing.Layout, available, must []string, h *holdings) map[accel.DeviceID][]string {
	skip := make(map[string]struct{}, len(must))
	for _, id := range must {
		skip[id] = struct{}{}
	}
	free := map[accel.DeviceID][]string{}
	for _, id := range available {
		if _, inUse := h.ids[id]; inUse {
			continue
		}
		if _, reused := skip[id]; reused {
			continue
		}
		if d, ok := layout.Device(id); ok {
			free[d] = append(free[d], id)
		}
	}
	for _, ids := range free {
		slices.SortFunc(ids, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	}
	return free
}

// oneDevice returns the device that all ids name, "" for no ids.
func oneDevice(layout *sharing.Layout, ids []string) (accel.DeviceID, error) {
	var device accel.DeviceID
	for _, id := range ids {
		d, ok := layout.Device(id)
		switch {
		case !ok:
			return "", fmt.Errorf("unit id %q belongs to no device of this node", id)
		case device == "":
			device = d
		case d != device:
			return "", fmt.Errorf("kubelet chose units of two devices, %s and %s, for one container; a container gets units of one device", device, d)
		}
	}
	return device, nil
}

// Allocate implements deviceplugin.Allocator. The ids that kubelet has settled
// on say which device it is.
func (p *pool) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	p.turn.Lock()
	defer p.turn.Unlock()
	answer, device, err := p.allocate(ids)
	if err != nil {
		p.metrics.refused.WithLabelValues(string(p.resource)).Inc()
		return nil, err
	}
	p.remember(ids, device)
	p.metrics.served.WithLabelValues(string(p.resource)).Inc()
	klog.FromContext(ctx).Info("Allocated units of one device", "resource", p.resource, "units", len(ids), "device", device)
	p.changed()
	return answer, nil
}

func (p *pool) allocate(ids []string) (*pluginapi.ContainerAllocateResponse, accel.DeviceID, error) {
	if len(ids) == 0 {
		return nil, "", errors.New("kubelet asked to allocate no units")
	}
	p.mu.Lock()
	layout := p.layout
	p.mu.Unlock()
	device, err := oneDevice(layout, ids)
	if err != nil {
		return nil, "", err
	}
	edits, err := p.backend.Edits(device)
	if err != nil {
		return nil, "", fmt.Errorf("device %s: %w", device, err)
	}
	answer := &pluginapi.ContainerAllocateResponse{Envs: maps.Clone(edits.Env)}
	switch p.injection {
	case config.InjectDeviceNodes:
		for _, n := range edits.DeviceNodes {
			answer.Devices = append(answer.Devices, &pluginapi.DeviceSpec{ContainerPath: n.Path, HostPath: n.HostPath, Permissions: n.Permissions})
		}
	case config.InjectCDI:
		for _, d := range edits.CDIDevices {
			answer.CdiDevices = append(answer.CdiDevices, &pluginapi.CDIDevice{Name: d.String()})
		}
	case config.InjectEnvironment:
	}
	return answer, device, nil
}

// remember notes that a plain init container was served, which kubelet does not
// list. The caller holds turn.
func (p *pool) remember(ids []string, device accel.DeviceID) {
	asked := p.asked
	p.asked = question{}
	if asked.stranger && asked.device == device && sameIDs(asked.ids, ids) {
		p.strangerDevice = device
	}
	if asked.device != device || !sameIDs(asked.ids, ids) {
		asked.uid = ""
		// Kubelet reuses units of an earlier init container and did not ask.
		for uid, s := range p.inits {
			if s.device == device && s.next < len(s.request.Containers) && s.request.Containers[s.next].Units == accel.Units(len(ids)) {
				asked.uid, asked.request, asked.container = uid, s.request, s.next
				break
			}
		}
	}
	if asked.uid == "" || asked.request.Containers[asked.container].Kind != accel.InitContainer {
		return
	}
	p.inits[asked.uid] = initServed{
		request: asked.request,
		next:    asked.container + 1,
		device:  device,
		units:   max(p.inits[asked.uid].units, accel.Units(len(ids))),
		ids:     slices.Concat(p.inits[asked.uid].ids, ids),
		at:      time.Now(),
	}
}

func sameIDs(a, b []string) bool {
	if len(a) != len(b) {
		return false
	}
	set := make(map[string]struct{}, len(a))
	for _, id := range a {
		set[id] = struct{}{}
	}
	for _, id := range b {
		if _, ok := set[id]; !ok {
			return false
		}
	}
	return true
}

// known reports whether the inventory is worth publishing: the devices were
// looked for, and the units that pods hold have their devices. What an earlier
// run published stays until then.
func (p *pool) known() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.looked && (!p.lost || p.foundErr != nil)
}

// present counts the devices that the vendor's library lists now.
func (p *pool) present() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.found.Devices)
}
