package leader

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/klog/v2"
)

// Bounds of Config.Duration. The API server counts it in whole seconds.
const (
	// DefaultDuration is kube-scheduler's own. A leader keeps the Lease, and what it
	// binds is written in time, while a write takes the API server up to 5 s.
	DefaultDuration = 15 * time.Second
	MinDuration     = time.Second
	MaxDuration     = time.Minute
)

// Parts of Config.Duration, of 15 s: a renewal is sent 2 s after the one before, or
// when that was answered if it took longer, and is given up after 12 s.
func renewPeriod(d time.Duration) time.Duration   { return d * 2 / 15 }
func renewDeadline(d time.Duration) time.Duration { return d * 4 / 5 }

// retryPeriod is how often a replica looks at the Lease. It does not grow with the
// duration, so that a Lease that was released is taken within a second.
func retryPeriod(d time.Duration) time.Duration { return min(renewPeriod(d), 400*time.Millisecond) }

// margin is taken off the time in which a leader may act: for clocks that run a
// little faster than others, and for what is on its way to the API server.
func margin(d time.Duration) time.Duration { return d / 10 }

// catchUpTimeout is how long a replica may have the Lease without being able to lead,
// until it lets another try: several writes of a slow API server.
const catchUpTimeout = 15 * time.Second

// suffix is the length of the random end of an identity.
const suffix = 8

// Errors of Until; test with errors.Is.
var (
	// ErrNotLeading: another replica may lead.
	ErrNotLeading = errors.New("this replica is not the leader")
	// ErrNotRenewed: this replica leads, but not for long enough if its Lease is not
	// renewed soon.
	ErrNotRenewed = errors.New("the Lease was not renewed in time: the API server is unavailable or slow")
)

// Config is what an Elector needs. All of it is required but where said.
type Config struct {
	Client kubernetes.Interface
	// Namespace and Name are those of the Lease.
	Namespace, Name string
	// Pod and Address name this replica to the others: Address is how they reach it,
	// host:port, and may be empty. Neither may have an underscore.
	Pod, Address string
	// Duration is how long a Lease that is not renewed lasts, in whole seconds; 0 for
	// DefaultDuration.
	Duration time.Duration
	// CatchUp is called when this replica got the Lease; it leads once that returns
	// nil. Its context ends with the Lease. nil for nothing to catch up with.
	CatchUp func(ctx context.Context) error
	// Shared says that other programs take part in the election, such as kube-scheduler, which
	// releases the Lease while its writes are under way. This replica leads only after Duration
	// where one of them held the Lease last, or that is not known.
	Shared bool
}

// Elector is one replica's part in an election. Its methods are safe for concurrent use.
type Elector struct {
	config   Config
	identity string
	// uid is that of the Lease when it was read or made last; used by the elector's
	// goroutine alone, of which there is one at a time.
	uid types.UID

	mu sync.Mutex // guards what follows
	// renewed is from before the last renewal that succeeded was sent; zero while this
	// replica does not hold the Lease. took is how long that renewal took.
	renewed time.Time
	took    time.Duration
	// caughtUp is true when CatchUp has returned nil since the Lease was got.
	caughtUp bool
	// notBefore is when this replica may lead at the earliest: until then another may act
	// whose Lease was deleted.
	notBefore time.Time
	// holder is the identity that the Lease had when it was last seen, and last the same but
	// for none.
	holder, last string
	// changed is closed when any of these change but for renewed, and replaced.
	changed chan struct{}
	// terms counts how often this replica began to lead.
	terms int
}

