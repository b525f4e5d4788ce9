package eviction

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

func TestMain(m *testing.M) {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

// world is an Evictor with one node, whose daemon rewrites its list every 60 s, and an API
// server.
type world struct {
	t        *testing.T
	second   int
	over     []wire.Overuse
	pods     map[string]cluster.OverusingPod // by UID; others do not hold the device
	leading  bool
	answers  map[string]error // by name of the pod
	asked    []*policyv1.Eviction
	log      []string // "60 evict a", "60 MemoryOveruseEvicted a ..."
	messages []string
	keys     []string // of the events, with the pod
	evictor  *Evictor
	// answering is called while the API server answers; nil for nothing.
	answering func()
}

func newWorld(t *testing.T, pods ...wire.Overuse) *world {
	t.Helper()
	w := &world{t: t, over: pods, pods: map[string]cluster.OverusingPod{}, leading: true, answers: map[string]error{}}
	for _, o := range pods {
		w.pods[o.Pod.UID] = cluster.OverusingPod{}
	}
	client := fake.NewClientset()
	client.PrependReactor("create", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.GetSubresource() != "eviction" {
			t.Errorf("it asks for %v", action)
		}
		eviction := action.(clienttesting.CreateAction).GetObject().(*policyv1.Eviction) //nolint:forcetypeassert // what clients send
		w.asked = append(w.asked, eviction)
		w.log = append(w.log, fmt.Sprintf("%d evict %s", w.second, eviction.Name))
		if w.answering != nil {
			w.answering()
		}
		return true, nil, w.answers[eviction.Name]
	})
	w.evictor = New(Config{
		Settings: settings, Client: client, Cluster: w, Leading: func() bool { return w.leading },
		Now: func() time.Time { return at(w.second) },
		Tell: func(pod accel.PodRef, kind events.Kind, key, message string) {
			w.keys = append(w.keys, pod.UID+" "+key)
			w.log = append(w.log, fmt.Sprintf("%d %s %s", w.second, kind.Reason, pod.Name))
			w.messages = append(w.messages, message)
		},
	})
	return w
}

func (w *world) Lists() map[string]string {
	text := list(w.t, at(w.second/60*60), w.over...)
	if text == "" {
		return nil
	}
	return map[string]string{"node-a": text}
}

func (w *world) Pod(node string, ref accel.PodRef, resource accel.Resource, device accel.DeviceID) (cluster.OverusingPod, bool) {
	pod, ok := w.pods[ref.UID]
	return pod, ok && node == "node-a" && resource == gpuMemory && device != ""
}

// until makes a pass every five seconds.
func (w *world) until(second int) {
	for ; w.second <= second; w.second += 5 {
		w.evictor.pass(w.t.Context())
	}
}

func (w *world) want(lines ...string) {
	w.t.Helper()
	if diff := cmp.Diff(lines, w.log); diff != "" {
		w.t.Errorf("(-want +got):\n%s", diff)
	}
}

func (w *world) counted(outcome Outcome, want float64) {
	w.t.Helper()
	if got := testutil.ToFloat64(w.evictor.outcomes.WithLabelValues(string(outcome))); got != want {
		w.t.Errorf("%s counted %v times, want %v", outcome, got, want)
	}
}

var pods = corev1.Resource("pods")

// budgetError is how the API server answers where a budget does not allow it.
func budgetError(message string) error {
	err := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
	err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes,
		metav1.StatusCause{Type: policyv1.DisruptionBudgetCause, Message: message})
	return err
}

var errSeveral = &apierrors.StatusError{ErrStatus: metav1.Status{
	Status: metav1.StatusFailure, Code: http.StatusInternalServerError,
	Message: "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
}}

// TestEvict: by UID and by the pod's own grace period, once, then the next on the device when
// the node has written its list again.
func TestEvict(t *testing.T) {
	w := newWorld(t, over("a", "G1", 900), over("b", "G1", 100))
	w.until(300)
	w.want("120 evict a", "120 MemoryOveruseEvicted a", "180 evict b", "180 MemoryOveruseEvicted b")
	uid := types.UID("a")
	want := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "a"},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}}
	if diff := cmp.Diff(want, w.asked[0]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if want := "Container main uses 1924 MiB of device G1; its allocation of nvidia.com/gpu-memory is 1024 MiB, since " +
		"2026-11-26T11:00:00Z; the pod is evicted. Request more memory, or limit what the program uses."; w.messages[0] != want {
		t.Errorf("message %q\nwant %q", w.messages[0], want)
	}
	w.counted(Evicted, 2)
}

