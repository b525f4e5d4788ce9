// Package events tells users of nodes and pods what matters to them, as Kubernetes
// events: once, and not in floods. The table says which events there are.
//
// Three things keep floods away: a caller that would say the same thing again and
// again uses Once; client-go joins events that are alike and bounds those of one
// object; and a Recorder bounds those of the whole program, since a thousand pods
// that wait for the same reason are a thousand objects.
package events

import (
	"context"
	"fmt"
	"hash/maphash"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

const (
	// burst events may be made at once, and perSecond after that.
	burst     = 50
	perSecond = 5
	// repeatAfter is how long Once stays silent; the API server keeps an event for
	// an hour.
	repeatAfter = 30 * time.Minute
	// maxTold bounds what Once remembers, at 40 bytes each: more than the pods that
	// wait in a large cluster.
	maxTold = 32_768
	// maxMessage is how long a message may be; the API server takes 1024 bytes.
	maxMessage = 1000
)

const (
	told     = "told"
	repeated = "repeated"
	dropped  = "dropped"
)

// Recorder makes the events of one component. It is safe for concurrent use, and
// no method blocks. It is a prometheus.Collector of what became of the events.
type Recorder struct {
	broadcaster record.EventBroadcaster
	recorder    record.EventRecorder
	client      kubernetes.Interface
	outcomes    *prometheus.CounterVec
	limit       flowcontrol.RateLimiter
	now         func() time.Time
	anew        bool

	mu   sync.Mutex           // guards what follows
	told map[uint64]time.Time // by hash
}

var seed = maphash.MakeSeed()

// NewRecorder returns a recorder of a component, on a node if host is not "". It
// tells nothing before Start.
func NewRecorder(ctx context.Context, client kubernetes.Interface, component, host string) *Recorder {
	r := &Recorder{
		broadcaster: record.NewBroadcaster(record.WithContext(context.WithoutCancel(ctx))),
		client:      client,
		outcomes:    metrics.Events.NewCounters(),
		limit:       flowcontrol.NewTokenBucketRateLimiter(perSecond, burst),
		now:         time.Now,
		told:        map[uint64]time.Time{},
	}
	r.recorder = r.broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component, Host: host})
	return r
}

// Anew makes each event a new one, also where one like it is there and would be
// counted up. It is for programs that may create events and change none, and is
// called before Start.
func (r *Recorder) Anew() { r.anew = true }

// Start begins to send to the API server.
func (r *Recorder) Start() {
	sink := &typedcorev1.EventSinkImpl{Interface: r.client.CoreV1().Events("")}
	if r.anew {
		r.broadcaster.StartRecordingToSink(onlyNew{sink})
		return
	}
	r.broadcaster.StartRecordingToSink(sink)
}

// onlyNew creates an event where client-go would change one.
type onlyNew struct{ record.EventSink }

func (s onlyNew) Patch(event *corev1.Event, _ []byte) (*corev1.Event, error) {
	event = event.DeepCopy()
	// A name as client-go makes it, which no event has yet.
	event.Name = fmt.Sprintf("%s.%x", event.InvolvedObject.Name, event.LastTimestamp.UnixNano())
	event.ResourceVersion, event.UID = "", ""
	event.FirstTimestamp, event.Count = event.LastTimestamp, 1
	return s.Create(event)
}

// Shutdown ends it. Events after that are dropped.
func (r *Recorder) Shutdown() { r.broadcaster.Shutdown() }

// Tell makes an event on an object, which is a Pod, another object of the API or a
// reference to one.
func (r *Recorder) Tell(on runtime.Object, k Kind, message string) {
	outcome := told
	if !r.limit.TryAccept() {
		outcome = dropped
	}
	r.make(outcome, on, k, message)
}

// Once is Tell, but for what was told of the same object by the same kind and key
// not long ago. It is false for an event that was dropped, which may be made later.
func (r *Recorder) Once(on runtime.Object, k Kind, key, message string) bool {
	outcome := r.once(name(on) + "\x00" + k.Reason + "\x00" + key)
	r.make(outcome, on, k, message)
	return outcome != dropped
}

func (r *Recorder) make(outcome string, on runtime.Object, k Kind, message string) {
	r.outcomes.WithLabelValues(k.Reason, outcome).Inc()
	if outcome == told {
		r.recorder.Event(on, k.Type, k.Reason, clip(message))
	}
}

// once returns what is to become of an event, and remembers the one that is told.
func (r *Recorder) once(what string) string {
	now, key := r.now(), maphash.String(seed, what)
	r.mu.Lock()
	defer r.mu.Unlock()
	if at, known := r.told[key]; known && now.Sub(at) < repeatAfter {
		return repeated
	}
	if !r.limit.TryAccept() {
		return dropped
	}
	if len(r.told) >= maxTold {
		for key, at := range r.told {
			if now.Sub(at) >= repeatAfter {
				delete(r.told, key)
			}
		}
		if len(r.told) >= maxTold {
			clear(r.told) // the limit of the whole program keeps what follows in bounds
		}
	}
	r.told[key] = now
	return told
}

// Describe implements prometheus.Collector.
func (r *Recorder) Describe(ch chan<- *prometheus.Desc) { r.outcomes.Describe(ch) }

// Collect implements prometheus.Collector.
func (r *Recorder) Collect(ch chan<- prometheus.Metric) { r.outcomes.Collect(ch) }

// New returns an event for programs that create each by themselves: it has no name and no namespace.
func New(on corev1.ObjectReference, k Kind, message string) *corev1.Event {
	now := metav1.Now()
	return &corev1.Event{
		InvolvedObject: on, Type: k.Type, Reason: k.Reason, Message: clip(message), Source: corev1.EventSource{Component: k.By},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}
}

// OnNode returns the object for events on a node.
func OnNode(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name}
}

// OnPod returns the object for events on a pod.
func OnPod(namespace, name, uid string) *corev1.Pod {
	pod := &corev1.Pod{}
	pod.Namespace, pod.Name, pod.UID = namespace, name, types.UID(uid)
	return pod
}

// name identifies an object; pods of the same name are told apart.
func name(on runtime.Object) string {
	if ref, ok := on.(*corev1.ObjectReference); ok {
		return fmt.Sprintf("%s/%s/%s/%s", ref.Kind, ref.Namespace, ref.Name, ref.UID)
	}
	object, err := meta.Accessor(on)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%T/%s/%s/%s", on, object.GetNamespace(), object.GetName(), object.GetUID())
}

func clip(message string) string {
	if len(message) <= maxMessage {
		return message
	}
	return strings.ToValidUTF8(message[:maxMessage], "") + "..."
}