// New checks the configuration.
func New(c Config) (*Elector, error) {
	if c.Duration == 0 {
		c.Duration = DefaultDuration
	}
	var errs []error
	if c.Client == nil {
		errs = append(errs, errors.New("election: no client of the API server"))
	}
	if c.Namespace == "" || c.Name == "" || c.Pod == "" {
		errs = append(errs, fmt.Errorf("election: want the Lease's namespace and name, and the pod's name, got %q, %q and %q", c.Namespace,
			c.Name, c.Pod))
	}
	if strings.Contains(c.Pod+c.Address, "_") {
		errs = append(errs, fmt.Errorf("election: an underscore is in the pod's name %q or in its address %q", c.Pod, c.Address))
	}
	errs = append(errs, CheckDuration(c.Duration))
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	// A process that follows another in the same pod is another replica: what the
	// first one did may still be under way.
	identity := strings.Join([]string{c.Pod, c.Address, rand.Text()[:suffix]}, "_")
	return &Elector{config: c, identity: identity, changed: make(chan struct{})}, nil
}

// CheckDuration says what is wrong with the duration of a Lease.
func CheckDuration(d time.Duration) error {
	if d < MinDuration || d > MaxDuration || d%time.Second != 0 {
		return fmt.Errorf("%s: must be whole seconds, from %s to %s", d, MinDuration, MaxDuration)
	}
	return nil
}

// ofElector reports whether an identity is that of a replica of this package.
func ofElector(identity string) bool {
	parts := strings.Split(identity, "_")
	return len(parts) == 3 && len(parts[2]) == suffix
}

// addressOf returns the address in the identity of a replica, "" for none: also of
// programs that are called otherwise.
func addressOf(identity string) string {
	parts := strings.Split(identity, "_")
	if len(parts) != 3 {
		return ""
	}
	return parts[1]
}

// Run takes part in the election until ctx ends, and gives the Lease up then: nothing
// that was begun may be under way any more.
func (l *Elector) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		able, err := l.term(ctx)
		if err != nil {
			return err
		}
		if able {
			continue
		}
		select { // until another could have taken the Lease
		case <-time.After(2 * l.config.Duration):
		case <-ctx.Done():
		}
	}
	return nil
}

// term waits for the Lease and keeps it as long as it can. It returns false when this
// replica had the Lease and could not lead.
func (l *Elector) term(ctx context.Context) (able bool, err error) {
	term, end := context.WithCancel(ctx)
	defer end()
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock:            &lock{lead: l, ending: ctx.Done()},
		Name:            l.config.Name,
		LeaseDuration:   l.config.Duration,
		RenewDeadline:   renewDeadline(l.config.Duration),
		RetryPeriod:     retryPeriod(l.config.Duration),
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) {}, // it is called in a goroutine that nobody could wait for
			OnStoppedLeading: l.lost,
		},
	})
	if err != nil {
		return false, fmt.Errorf("election: %w", err)
	}
	able = true
	var catching sync.WaitGroup
	catching.Go(func() {
		if able = l.begin(term); !able {
			end()
		}
	})
	elector.Run(term)
	end()
	catching.Wait()
	return able, nil
}

