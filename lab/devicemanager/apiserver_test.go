package devicemanager

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

const thisNode = "node-1"

// apiServer is the API server as one node sees it: a fake clientset, except
// that the pods are kept here. The fake's own store neither replays what
// happened between a list and the watch that follows it nor checks the uid of a
// patch, and its watches cannot be held back.
//
// All pods are bound to thisNode: creating one stands for creating and binding
// it. It is safe for concurrent use.
type apiServer struct {
	*fake.Clientset

	mu       sync.Mutex // guards what follows
	changed  *sync.Cond
	pods     map[types.NamespacedName]*corev1.Pod
	log      []watch.Event // of all pods, resource version i+1 at position i
	held     int           // watches deliver log[:held]; -1 for all of it
	listings int           // lists that a client asked for
}

func newAPIServer(t *testing.T) *apiServer {
	t.Helper()
	s := &apiServer{
		Clientset: fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode}}),
		pods:      map[types.NamespacedName]*corev1.Pod{},
		held:      -1,
	}
	s.changed = sync.NewCond(&s.mu)
	s.PrependReactor("list", "pods", s.list)
	s.PrependReactor("patch", "pods", s.patch)
	s.PrependWatchReactor("pods", s.watch)
	return s
}

// create stores a pod.
func (s *apiServer) create(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.store(watch.Added, pod.DeepCopy())
}

// update changes the pod with that uid, if it is there.
func (s *apiServer) update(uid types.UID, change func(*corev1.Pod)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, pod := range s.pods {
		if pod.UID == uid {
			next := pod.DeepCopy()
			change(next)
			s.store(watch.Modified, next)
			return
		}
	}
}

// remove deletes the pod with that uid, if it is there.
func (s *apiServer) remove(uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, pod := range s.pods {
		if pod.UID == uid {
			s.store(watch.Deleted, pod.DeepCopy())
			delete(s.pods, key)
			return
		}
	}
}

// get returns the pod with that uid, nil if there is none.
func (s *apiServer) get(uid types.UID) *corev1.Pod {
	for _, pod := range s.all() {
		if pod.UID == uid {
			return pod
		}
	}
	return nil
}

// all returns the pods in the order of their creation.
func (s *apiServer) all() []*corev1.Pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sorted()
}

// sorted does not copy: stored pods are replaced, never changed. The caller
// holds mu.
func (s *apiServer) sorted() []*corev1.Pod {
	return slices.SortedFunc(maps.Values(s.pods), func(a, b *corev1.Pod) int {
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
}

// holdWatches makes watches deliver nothing new until release.
func (s *apiServer) holdWatches() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = len(s.log)
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.held = -1
		s.changed.Broadcast()
	}
}

// listed counts the lists that a client asked for.
func (s *apiServer) listed() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listings
}

// store keeps a pod and tells the watches. The caller holds mu.
func (s *apiServer) store(kind watch.EventType, pod *corev1.Pod) {
	pod.ResourceVersion = strconv.Itoa(len(s.log) + 1)
	s.pods[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}] = pod
	s.log = append(s.log, watch.Event{Type: kind, Object: pod})
	s.changed.Broadcast()
}

// ofThisNode is the only selector that the agent has a right to.
func ofThisNode(selector fmt.Stringer) error {
	if want := "spec.nodeName=" + thisNode; selector.String() != want {
		return apierrors.NewBadRequest(fmt.Sprintf("field selector %q, want %q", selector, want))
	}
	return nil
}

func (s *apiServer) list(action clienttesting.Action) (bool, runtime.Object, error) {
	list, ok := action.(clienttesting.ListAction)
	if !ok {
		return true, nil, errors.New("not a list")
	}
	if err := ofThisNode(list.GetListRestrictions().Fields); err != nil {
		return true, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listings++
	out := &corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(len(s.log))}}
	for _, pod := range s.sorted() {
		out.Items = append(out.Items, *pod.DeepCopy())
	}
	return true, out, nil
}

// patch takes what divvy-node writes: annotations, for the pod with a uid.
func (s *apiServer) patch(action clienttesting.Action) (bool, runtime.Object, error) {
	p, ok := action.(clienttesting.PatchAction)
	if !ok || p.GetPatchType() != types.MergePatchType || p.GetSubresource() != "" {
		return true, nil, apierrors.NewBadRequest("not a merge patch of a pod")
	}
	var body struct {
		Metadata struct {
			UID         types.UID         `json:"uid"`
			Annotations map[string]string `json:"annotations"`
		} `json:"metadata"`
	}
	dec := json.NewDecoder(bytes.NewReader(p.GetPatch()))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&body); err != nil {
		return true, nil, apierrors.NewBadRequest(err.Error())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	resource := schema.GroupResource{Resource: "pods"}
	pod := s.pods[types.NamespacedName{Namespace: p.GetNamespace(), Name: p.GetName()}]
	switch {
	case pod == nil:
		return true, nil, apierrors.NewNotFound(resource, p.GetName())
	case pod.UID != body.Metadata.UID:
		return true, nil, apierrors.NewConflict(resource, p.GetName(), errors.New("the uid in the precondition differs"))
	}
	next := pod.DeepCopy()
	if next.Annotations == nil {
		next.Annotations = map[string]string{}
	}
	maps.Copy(next.Annotations, body.Metadata.Annotations)
	s.store(watch.Modified, next)
	return true, next.DeepCopy(), nil
}

func (s *apiServer) watch(action clienttesting.Action) (bool, watch.Interface, error) {
	a, ok := action.(clienttesting.WatchActionImpl)
	if !ok {
		return true, nil, errors.New("not a watch")
	}
	if err := ofThisNode(a.WatchRestrictions.Fields); err != nil {
		return true, nil, err
	}
	from, err := strconv.Atoi(a.ListOptions.ResourceVersion)
	if err != nil {
		return true, nil, apierrors.NewBadRequest("watch without a resource version: " + err.Error())
	}
	w := &podWatch{server: s, next: from, events: make(chan watch.Event), stopped: make(chan struct{})}
	go w.run()
	return true, w, nil
}

// podWatch delivers the log of an apiServer from a position on.
type podWatch struct {
	server  *apiServer
	next    int // position in the log; only run uses it
	events  chan watch.Event
	stop    sync.Once
	stopped chan struct{}
}

func (w *podWatch) ResultChan() <-chan watch.Event { return w.events }

func (w *podWatch) Stop() {
	w.stop.Do(func() {
		w.server.mu.Lock()
		defer w.server.mu.Unlock()
		close(w.stopped)
		w.server.changed.Broadcast()
	})
}

func (w *podWatch) run() {
	defer close(w.events)
	for {
		event, ok := w.await()
		if !ok {
			return
		}
		select {
		case w.events <- event:
		case <-w.stopped:
			return
		}
	}
}

// await returns the next event, false after Stop.
func (w *podWatch) await() (watch.Event, bool) {
	s := w.server
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		select {
		case <-w.stopped:
			return watch.Event{}, false
		default:
		}
		limit := len(s.log)
		if s.held >= 0 {
			limit = s.held
		}
		if w.next < limit {
			event := s.log[w.next]
			w.next++
			return watch.Event{Type: event.Type, Object: event.Object.DeepCopyObject()}, true
		}
		s.changed.Wait()
	}
}
