package events

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func TestTheTableIsComplete(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range All() {
		if seen[k.Reason] {
			t.Errorf("%s is there twice", k.Reason)
		}
		seen[k.Reason] = true
		if k.Type != corev1.EventTypeNormal && k.Type != corev1.EventTypeWarning || k.On == "" || k.By == "" ||
			!strings.HasSuffix(k.Meaning, ".") {
			t.Errorf("%+v lacks something", k)
		}
	}
}

// settled returns the events at the API server once it has as many as want; the
// counts of each are summed.
func settled(t *testing.T, client *fake.Clientset, want int) []corev1.Event {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		list, err := client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(list.Items) >= want || time.Now().After(deadline) {
			return list.Items
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// TestAThousandRefusalsMakeFewEvents, of one pod and of a thousand pods.
func TestAThousandRefusalsMakeFewEvents(t *testing.T) {
	for name, tt := range map[string]struct {
		pods       int
		tell       func(r *Recorder, pod *corev1.Pod)
		want, most int
	}{
		"one pod, the same text": {1, func(r *Recorder, pod *corev1.Pod) { r.Once(pod, NeverFits, "20", "asks for 20 units") }, 1, 1},
		"a thousand pods": {1000, func(r *Recorder, pod *corev1.Pod) { r.Once(pod, NeverFits, "20", "asks for 20 units") }, burst,
			burst + 10},
		"the node, another text each time": {1, func(r *Recorder, _ *corev1.Pod) {
			r.Tell(OnNode("n"), AllocationRefused, "container "+time.Now().String())
		}, 1, 25},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset()
			r := NewRecorder(t.Context(), client, Node, "n")
			r.Start()
			defer r.Shutdown()
			for i := range 1000 {
				tt.tell(r, OnPod("team", fmt.Sprint("p", i%tt.pods), fmt.Sprint("uid", i%tt.pods)))
			}
			// One more, of its own, comes after all of these.
			for !r.limit.TryAccept() {
				time.Sleep(10 * time.Millisecond)
			}
			r.recorder.Event(OnPod("team", "last", "last"), corev1.EventTypeNormal, "Last", "last")
			last := false
			var got []corev1.Event
			for deadline := time.Now().Add(20 * time.Second); !last && time.Now().Before(deadline); {
				got = settled(t, client, tt.want)
				for _, e := range got {
					last = last || e.Reason == "Last"
				}
			}
			if n := len(got) - 1; !last || n < tt.want || n > tt.most {
				t.Errorf("%d events, the last has come: %t; want %d to %d", n, last, tt.want, tt.most)
			}
			sum := 0.0
			for _, outcome := range []string{told, repeated, dropped} {
				for _, k := range []Kind{NeverFits, AllocationRefused} {
					sum += testutil.ToFloat64(r.outcomes.WithLabelValues(k.Reason, outcome))
				}
			}
			if sum != 1000 {
				t.Errorf("%v of 1000 are counted", sum)
			}
		})
	}
}

// TestOnceForgets: after a while it is said again; what it remembers is bounded.
func TestOnceForgets(t *testing.T) {
	r := NewRecorder(t.Context(), fake.NewClientset(), Extend, "")
	defer r.Shutdown()
	now := time.Now()
	r.now = func() time.Time { return now }
	steps := []struct {
		after time.Duration
		what  string
		want  bool
	}{
		{0, "a", true}, {0, "a", false}, {0, "b", true}, {repeatAfter - time.Second, "a", false}, {time.Second, "a", true}, {0, "a", false},
	}
	for i, s := range steps {
		now = now.Add(s.after)
		if got := r.first(s.what); got != s.want {
			t.Errorf("step %d: %s is told: %t", i, s.what, got)
		}
	}
	for i := range 3 * maxTold {
		r.first(fmt.Sprint(i))
		if len(r.told) > maxTold {
			t.Fatalf("%d are remembered", len(r.told))
		}
	}
}

// TestAnewChangesNoEvent: what is told again after a while is another event, for
// programs that may not change one.
func TestAnewChangesNoEvent(t *testing.T) {
	client := fake.NewClientset()
	r := NewRecorder(t.Context(), client, Extend, "")
	defer r.Shutdown()
	now := time.Now()
	r.now = func() time.Time { return now }
	r.Anew()
	r.Start()
	pod := OnPod("team", "p", "uid")
	for n := range 3 {
		r.Once(pod, NeverFits, "20", "asks for 20 units")
		if got := settled(t, client, n+1); len(got) != n+1 {
			t.Fatalf("after telling it %d times there are %d events", n+1, len(got))
		}
		now = now.Add(repeatAfter)
	}
	for _, a := range client.Actions() {
		if a.GetVerb() != "create" && a.GetVerb() != "list" {
			t.Errorf("%s of %s", a.GetVerb(), a.GetResource().Resource)
		}
	}
	for _, e := range settled(t, client, 3) {
		if e.Count != 1 || e.InvolvedObject.UID != "uid" || e.Namespace != "team" {
			t.Errorf("%+v", e)
		}
	}
}

// TestPodsOfOneNameDiffer: a pod that was made anew has not been told.
func TestPodsOfOneNameDiffer(t *testing.T) {
	if name(OnPod("a", "b", "1")) == name(OnPod("a", "b", "2")) || name(OnNode("a")) == name(OnNode("b")) {
		t.Error("two objects are taken for one")
	}
}

func TestMessagesAreCut(t *testing.T) {
	long := strings.Repeat("ü", maxMessage)
	if got := clip(long); len(got) > maxMessage+3 || !strings.HasSuffix(got, "ü...") {
		t.Errorf("%d bytes, ending in %q", len(got), got[len(got)-6:])
	}
	if got := clip("short"); got != "short" {
		t.Error(got)
	}
}
