package nodeagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/deviceplugin"
)

// Handoff is the state that an agent passes to its successor, in this process or the
// next one. It is in neither the state files nor kubelet's records.
type Handoff struct {
	// Sockets are the names of those on which kubelet watches the resources.
	Sockets map[accel.Resource]string `json:"sockets,omitempty"`
	// Memory is what the parts remember, by resource and kind of part. A successor
	// that cannot read it starts as after a crash.
	Memory map[string]json.RawMessage `json:"memory,omitempty"`
	// Quarantine has the devices in quarantine; nil where that is not known.
	Quarantine []accel.Quarantine `json:"quarantine"`
}

// rememberer is a part that keeps state from one question of kubelet to the next.
type rememberer interface {
	// memoryKey is the key in Handoff.Memory.
	memoryKey() string
	// memory returns what the part remembers, for JSON. The part has stopped.
	memory() any
	// recall restores what the predecessor remembered. The part has not started.
	recall(data []byte) error
}

// phase is a group of goroutines that may end before the agent does. It is safe for
// concurrent use.
type phase struct {
	once       sync.Once
	end, ended chan struct{}
}

func newPhase() *phase { return &phase{end: make(chan struct{}), ended: make(chan struct{})} }

// run calls do and waits for it. The context of do ends with ctx and with stop.
func (s *phase) run(ctx context.Context, do func(context.Context)) {
	defer close(s.ended)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()
	waiting.Go(func() {
		select {
		case <-s.end:
			cancel()
		case <-ctx.Done():
		}
	})
	do(ctx)
}

// stop ends the phase and waits for it.
func (s *phase) stop() {
	s.once.Do(func() { close(s.end) })
	<-s.ended
}

// Yield stops all decisions and writes of the agent and returns the state for the
// successor. Kubelet's questions wait for Pass from then on. Run returns after Leave.
// Call Yield once, while Run runs.
func (a *Agent) Yield() Handoff {
	// A vendor's library may be slow; kubelet is answered meanwhile.
	a.watching.stop()
	out := Handoff{Sockets: map[accel.Resource]string{}, Memory: map[string]json.RawMessage{}}
	for _, r := range a.offerings {
		if socket := r.server.Yield(); socket != "" {
			out.Sockets[r.name] = socket
		}
	}
	// Kubelet must have recorded what it was given before the successor asks (see
	// records.turn).
	<-time.After(time.Until(a.tenants.lastGiven().Add(recordedBefore)))
	a.deciding.stop()
	for _, r := range a.offerings {
		for _, p := range r.parts {
			m, ok := p.(rememberer)
			if !ok {
				continue
			}
			// It consists of strings, numbers and times, which do not fail.
			if data, err := json.Marshal(m.memory()); err == nil {
				out.Memory[m.memoryKey()] = data
			}
		}
	}
	if !a.o.Quarantine.Doubt() {
		out.Quarantine = a.o.Quarantine.All()
	}
	return out
}

// Pass forwards kubelet's questions to the successor's sockets.
func (a *Agent) Pass(sockets map[accel.Resource]string) error {
	var failed []error
	for _, r := range a.offerings {
		failed = append(failed, r.server.Pass(sockets[r.name]))
	}
	return errors.Join(failed...)
}

// Leave ends the servers after Pass, and so Run. It returns the resources that the
// successor has to Renew.
func (a *Agent) Leave(ctx context.Context) (unnoticed []accel.Resource) {
	var leaving sync.WaitGroup
	noticed := make([]bool, len(a.offerings))
	for i, r := range a.offerings {
		leaving.Go(func() { noticed[i] = r.server.Leave(ctx) })
	}
	leaving.Wait()
	for i, r := range a.offerings {
		if !noticed[i] {
			unnoticed = append(unnoticed, r.name)
		}
	}
	return unnoticed
}

// Renew registers the resources again that the predecessor's Leave returned.
func (a *Agent) Renew(resources []accel.Resource) {
	for _, r := range a.offerings {
		if slices.Contains(resources, r.name) {
			r.server.Renew()
		}
	}
}

// Serving returns the sockets on which kubelet watches the resources, or an error
// while kubelet does not watch all that the agent offers.
func (a *Agent) Serving() (map[accel.Resource]string, error) {
	a.mu.Lock()
	for vendor, v := range a.vendors {
		if !v.told {
			a.mu.Unlock()
			return nil, fmt.Errorf("%s: the first discovery of devices has not ended", vendor)
		}
	}
	a.mu.Unlock()
	sockets := map[accel.Resource]string{}
	for _, r := range a.offerings {
		if !r.offers() {
			continue
		}
		socket := r.server.Socket()
		if socket == "" {
			return nil, errors.Join(fmt.Errorf("kubelet does not watch %s yet", r.name), r.server.Ready())
		}
		sockets[r.name] = socket
	}
	return sockets, nil
}

// recall restores the memory of a resource's parts, and keeps the resource off the
// predecessor's socket.
func (a *Agent) recall(ctx context.Context, r *offering) {
	if socket := a.o.Handoff.Sockets[r.name]; socket != "" {
		r.server.TakeOver(socket)
	}
	for _, p := range r.parts {
		m, ok := p.(rememberer)
		if !ok {
			continue
		}
		data := a.o.Handoff.Memory[m.memoryKey()]
		if data == nil {
			continue
		}
		if err := m.recall(data); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot read the predecessor's state, starting without it", "resource", r.name)
		}
	}
}

