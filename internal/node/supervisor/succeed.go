package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/agent"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/node/handover"
	"github.com/divvy-gpu/divvy/internal/node/quarantine"
)

// Limits of a handover between two agents.
const (
	// servingLimit is how long a new agent may take until kubelet watches its lists.
	servingLimit = 10 * time.Second
	// leaveLimit is how long an agent may take to leave.
	leaveLimit = 20 * time.Second
	// farewell is how long a process waits for its successor after SIGTERM.
	farewell = 10 * time.Second
)

// begin starts the agent of a node that was claimed, and takes over from the
// predecessor if there is one.
func (s *supervisor) begin(ctx context.Context, got claimed) (_ *running, err error) {
	log := klog.FromContext(ctx)
	if got.predecessor != nil {
		defer got.predecessor.Close()
	}
	b := got.backends
	if b == nil {
		if b, err = s.open(got.config); err != nil {
			return nil, err
		}
	}
	// Until now another process may have changed the file.
	s.quarantine = quarantine.Open(ctx, got.config.StateDir)
	var left agent.Handoff
	if got.predecessor != nil {
		if err := json.Unmarshal(got.predecessor.Content, &left); err != nil {
			log.Error(err, "Could not read the predecessor's state; starting without it")
		}
	}
	begin := time.Now()
	s.recallProfiles(ctx, got.config.StateDir)
	now, err := s.start(ctx, got.config, s.profiles.wanted(begin), b, left)
	if err != nil || got.predecessor == nil {
		return now, err
	}
	sockets, err := s.serving(ctx, now)
	if err != nil {
		// The predecessor goes on once this process has let go.
		return nil, fmt.Errorf("take over from the running divvy-node: %w", errors.Join(err, s.stop(now)))
	}
	log.Info("Took over from the running divvy-node", "id", got.predecessor.From.ID,
		"kubeletWaited", time.Since(begin).Round(time.Millisecond))
	var unnoticed []accel.Resource
	if err := got.predecessor.Serving(sockets, &unnoticed); err != nil {
		log.Error(err, "The handover is not complete")
	}
	now.Renew(unnoticed)
	return now, nil
}

// release closes the backends and returns the node to the predecessor.
func (c claimed) release() error {
	if c.predecessor != nil {
		c.predecessor.Close()
	}
	return c.backends.Close()
}

// serving waits until kubelet watches all that an agent offers.
func (s *supervisor) serving(ctx context.Context, r *running) (sockets map[accel.Resource]string, err error) {
	limit := time.NewTimer(s.servingLimit)
	defer limit.Stop()
	for {
		sockets, err = r.Serving()
		if err == nil {
			return sockets, nil
		}
		select {
		case <-ctx.Done():
			return sockets, ctx.Err()
		case <-limit.C:
			return sockets, err
		case err := <-r.ended:
			r.ended <- err // its other reader gets it too
			return nil, fmt.Errorf("the node agent has ended: %w", err)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// yield stops an agent from deciding. Kubelet's questions wait.
func (s *supervisor) yield(r *running) agent.Handoff {
	left := r.Yield()
	s.state.set(nil)
	_ = r.release() // a library may serve one backend at a time; the error is in ended
	return left
}

// replace starts the successor of an agent of this process that has yielded.
func (s *supervisor) replace(ctx context.Context, old *running, left agent.Handoff, c config.NodeConfig, profiles map[string][]string,
	b vendors.Set,
) (*running, error) {
	log := klog.FromContext(ctx)
	next, err := s.start(ctx, c, profiles, b, left)
	if err != nil {
		return nil, err
	}
	sockets, err := s.serving(ctx, next)
	if err != nil && ctx.Err() == nil {
		log.Error(err, "Kubelet does not watch all resources yet")
	}
	unnoticed, err := leave(old, sockets)
	if err != nil {
		log.Error(err, "Stopping what ran before")
	}
	next.Renew(unnoticed)
	return next, nil
}

// leave ends an agent that has yielded, whose successor serves on the sockets.
func leave(r *running, sockets map[accel.Resource]string) (unnoticed []accel.Resource, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), leaveLimit)
	defer cancel()
	err = r.Pass(sockets)
	unnoticed = r.Leave(ctx)
	r.cancel()
	return unnoticed, errors.Join(err, <-r.ended)
}

// handOver passes the node to the process that requests it. If that one gives up, it
// returns a new agent of this process, else nil.
func (s *supervisor) handOver(ctx context.Context, now *running, request *handover.Request) (*running, error) {
	defer request.Close()
	log := klog.FromContext(ctx).WithValues("to", request.From.ID)
	log.Info("Handing over")
	left := s.yield(now)
	saved := s.quarantine.Sync() == nil
	s.state.wait(handover.ErrRetired)
	var sockets map[accel.Resource]string
	err := request.Pass(left)
	if err == nil {
		// After SIGTERM the successor gets some time to finish.
		waiting, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer context.AfterFunc(ctx, func() { time.AfterFunc(farewell, cancel) })()
		err = request.Await(waiting, &sockets)
	}
	if err == nil {
		unnoticed, err := leave(now, sockets)
		if err != nil {
			log.Error(err, "Stopping what ran")
		}
		if err := request.Left(unnoticed); err != nil {
			log.Error(err, "Cannot report to the successor")
		}
		log.Info("Handed over")
		return nil, errHandedOver
	}
	if ctx.Err() != nil {
		return nil, s.stop(now)
	}
	log.Error(err, "The successor did not take over; serving the node again")
	if saved {
		// The successor decided meanwhile, and its list goes on.
		s.quarantine, left.Quarantine = quarantine.Open(ctx, now.config.StateDir), nil
	}
	b, err := s.open(now.config)
	if err != nil {
		return nil, errors.Join(err, s.stop(now))
	}
	next, err := s.replace(ctx, now, left, now.config, now.profiles, b)
	if err != nil {
		return nil, errors.Join(err, s.stop(now))
	}
	return next, nil
}
