package leader

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// lock is a lock on a Lease for client-go's elector, which calls it from one
// goroutine. It tells an Elector what it sees and does, and refuses what would let two
// lead.
//
// It takes the place of client-go's own, by which others see renewals of one second as
// one: they would count from the first of them, and the holder may act until the last
// one ends.
type lock struct {
	lead *Elector
	// ending is closed when the program ends in order.
	ending <-chan struct{}
	// lease is as it was read or written last; nil before.
	lease *coordinationv1.Lease
}

var _ resourcelock.Interface = (*lock)(nil)

func (l *lock) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, renewDeadline(l.lead.config.Duration))
}

// Identity is that of this replica.
func (l *lock) Identity() string { return l.lead.identity }

// Describe names the Lease in logs.
func (l *lock) Describe() string { return l.lead.config.Namespace + "/" + l.lead.config.Name }

// RecordEvent makes none: who leads is in the Lease, in logs and in metrics.
func (*lock) RecordEvent(string) {}

// Get reads the Lease. The bytes differ whenever it was written in between.
func (l *lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	c := l.lead.config
	lease, err := c.Client.CoordinationV1().Leases(c.Namespace).Get(ctx, c.Name, metav1.GetOptions{})
	if err != nil {
		return nil, nil, err //nolint:wrapcheck // the elector tells kinds of errors apart by their type
	}
	l.lease = lease
	record := resourcelock.LeaseSpecToLeaderElectionRecord(&lease.Spec)
	if record.HolderIdentity == l.Identity() && lease.UID != l.lead.uid {
		// This replica made it, and the answer was lost: as in Create.
		l.lead.waits(time.Now().Add(l.lead.config.Duration))
	}
	l.lead.uid = lease.UID
	l.lead.saw(record.HolderIdentity)
	return record, []byte(string(lease.UID) + "/" + lease.ResourceVersion), nil
}

// Create makes the Lease where there is none. One may have been deleted, with a holder
// that does not know yet, so this replica leads only after the time in which that one
// can act, unless it was that itself.
func (l *lock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	began := time.Now()
	l.lead.mu.Lock()
	own := l.lead.left(began) > 0
	l.lead.mu.Unlock()
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	c := l.lead.config
	lease, err := c.Client.CoordinationV1().Leases(c.Namespace).Create(ctx, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: c.Name},
		Spec:       resourcelock.LeaderElectionRecordToLeaseSpec(&record),
	}, metav1.CreateOptions{})
	if err != nil {
		return err //nolint:wrapcheck // as above
	}
	l.lease = lease
	l.lead.uid = lease.UID
	if !own {
		l.lead.waits(time.Now().Add(l.lead.config.Duration))
	}
	l.lead.wrote(began)
	return nil
}

// Update takes, renews or gives up the Lease as it was read or written last. A renewal
// is written once in a renewPeriod: the elector asks for one whenever it looks.
func (l *lock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	began := time.Now()
	if l.lease == nil {
		return fmt.Errorf("the Lease %s was not read yet", l.Describe())
	}
	if record.HolderIdentity == l.Identity() && l.lead.renewedSince(began.Add(-renewPeriod(l.lead.config.Duration))) {
		return nil
	}
	if record.HolderIdentity == "" {
		select {
		case <-l.ending:
		default:
			return nil // it was lost: what is under way may still be done, so it runs out
		}
		// The elector goes by what it remembers, which may be old.
		if holder := l.lease.Spec.HolderIdentity; holder == nil || *holder != l.Identity() {
			return nil
		}
		if l.lead.mustWait() > 0 {
			return nil // who took it would lead at once: it runs out, as above
		}
		l.lead.lost() // before anybody else can have it
	}
	if before := l.lease.Spec.HolderIdentity; record.HolderIdentity == l.Identity() && (before == nil || *before != l.Identity()) {
		l.lead.succeeds()
	}
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	next := l.lease.DeepCopy()
	next.Spec = resourcelock.LeaderElectionRecordToLeaseSpec(&record)
	lease, err := l.lead.config.Client.CoordinationV1().Leases(next.Namespace).Update(ctx, next, metav1.UpdateOptions{})
	if err != nil {
		return err //nolint:wrapcheck // as above
	}
	l.lease = lease
	if record.HolderIdentity == l.Identity() {
		l.lead.wrote(began)
	} else {
		klog.FromContext(ctx).Info("Released the Lease")
	}
	return nil
}
