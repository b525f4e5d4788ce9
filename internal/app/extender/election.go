package extender

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// errLostLease ends a replica that led: kubelet starts it again, with books
// that hold no reservation of a time when another replica bound pods.
var errLostLease = errors.New("another replica may lead now: the Lease was not renewed in time")

// elect takes part in the election until ctx ends, and then gives the Lease
// up. Two replicas must never bind at the same time, since neither knows the
// other's reservations.
func (p *program) elect(ctx context.Context) error {
	lock := &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Name: p.settings.LeaderElectName, Namespace: p.settings.LeaderElectNamespace},
		Client:     p.clients.Kubernetes.CoordinationV1(),
		LockConfig: resourcelock.ResourceLockConfig{Identity: p.settings.identity},
	}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock:            lock,
		Name:            p.settings.LeaderElectName,
		LeaseDuration:   15 * time.Second,
		RenewDeadline:   10 * time.Second,
		RetryPeriod:     2 * time.Second,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) { p.leading.Store(true) },
			OnStoppedLeading: func() { p.leading.Store(false) },
			OnNewLeader: func(identity string) {
				klog.FromContext(ctx).Info("Leader", "identity", identity, "self", identity == p.settings.identity)
			},
		},
	})
	if err != nil {
		return fmt.Errorf("leader election: %w", err)
	}
	elector.Run(ctx)
	if ctx.Err() == nil {
		return errLostLease
	}
	return nil
}
