package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
)

// Handoff is the state that an agent passes to its successor, in this process or the
// next one. It is in neither the state files nor kubelet's records.
type Handoff struct {
	// Sockets are the names of those on which kubelet watches the resources, and calls the
	// drivers of claims (see socketKey).
	Sockets map[accel.Resource]string `json:"sockets,omitempty"`
	// Memory is what the parts remember, by resource and kind of part. A successor
	// that cannot read it starts as after a crash.
	Memory map[string]json.RawMessage `json:"memory,omitempty"`
	// Quarantine has the devices in quarantine; nil where that is not known.
	Quarantine []accel.Quarantine `json:"quarantine"`
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
	a.phases.watching.stop()
	out := Handoff{Sockets: map[accel.Resource]string{}, Memory: map[string]json.RawMessage{}}
	for _, r := range a.offerings {
		if socket := r.server.Yield(); socket != "" {
			out.Sockets[r.name] = socket
		}
	}
	for vendor, server := range a.claims.servers {
		if socket := server.Yield(); socket != "" {
			out.Sockets[socketKey(vendor)] = socket
		}
	}
	// Kubelet must have recorded what it was given before the successor asks (see
	// records.turn).
	e, done := a.records.owner.use()
	last := e.LastGiven("")
	done()
	<-time.After(time.Until(last.Add(alloc.RecordedBefore)))
	a.phases.deciding.stop()
	for _, r := range a.offerings {
		for _, p := range r.parts {
			if data, err := p.memory(); err == nil {
				out.Memory[p.String()] = data
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
	for vendor, server := range a.claims.servers {
		failed = append(failed, server.Pass(sockets[socketKey(vendor)]))
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
	for _, server := range a.claims.servers {
		leaving.Go(func() { server.Leave(ctx) })
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
	if err := a.discoveries.untold(); err != nil {
		return nil, err
	}
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
	for vendor, server := range a.claims.servers {
		socket, err := server.Socket()
		if err != nil {
			return nil, err
		}
		sockets[socketKey(vendor)] = socket
	}
	return sockets, nil
}

// socketKey stands for the driver of a vendor's claims among sockets by resource. The names of
// resources have a slash, and those of drivers have none.
func socketKey(vendor string) accel.Resource { return accel.Resource(wire.Driver(vendor)) }

// recall restores the memory of a resource's parts, and keeps the resource off the
// predecessor's socket.
func (a *Agent) recall(ctx context.Context, r *offering) {
	if socket := a.o.Handoff.Sockets[r.name]; socket != "" {
		r.server.TakeOver(socket)
	}
	for _, p := range r.parts {
		data := a.o.Handoff.Memory[p.String()]
		if data == nil {
			continue
		}
		if err := p.recall(data); err != nil {
			klog.FromContext(ctx).Error(err, "Could not read the predecessor's state; starting without it", "resource", r.name)
		}
	}
}

// memory returns what the pool remembers from one question of kubelet to the next.
// It consists of strings, numbers and times, which do not fail.
func (p *pool) memory() ([]byte, error) {
	p.records.turn.Lock()
	defer p.records.turn.Unlock()
	e, done := p.records.owner.use()
	defer done()
	return json.Marshal(e.Memory(p.ID))
}

// recall restores what the predecessor remembered. The pool has not started.
func (p *pool) recall(data []byte) error {
	e, done := p.records.owner.use()
	defer done()
	return e.Recall(p.ID, data)
}

// offers reports whether there is a list of units for kubelet.
func (r *offering) offers() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.lists, func(list []deviceplugin.Unit) bool { return list != nil })
}
