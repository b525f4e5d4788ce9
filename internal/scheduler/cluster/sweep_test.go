package cluster

import (
	"errors"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

const bindLimit = 18 * time.Second

// TestVerifyDropsReservationsOfPodsThatWereNeverShown plays an outage of the
// watch in which a pod is bound and deleted: no list and no event tells of it.
func TestVerifyDropsReservationsOfPodsThatWereNeverShown(t *testing.T) {
	const memory accel.Resource = "enflame.com/gcu-memory"
	now := time.Unix(1000, 0)
	pod := func(name, uid string) *v1.Pod {
		return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + uid)}}
	}
	client := fake.NewClientset(pod("lives", "lives"), pod("again", "young"))
	books := ledger.New(ledger.Options{Now: func() time.Time { return now }})
	books.SetNode("node", []accel.Inventory{{Resource: memory, Shares: []accel.Share{{Device: accel.Device{ID: "a"}, Units: 16}}}})
	s := Sweeper{Ledger: books, Binder: NewBinder(client, []accel.Resource{memory}, false), BindLimit: bindLimit}
	for _, name := range []string{"lives", "gone", "again"} {
		_, _, err := books.Reserve(accel.PodRef{UID: "uid-" + name, Namespace: "ns", Name: name}, now, "node", accel.Request{
			Resource: memory, Containers: []accel.ContainerRequest{{Name: "c", Kind: accel.AppContainer, Units: 4}},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	used := func() accel.Units {
		n, _ := books.Node(memory, "node")
		return n.Used
	}

	s.verify(t.Context())
	if got := used(); got != 12 || len(client.Actions()) != 0 {
		t.Errorf("at once %d units are held and %d questions were asked, want 12 and none", got, len(client.Actions()))
	}
	now = now.Add(2 * unseenFor)
	away := true
	client.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		return away, nil, errors.New("no API server")
	})
	s.verify(t.Context())
	if got := used(); got != 12 {
		t.Errorf("while the API server is away %d units are held, want 12", got)
	}
	away = false
	s.verify(t.Context())
	if got := used(); got != 4 {
		t.Errorf("afterwards %d units are held, want the 4 of the pod that lives", got)
	}
}

// A bind whose outcome stayed unknown, and that came to nothing, reserves its device for
// no longer than it may be under way.
func TestVerifyDropsReservationsOfPodsThatWereNotBound(t *testing.T) {
	const memory accel.Resource = "enflame.com/gcu-memory"
	now := time.Unix(1000, 0)
	client := fake.NewClientset(
		&v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "unbound", UID: "uid-unbound"}},
		// not seen yet
		&v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "bound", UID: "uid-bound"}, Spec: v1.PodSpec{NodeName: "node"}},
	)
	books := ledger.New(ledger.Options{Now: func() time.Time { return now }})
	books.SetNode("node", []accel.Inventory{{Resource: memory, Shares: []accel.Share{{Device: accel.Device{ID: "a"}, Units: 16}}}})
	s := Sweeper{Ledger: books, Binder: NewBinder(client, []accel.Resource{memory}, false), BindLimit: bindLimit}
	bind := func(name string) {
		t.Helper()
		_, _, err := books.Reserve(accel.PodRef{UID: "uid-" + name, Namespace: "ns", Name: name}, now, "node", accel.Request{
			Resource: memory, Containers: []accel.ContainerRequest{{Name: "c", Kind: accel.AppContainer, Units: 4}},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	used := func(want accel.Units, when string) {
		t.Helper()
		s.verify(t.Context())
		if n, _ := books.Node(memory, "node"); n.Used != want {
			t.Errorf("%s %d units are held, want %d", when, n.Used, want)
		}
	}
	bind("unbound")
	bind("bound")
	now = now.Add(bindLimit)
	used(8, "while the bind may be under way")
	bind("unbound")
	now = now.Add(time.Second)
	used(8, "while a second one may be under way")
	now = now.Add(bindLimit)
	used(4, "afterwards")
}
