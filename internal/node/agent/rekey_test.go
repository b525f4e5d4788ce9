package agent

import (
	"context"
	"path/filepath"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// TestReconcileSignsAnewAfterAKeyChange: the key before verifies in programs
// that saw it only, so a grant must not stay signed with it.
func TestReconcileSignsAnewAfterAKeyChange(t *testing.T) {
	w := newWorld(t, "1")
	w.update(t.Context(), found(card(0, "a", 16)), nil)
	pod := newPod("p", 4)
	w.see(pod)
	if _, err := w.admit(pod); err != nil {
		t.Fatal(err)
	}
	c, client := newCorrector(t, w)
	path := filepath.Join(t.TempDir(), "key")
	writeFile(t, path, "0123456789abcdef0123456789abcdef")
	c.keys = kube.NewKeyring(path)
	// reconcile writes the pod and shows the watch what was written.
	reconcile := func() string {
		t.Helper()
		if err := reconcileAll(t, c, w); err != nil {
			t.Fatal(err)
		}
		written, err := client.CoreV1().Pods(pod.Namespace).Get(t.Context(), pod.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		pod.Annotations = written.Annotations
		return written.Annotations[wire.GrantAnnotation]
	}
	reconcile()

	ctx, stop := context.WithCancel(t.Context())
	changed := make(chan struct{}, 1)
	var work sync.WaitGroup
	work.Go(func() { c.keys.Run(ctx, func() { changed <- struct{}{} }) })
	writeFile(t, path, "fedcba9876543210fedcba9876543210")
	<-changed
	stop()
	work.Wait()

	grant := reconcile()
	signer, err := wire.NewSigner([]byte("fedcba9876543210fedcba9876543210"))
	if err != nil {
		t.Fatal(err)
	}
	if g, err := signer.DecodeGrant(string(pod.UID), grant); err != nil || g.Device != "a" || !g.Confirmed {
		t.Errorf("with the new key alone, grant %s reads as %+v, %v; want device a, confirmed", grant, g, err)
	}
	before := patches(client)
	reconcile()
	if n := patches(client) - before; n != 0 {
		t.Errorf("%d more writes, want calm", n)
	}
}