// TestAnswers of the Eviction API other than success.
func TestAnswers(t *testing.T) {
	webhook := apierrors.NewInternalError(errors.New("failed calling webhook about a PodDisruptionBudget"))
	once, again := []string{"120 evict a"}, []string{"120 evict a", "120 MemoryOveruseNotEvicted a", "150 evict a", "180 evict a"}
	for name, tt := range map[string]struct {
		answer  error
		want    []string
		message string
		outcome Outcome
		count   float64
	}{
		"a budget, tried every 30 s and reported once": {budgetError("The disruption budget pdb needs 1 healthy pods"), again,
			"because its PodDisruptionBudget does not allow it: The disruption budget pdb needs 1 healthy pods.", Budget, 3},
		"several budgets, never tried again": {errSeveral, []string{"120 evict a", "120 MemoryOveruseNotEvicted a"},
			"because it has several PodDisruptionBudgets, and the Eviction API evicts no such pod.", SeveralBudgets, 1},
		"deleted, and the count begins again": {apierrors.NewNotFound(pods, "a"), once, "", Gone, 1},
		"another UID":                         {apierrors.NewConflict(pods, "a", errors.New("UID")), once, "", Gone, 1},
		"another error, tried every 30 s": {webhook, again,
			"because Internal error occurred: failed calling webhook about a PodDisruptionBudget.", Failed, 3},
		"the API server is overloaded":          {apierrors.NewTooManyRequests("later", 1), again, "", Failed, 3},
		"the API server is away":                {context.DeadlineExceeded, again, "", Failed, 3},
		"an admission policy does not allow it": {apierrors.NewForbidden(pods, "a", errors.New("policy")), again, "", Failed, 3},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, over("a", "G1", 100))
			w.answers["a"] = tt.answer
			w.until(200)
			w.want(tt.want...)
			w.counted(tt.outcome, tt.count)
			if tt.message != "" && (len(w.messages) != 1 || !strings.HasSuffix(w.messages[0], "; the pod is not evicted, "+tt.message)) {
				t.Errorf("messages %q", w.messages)
			}
		})
	}
}

// A budget of one pod does not protect the others on the device.
func TestBudgetProtectsItsPodAlone(t *testing.T) {
	w := newWorld(t, over("a", "G1", 900), over("b", "G1", 100))
	w.answers["a"] = budgetError("pdb")
	w.until(140)
	w.want("120 evict a", "120 MemoryOveruseNotEvicted a", "125 evict b", "125 MemoryOveruseEvicted b")
}

// TestReports of pods that are not even tried: once in an episode.
func TestReports(t *testing.T) {
	static := over("a", "G1", 100)
	w := newWorld(t, static, over("b", "G2", 1), over("c", "G3", 2), over("d", "G4", 3), over("e", "G5", 4))
	w.pods["a"] = cluster.OverusingPod{Static: true}
	w.until(300)
	w.want("120 MemoryOveruseNotEvicted a", "120 evict e", "120 MemoryOveruseEvicted e", "120 evict d", "120 MemoryOveruseEvicted d",
		"120 evict c", "120 MemoryOveruseEvicted c", "125 MemoryOveruseNotEvicted b")
	w.counted(Exempt, 1)
	w.counted(RateLimit, 1)
	// Another episode is counted; the event is one that the recorder does not repeat so soon.
	static.Since = static.Since.Add(time.Minute)
	w.over, w.log = []wire.Overuse{static}, nil
	w.until(500)
	w.want("425 MemoryOveruseNotEvicted a")
	if first, last := w.keys[0], w.keys[len(w.keys)-1]; first != last {
		t.Errorf("keys %q and %q: the recorder takes it for another event", first, last)
	}
	w.counted(Exempt, 2)
}

// TestChangedMeanwhile: nothing is decided on a list that the node has replaced.
func TestChangedMeanwhile(t *testing.T) {
	w := newWorld(t, over("a", "G1", 900), over("b", "G2", 100))
	w.answering = func() { w.over = w.over[:1] }
	w.until(120)
	w.want("120 evict a", "120 MemoryOveruseEvicted a")
}

// TestLeading: a replica that does not lead evicts nothing, and a new leader counts itself.
func TestLeading(t *testing.T) {
	w := newWorld(t, over("a", "G1", 100))
	w.leading = false
	w.until(600)
	w.want()
	w.leading = true
	w.until(720)
	w.want()
	w.until(730)
	w.want("725 evict a", "725 MemoryOveruseEvicted a")
}

// A pod that the cluster does not know there is left alone, and so is all when lists end.
func TestUnknownPods(t *testing.T) {
	w := newWorld(t, over("a", "G1", 100))
	delete(w.pods, "a")
	w.until(300)
	w.want()
	w.over = nil
	w.until(400)
	w.pods["a"] = cluster.OverusingPod{}
	w.until(600)
	w.want()
}

// TestRun ends with its context.
func TestRun(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w.evictor.Run(ctx)
}