// begin waits for the Lease, catches up, and leads. It returns false when it cannot,
// although it has the Lease.
func (l *Elector) begin(ctx context.Context) bool {
	for {
		holds, changed := l.holds()
		if holds {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return true
		}
	}
	select {
	case <-time.After(l.mustWait()):
	case <-ctx.Done():
		return true
	}
	logger := klog.FromContext(ctx)
	began := time.Now()
	if l.config.CatchUp != nil {
		bounded, cancel := context.WithTimeout(ctx, catchUpTimeout)
		defer cancel()
		if err := l.config.CatchUp(bounded); err != nil {
			if ctx.Err() != nil {
				return true
			}
			logger.Error(err, "This replica holds the Lease but cannot lead; releasing it")
			return false
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if ctx.Err() != nil || l.renewed.IsZero() {
		return true
	}
	l.caughtUp = true
	l.terms++
	l.tell()
	logger.Info("This replica is the leader", "caughtUpIn", time.Since(began).Round(time.Millisecond))
	return true
}

// holds reports whether this replica got the Lease.
func (l *Elector) holds() (bool, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.renewed.IsZero(), l.changed
}

// lost is called when the Lease is this replica's no longer.
func (l *Elector) lost() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.renewed, l.caughtUp = time.Time{}, false
	l.tell()
}

// tell wakes who waits. l.mu is held.
func (l *Elector) tell() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// saw notes who has the Lease.
func (l *Elector) saw(holder string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if holder != "" {
		l.last = holder
	}
	if holder != l.holder {
		l.holder = holder
		l.tell()
	}
}

// wrote notes that this replica has the Lease, by a request that was sent at began and
// has just been answered.
func (l *Elector) wrote(began time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	first := l.renewed.IsZero()
	l.renewed, l.took = began, time.Since(began)
	if first || l.holder != l.identity {
		l.holder = l.identity
		l.tell()
	}
}

// renewedSince reports whether this replica holds the Lease by a request that was sent
// after then.
func (l *Elector) renewedSince(then time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.renewed.After(then)
}

// succeeds notes that this replica takes the Lease from the last holder.
func (l *Elector) succeeds() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.config.Shared && !ofElector(l.last) {
		l.notBefore = time.Now().Add(l.config.Duration)
	}
}

// waits notes until when another may act whose Lease was deleted.
func (l *Elector) waits(until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.notBefore = until
}

// mustWait is for how much longer another may act whose Lease was deleted; 0 or less
// for none.
func (l *Elector) mustWait() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Until(l.notBefore)
}

// left is how much longer nobody else can have the Lease. l.mu is held.
func (l *Elector) left(now time.Time) time.Duration {
	if l.renewed.IsZero() {
		return 0
	}
	return l.config.Duration - margin(l.config.Duration) - since(l.renewed, now)
}

// since is the time from then to now by the clock that says that more has gone by: a
// wall clock that was set back says too little, and a monotonic one may stand still
// while the machine is suspended.
func since(then, now time.Time) time.Duration {
	return max(now.Sub(then), now.Round(0).Sub(then.Round(0)))
}

// Leading reports whether this replica leads now: nobody else does.
func (l *Elector) Leading() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.caughtUp && l.left(time.Now()) > 0
}

// enough is how much time must be left for a write to be begun: a third of the Lease's
// duration, or somewhat more than the API server took for the last renewal, as far as a
// renewal that takes as long again leaves that much. l.mu is held.
func (l *Elector) enough() time.Duration {
	d := l.config.Duration
	return min(max(d/3, l.took*5/4), d-margin(d)-l.took)
}

// Until returns until when this replica may act, at least a third of the Lease's
// duration from now, and longer where the API server is slow. It waits for a renewal
// where that is needed. The error wraps ErrNotLeading, or ErrNotRenewed where ctx ended
// before.
func (l *Elector) Until(ctx context.Context) (time.Time, error) {
	poll := retryPeriod(l.config.Duration) / 4
	for {
		l.mu.Lock()
		now := time.Now()
		leads, left, enough, changed := l.caughtUp, l.left(now), l.enough(), l.changed
		l.mu.Unlock()
		switch {
		case !leads:
			return time.Time{}, ErrNotLeading
		case left >= enough:
			return now.Add(left), nil
		}
		select {
		case <-changed:
		case <-time.After(poll):
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("%w: %w", ErrNotRenewed, context.Cause(ctx))
		}
	}
}

// Leader returns the address of the replica that holds the Lease as far as is known,
// "" when that is this one, or nobody, or one that gave none. The channel is closed when
// what this or Leading returns may have changed; that the Lease ran out changes
// Leading, and closes nothing.
func (l *Elector) Leader() (address string, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holder != l.identity {
		address = addressOf(l.holder)
	}
	return address, l.changed
}

// Terms returns how often this replica began to lead.
func (l *Elector) Terms() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.terms
}

// Duration is how long a Lease that is not renewed lasts.
func (l *Elector) Duration() time.Duration { return l.config.Duration }
