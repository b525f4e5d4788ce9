package agent

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestPodDeletedWhileKubeletAdmitsIt: kubelet hears of the deletion later than
// this program, so the question is for that pod and not for one like it.
func TestPodDeletedWhileKubeletAdmitsIt(t *testing.T) {
	for name, deleted := range map[string]func(*world, *corev1.Pod){
		"being deleted": func(_ *world, p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} },
		"gone": func(w *world, p *corev1.Pod) {
			w.cached, w.api = w.cached[:0:0], w.api[:0:0]
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "1")
			w.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16), card(2, "c", 16)), nil)
			withInit := func(name string) *corev1.Pod {
				p := newPod(name, 5)
				p.Spec.InitContainers = []corev1.Container{container("init", 12)}
				return p
			}
			goes := w.grantTo(withInit("goes"), "a", 2)
			stays := w.grantTo(withInit("stays"), "b", 1) // the older grant
			w.see(goes)
			deleted(w, goes)
			w.see(stays)

			on, err := w.admit(goes)
			if err != nil {
				t.Fatal(err)
			}
			if name == "being deleted" && on["c0"] != "a" {
				t.Errorf("the pod that is being deleted got %v, want its grant a", on)
			}
			on, err = w.admit(stays)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(map[string]string{"init": "b", "c0": "b"}, on); diff != "" {
				t.Errorf("the pod that stays (-want +got):\n%s", diff)
			}
			w.remove(goes)
			// All that it held can be had again: two whole cards.
			for _, name := range []string{"x", "y"} {
				p := newPod(name, 16)
				w.see(p)
				if _, err := w.admit(p); err != nil {
					t.Errorf("pod %s: %v", name, err)
				}
			}
		})
	}
}
