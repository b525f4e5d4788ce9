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
	"k8s.io/client-go/util/flowcontrol"
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
	deadline := time.Now().Add(2 * time.Minute)
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
			for deadline := time.Now().Add(2 * time.Minute); !last && time.Now().Before(deadline); {
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
		want  string
	}{
		{0, "a", told}, {0, "a", repeated}, {0, "b", told}, {repeatAfter - time.Second, "a", repeated}, {time.Second, "a", told},
		{0, "a", repeated},
	}
	for i, s := range steps {
		now = now.Add(s.after)
		if got := r.once(s.what); got != s.want {
			t.Errorf("step %d: %s is %s", i, s.what, got)
		}
	}
	r.limit = flowcontrol.NewFakeAlwaysRateLimiter()
	for i := range 3 * maxTold {
		r.once(fmt.Sprint(i))
		if len(r.told) > maxTold {
			t.Fatalf("%d are remembered", len(r.told))
		}
	}
}

// TestDroppedIsToldLater: what the limit of the program drops is not remembered.
func TestDroppedIsToldLater(t *testing.T) {
	r := NewRecorder(t.Context(), fake.NewClientset(), Extend, "")
	defer r.Shutdown()
	now := time.Now()
	r.limit = flowcontrol.NewTokenBucketRateLimiterWithClock(perSecond, burst, testclock{&now})
	tell := func(i int) bool {
		return r.Once(OnPod("team", fmt.Sprint("p", i), fmt.Sprint("u", i)), NeverFits, "", "asks for 20 units")
	}
	made := 0
	for i := range 10 * burst {
		if tell(i) {
			made++
		}
	}
	if made != burst || tell(10*burst-1) || !tell(0) {
		t.Errorf("%d of %d were told at once, want %d", made, 10*burst, burst)
	}
	for i := burst; i < 10*burst; i++ {
		if now = now.Add(time.Second / perSecond); !tell(i) {
			t.Fatalf("p%d is never told", i)
		}
	}
	if got := testutil.ToFloat64(r.outcomes.WithLabelValues(NeverFits.Reason, told)); got != 10*burst {
		t.Errorf("%v events were made", got)
	}
}

// testclock stands still.
type testclock struct{ now *time.Time }

func (c testclock) Now() time.Time                   { return *c.now }
func (c testclock) Sleep(time.Duration)              {}
func (c testclock) Since(at time.Time) time.Duration { return c.now.Sub(at) }

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
