package supervisor

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/node/handover"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
)

// Intervals of a process that waits for the node.
const (
	// tryAgain is the pause between two attempts to take the lock.
	tryAgain = 50 * time.Millisecond
	// askInterval is the pause between two requests to take over.
	askInterval = 500 * time.Millisecond
	// silence is how long the process that has the lock may not listen before it
	// counts as one of a release that does not hand over.
	silence = 2 * time.Second
	// discoverLimit bounds one discovery of all vendors' devices.
	discoverLimit = 10 * time.Second
)

// claimed is the node's lock with what came with it.
type claimed struct {
	seat *handover.Seat
	// predecessor may be nil.
	predecessor *handover.Predecessor
	config      config.NodeConfig
	// backends are nil unless they were opened while waiting.
	backends vendors.Set
}

// claim waits until the lock is free or the process that has it hands over. One
// daemon serves a node, because two would use the same sockets.
func (s *supervisor) claim(ctx context.Context, seat *handover.Seat, c config.NodeConfig, updates <-chan nodeconfig.Update) (claimed,
	error) {
	log := klog.FromContext(ctx)
	held, err := seat.Take()
	if held || err != nil {
		s.retired = false
		return claimed{seat: seat, config: c}, err
	}
	log.Info("Another divvy-node runs on this node; waiting until it ends or hands over")
	ready := s.prepare(ctx, c)
	defer func() { ready.release() }()
	silent, asked := &since{}, time.Time{}
	for told := ""; ; {
		if held, err := seat.Take(); held || err != nil {
			s.retired = false
			return claimed{seat: seat, config: c, backends: ready.take()}, err
		}
		if prepared := ready.err(); s.retired {
			s.state.wait(handover.ErrRetired)
		} else if prepared == nil && time.Since(asked) >= askInterval {
			p, err := seat.Ask(ctx)
			if err == nil {
				return claimed{seat: seat, predecessor: p, config: c, backends: ready.take()}, nil
			}
			asked = time.Now()
			if err.Error() != told && ctx.Err() == nil {
				told = err.Error()
				log.Info("Waiting", "because", told)
			}
			if silent.is(errors.Is(err, handover.ErrSilent)) > silence && s.replaces(ctx) {
				err = nil
			}
			s.state.wait(err)
		} else if prepared != nil {
			s.state.wait(fmt.Errorf("another divvy-node runs on this node, and this one cannot take over: %w", prepared))
		}
		select {
		case <-ctx.Done():
			return claimed{}, ctx.Err()
		case u := <-updates:
			if u.Err != nil {
				s.reject(ctx, u.Err)
				continue
			}
			warn(ctx, append(u.Warnings, vendors.UnknownCauses(u.Config)...))
			ready.release()
			c = keep(ctx, c, u.Config)
			if err := s.o.Log.set(c.LogFile, c.LogLevel); err != nil {
				log.Error(err, "Changing the log")
			}
			ready = s.prepare(ctx, c)
		case <-time.After(tryAgain):
		}
	}
}

// since measures how long a condition has held without a break.
type since struct{ begin time.Time }

func (s *since) is(so bool) time.Duration {
	switch {
	case !so:
		s.begin = time.Time{}
	case s.begin.IsZero():
		s.begin = time.Now()
	}
	if s.begin.IsZero() {
		return 0
	}
	return time.Since(s.begin)
}

// preparation loads the vendors' libraries before the node is taken over, so that a
// slow or broken library does not hold up kubelet.
type preparation struct {
	cancel context.CancelFunc
	ended  chan struct{}

	mu       sync.Mutex // guards what follows
	backends vendors.Set
	problem  error
}

func (s *supervisor) prepare(ctx context.Context, c config.NodeConfig) *preparation {
	ctx, cancel := context.WithCancel(ctx)
	p := &preparation{cancel: cancel, ended: make(chan struct{}), problem: errors.New("device discovery has not completed")}
	b, err := s.open(c)
	if err != nil {
		p.problem = err
		close(p.ended)
		return p
	}
	p.backends = b
	go func() {
		defer close(p.ended)
		for {
			// A pause that begins while this process waits takes the library out of it.
			_, paused := s.operator.pause.Now()
			err := discover(ctx, b)
			p.mu.Lock()
			p.problem = err
			p.mu.Unlock()
			var again <-chan time.Time
			if err != nil {
				again = time.After(time.Second)
			}
			select {
			case <-ctx.Done():
				return
			case <-paused:
			case <-again:
			}
		}
	}()
	return p
}

// discover returns nil if a device of any vendor is found.
func discover(ctx context.Context, all vendors.Set) error {
	ctx, cancel := context.WithTimeout(ctx, discoverLimit)
	defer cancel()
	var failed []error
	some := false
	for vendor, b := range all { // all of them: a pause releases one vendor's library
		found, err := b.Discover(ctx)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", vendor, err))
		}
		some = some || err == nil && len(found.Devices) > 0
	}
	if some {
		return nil
	}
	return errors.Join(append(failed, errors.New("no device was found"))...)
}

// err returns why this process cannot take over yet, or nil.
func (p *preparation) err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.problem
}

// take returns the open backends, which are the caller's from then on; nil if there
// are none.
func (p *preparation) take() vendors.Set {
	p.cancel()
	<-p.ended
	b := p.backends
	p.backends = nil
	return b
}

// release closes the backends unless they were taken.
func (p *preparation) release() { _ = p.take().Close() }

// replaces reports whether another pod of the same DaemonSet is on this node. The
// DaemonSet deletes that one once this one is ready. If its release does not hand
// over, each would otherwise wait for the other.
func (s *supervisor) replaces(ctx context.Context) bool {
	other, err := sibling(ctx, s.client, s.o.Node, s.o.Self.ID)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Looking for the pod that this one replaces")
	}
	return other
}

// sibling reports whether the controller of the pod with that UID has another pod on
// the node.
func sibling(ctx context.Context, client kubernetes.Interface, node, uid string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, discoverLimit)
	defer cancel()
	list, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String(),
	})
	if err != nil {
		return false, fmt.Errorf("list the pods of node %s: %w", node, err)
	}
	controllers := map[string]string{}
	for i := range list.Items {
		pod := &list.Items[i]
		if c := metav1.GetControllerOf(pod); c != nil && pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed {
			controllers[string(pod.UID)] = string(c.UID)
		}
	}
	own, known := controllers[uid]
	for other, controller := range controllers {
		if known && other != uid && controller == own {
			return true, nil
		}
	}
	return false, nil
}
