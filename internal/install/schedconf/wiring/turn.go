package wiring

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/install/schedconf/host"
)

// turnLease is the name of the Lease of the node whose turn it is, in the
// namespace of the extender's Service. The chart makes it.
const turnLease = "divvy-schedconf"

// annotationRolledBack of that Lease says which change a node had to take back.
const annotationRolledBack = "divvy.dev/scheduler-rolled-back"

// rolledBackFor is how long the other nodes heed that.
const rolledBackFor = time.Hour

// rolledBack is the value of annotationRolledBack.
type rolledBack struct {
	Node    string       `json:"node"`
	Failure host.Failure `json:"failure"`
}

// turn is a host.Turn that a Lease keeps. It is safe for concurrent use.
type turn struct {
	client          kubernetes.Interface
	namespace, node string
	// longest is how long a node may be at work until another takes over: it was
	// switched off meanwhile.
	longest time.Duration
	now     func() time.Time

	mu sync.Mutex
	// seen is the Lease's version, and since when it is that, by the clock of this
	// node alone.
	seen  string
	since time.Time
}

// newTurn returns the turns of nodes that each may take twice the timeout, forth and
// back, and as long again as an API server may be away.
func newTurn(client kubernetes.Interface, namespace, node string, timeout time.Duration) *turn {
	return &turn{client: client, namespace: namespace, node: node, longest: 2*timeout + 5*time.Minute, now: time.Now}
}

// nobody reports whether an error is that nobody keeps turns here. A scheduler that
// is wired at the same time as another is better than one that never is.
func nobody(err error) bool { return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) }

// Take implements host.Turn. Where there is no Lease, no node minds another.
func (t *turn) Take(ctx context.Context, outcome string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	lease, err := t.client.CoordinationV1().Leases(t.namespace).Get(ctx, turnLease, metav1.GetOptions{})
	if nobody(err) {
		klog.FromContext(ctx).Info("Could not read the Lease; not coordinating with other nodes", "reason", err.Error())
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the lock Lease: %w", err)
	}
	if lease.ResourceVersion != t.seen {
		t.seen, t.since = lease.ResourceVersion, t.now()
	}
	if holder := ptr.Deref(lease.Spec.HolderIdentity, ""); holder != "" && holder != t.node && t.now().Sub(t.since) < t.longest {
		return &host.NotNowError{Node: holder}
	}
	if b, ok := failureOf(lease); ok && b.Node != t.node && b.Failure.Outcome == outcome {
		if age := t.now().Sub(b.Failure.At); age > -rolledBackFor && age < rolledBackFor {
			return &host.NotNowError{Node: b.Node, Failure: &b.Failure}
		}
	}
	now := metav1.NewMicroTime(t.now())
	lease.Spec.HolderIdentity, lease.Spec.AcquireTime, lease.Spec.RenewTime = &t.node, &now, &now
	lease.Spec.LeaseDurationSeconds = ptr.To(int32(t.longest.Seconds()))
	_, err = t.client.CoordinationV1().Leases(t.namespace).Update(ctx, lease, metav1.UpdateOptions{})
	if apierrors.IsConflict(err) {
		return &host.NotNowError{Node: "(another)"}
	}
	if err != nil {
		return fmt.Errorf("acquire the lock Lease: %w", err)
	}
	return nil
}

// Done implements host.Turn.
func (t *turn) Done(ctx context.Context, failure *host.Failure) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	leases := t.client.CoordinationV1().Leases(t.namespace)
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		lease, err := leases.Get(ctx, turnLease, metav1.GetOptions{})
		if nobody(err) {
			return nil
		}
		if err != nil {
			return err
		}
		before := lease.DeepCopy()
		if ptr.Deref(lease.Spec.HolderIdentity, "") == t.node {
			lease.Spec.HolderIdentity, lease.Spec.AcquireTime, lease.Spec.RenewTime = nil, nil, nil
		}
		switch b, ok := failureOf(lease); {
		case failure != nil:
			value, err := json.Marshal(rolledBack{t.node, *failure})
			if err != nil {
				return fmt.Errorf("record the rollback: %w", err)
			}
			metav1.SetMetaDataAnnotation(&lease.ObjectMeta, annotationRolledBack, string(value))
		case ok && b.Node == t.node:
			delete(lease.Annotations, annotationRolledBack)
		}
		if equality.Semantic.DeepEqual(before, lease) {
			return nil
		}
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
		return err
	})
}

func failureOf(lease *coordinationv1.Lease) (rolledBack, bool) {
	var b rolledBack
	text, ok := lease.Annotations[annotationRolledBack]
	return b, ok && json.Unmarshal([]byte(text), &b) == nil && b.Node != ""
}
