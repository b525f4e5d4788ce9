package certs

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// A controller that writes annotations of the configurations now and then, as
// those of GitOps do, holds no change of CA up: only the webhooks matter.
func TestNotesOnTheConfigurationsDoNotHoldAChangeOfCAUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, emptySecret())
		note := func(metadata string) {
			t.Helper()
			if _, err := w.admin.AdmissionregistrationV1().MutatingWebhookConfigurations().Patch(t.Context(), mutName,
				types.StrategicMergePatchType, []byte(`{"metadata":`+metadata+`}`), metav1.PatchOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		note(`{"generation":1}`) // the stand-in gives none
		m := w.replica(w.server.Client(nil), nil)
		w.settle(m)
		stop := w.load(m)
		old := w.content()
		w.rotate("ca")
		for i := range 40 {
			note(fmt.Sprintf(`{"annotations":{"seen":"%d"}}`, i))
			time.Sleep(5 * time.Second)
		}
		stop()
		if now := w.content(); now.ca.cert.Equal(old.ca.cert) || now.next != nil || now.previous != nil {
			t.Error("the change of CA did not come to its end")
		}
	})
}
