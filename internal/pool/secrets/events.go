package secrets

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// tell makes an event on each pod that waits for a secret, once for each reason
// and secret; replicas use the same name, so there is one between them. It
// returns after how long to go on when there are too many.
func (k *Keeper) tell(ctx context.Context, users []*pod, kind events.Kind, name, message string) (again time.Duration, err error) {
	for _, p := range users {
		if !p.waiting || !k.mark(string(p.UID), kind.Reason+" "+name, true) {
			continue
		}
		if !k.events.TryAccept() {
			k.mark(string(p.UID), kind.Reason+" "+name, false)
			return 5 * time.Second, nil
		}
		if err := k.event(ctx, p, kind, name, message); err != nil {
			k.mark(string(p.UID), kind.Reason+" "+name, false)
			return 0, err
		}
	}
	return 0, nil
}

// mark notes that a pod has been told something, or takes that back. It returns
// false when nothing is different.
func (k *Keeper) mark(uid, what string, told bool) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.told[uid][what] == told {
		return false
	}
	if k.told[uid] == nil {
		k.told[uid] = map[string]bool{}
	}
	k.told[uid][what] = told
	return true
}

func (k *Keeper) forgetPod(uid string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.told, uid)
}

func (k *Keeper) event(ctx context.Context, p *pod, kind events.Kind, name, message string) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	sum := sha256.Sum256([]byte(string(p.UID) + kind.Reason + name))
	const longest = 253
	suffix := "." + hex.EncodeToString(sum[:8])
	e := events.New(corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
	}, kind, message)
	e.Namespace, e.Name, e.ReportingController = p.Namespace, p.Name[:min(len(p.Name), longest-len(suffix))]+suffix, "divvy.dev/pool"
	_, err := k.config.Client.CoreV1().Events(p.Namespace).Create(ctx, e, metav1.CreateOptions{})
	if err == nil || apierrors.IsAlreadyExists(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil
	}
	return fmt.Errorf("event on pod %s/%s: %w", p.Namespace, p.Name, err)
}
