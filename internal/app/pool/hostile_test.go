package pool

import (
	"bytes"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/pool/admin"
)

// A secret that is on its way out holds the token no longer than its finalizers,
// so saying that it is unchanged would leave the pool without one.
func TestImportDoesNotCountOnASecretThatIsBeingDeleted(t *testing.T) {
	now := metav1.Now()
	good := goodToken()
	leaving := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: admin.DefaultNamespace, Name: pool.CASecret, Labels: map[string]string{admin.ImportedLabel: "true"},
			DeletionTimestamp: &now, Finalizers: []string{"example.com/slow"},
		},
		Data: good.Secrets()[pool.CASecret],
	}
	var out bytes.Buffer
	err := admin.Import(t.Context(), admin.DefaultImportOptions(), fake.NewClientset(leaving), good, &out)
	if err == nil || !strings.Contains(err.Error(), "is being deleted; wait until it is deleted") || out.Len() > 0 {
		t.Errorf("said %q, error %v", out.String(), err)
	}
}