// offers reports whether there is a list of units for kubelet.
func (r *offering) offers() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.lists, func(list []deviceplugin.Unit) bool { return list != nil })
}

// lastGiven is the time of the last allocation.
func (t *tenants) lastGiven() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	var last time.Time
	for _, one := range t.all {
		for _, at := range one.given {
			if at.After(last) {
				last = at
			}
		}
	}
	return last
}

// memoryOfUnits is what a memoryPool remembers, as JSON.
type memoryOfUnits struct {
	Inits          map[string]rememberedInits `json:"inits,omitempty"` // by pod's UID
	Asked          *rememberedQuestion        `json:"asked,omitempty"`
	Strangers      []string                   `json:"strangers,omitempty"` // as strangeHolder
	StrangerDevice accel.DeviceID             `json:"strangerDevice,omitempty"`
	Given          map[string]rememberedUnit  `json:"given,omitempty"` // by id
}

type rememberedInits struct {
	Request accel.Request               `json:"request"`
	Next    int                         `json:"next"`
	Devices []accel.DeviceID            `json:"devices"`
	Units   accel.Units                 `json:"units"`
	IDs     map[accel.DeviceID][]string `json:"ids"`
	At      time.Time                   `json:"at"`
}

type rememberedQuestion struct {
	UID       string           `json:"uid,omitempty"`
	Stranger  bool             `json:"stranger,omitempty"`
	Request   accel.Request    `json:"request"`
	Container int              `json:"container"`
	Devices   []accel.DeviceID `json:"devices"`
	IDs       []string         `json:"ids"`
}

type rememberedUnit struct {
	Device accel.DeviceID `json:"device"`
	At     time.Time      `json:"at"`
}

func (p *memoryPool) memoryKey() string { return "memory " + string(p.resource) }

func (p *memoryPool) memory() any {
	p.records.turn.Lock()
	defer p.records.turn.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	m := memoryOfUnits{StrangerDevice: p.strangerDevice, Inits: map[string]rememberedInits{}, Given: map[string]rememberedUnit{}}
	for uid, s := range p.inits {
		m.Inits[uid] = rememberedInits{Request: s.request, Next: s.next, Devices: s.devices, Units: s.units, IDs: s.ids, At: s.at}
	}
	if q := p.asked; len(q.ids) > 0 {
		m.Asked = &rememberedQuestion{UID: q.uid, Stranger: q.stranger, Request: q.request, Container: q.container, Devices: q.devices, IDs: q.ids}
	}
	for key := range p.strangers {
		m.Strangers = append(m.Strangers, strangeHolder(key))
	}
	for id, one := range p.given {
		m.Given[id] = rememberedUnit{Device: one.device, At: one.at}
	}
	return m
}

func (p *memoryPool) recall(data []byte) error {
	var m memoryOfUnits
	if err := json.Unmarshal(data, &m); err != nil {
		return err
	}
	if q := m.Asked; q != nil && q.UID != "" && (q.Container < 0 || q.Container >= len(q.Request.Containers)) {
		return fmt.Errorf("container %d of %d", q.Container, len(q.Request.Containers))
	}
	p.records.turn.Lock()
	defer p.records.turn.Unlock()
	for uid, s := range m.Inits {
		p.inits[uid] = initServed{request: s.Request, next: s.Next, devices: s.Devices, units: s.Units, ids: s.IDs, at: s.At}
	}
	if q := m.Asked; q != nil {
		p.asked = question{uid: q.UID, stranger: q.Stranger, request: q.Request, container: q.Container, devices: q.Devices, ids: q.IDs}
	}
	p.strangers, p.strangerDevice = map[podKey]bool{}, m.StrangerDevice
	for _, holder := range m.Strangers {
		p.strangers[initKey(holder)] = true
	}
	p.noteInits()
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, one := range m.Given {
		p.given[id] = givenUnit{device: one.Device, at: one.At}
		p.tenant.giveAt(one.At, one.Device)
	}
	return nil
}

// memoryOfSlots is what a slotPool remembers, as JSON.
type memoryOfSlots struct {
	Admitting []string                  `json:"admitting,omitempty"`
	Preferred []string                  `json:"preferred,omitempty"`
	Given     map[string]rememberedSlot `json:"given,omitempty"` // by id, those that kubelet has not listed
}

type rememberedSlot struct {
	Chips   []accel.DeviceID `json:"chips"`
	Inits   []string         `json:"inits,omitempty"`
	Unasked bool             `json:"unasked,omitempty"`
	At      time.Time        `json:"at"`
}

func (p *slotPool) memoryKey() string { return "slots " + string(p.resource) }

func (p *slotPool) memory() any {
	p.records.turn.Lock()
	defer p.records.turn.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	m := memoryOfSlots{Admitting: p.admitting, Preferred: p.preferred, Given: map[string]rememberedSlot{}}
	for id, h := range p.holds {
		if !h.seen {
			m.Given[id] = rememberedSlot{Chips: h.chips, Inits: h.inits, Unasked: h.unasked, At: h.at}
		}
	}
	return m
}

func (p *slotPool) recall(data []byte) error {
	var m memoryOfSlots
	if err := json.Unmarshal(data, &m); err != nil {
		return err
	}
	p.records.turn.Lock()
	defer p.records.turn.Unlock()
	p.admitting, p.preferred = m.Admitting, m.Preferred
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, one := range m.Given {
		p.holds[id] = &slotHold{chips: one.Chips, inits: one.Inits, unasked: one.Unasked, at: one.At}
		p.tenant.giveAt(one.At, one.Chips...)
	}
	return nil
}
