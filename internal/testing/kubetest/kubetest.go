// Package kubetest is a stand-in for the API server in tests: client-go's fake,
// which for want of versions lets everybody overwrite everybody, with
// resourceVersions, UIDs and preconditions that are enforced, for any number of
// clients that can be made slow or refused one by one.
package kubetest

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	clienttesting "k8s.io/client-go/testing"
)

// Server holds the objects. Its methods may be called by many goroutines.
type Server struct {
	tracker clienttesting.ObjectTracker
	// react asks the tracker.
	react clienttesting.ReactionFunc

	mu sync.Mutex // guards what follows, and makes reading and writing one
	// version is the last one given out.
	version int64
	calls   map[string]int
	written []func(verb string, obj runtime.Object)
}

// New returns a server that holds objects, and gives them versions and UIDs.
func New(objects ...runtime.Object) (*Server, error) {
	// Without the managed fields that fake.NewClientset keeps, which make each write
	// cost a millisecond; nobody here applies.
	tracker := clienttesting.NewObjectTracker(scheme.Scheme, scheme.Codecs.UniversalDecoder())
	s := &Server{tracker: tracker, react: clienttesting.ObjectReaction(tracker), version: 1, calls: map[string]int{}}
	for _, obj := range objects {
		if err := s.stamp(obj, true); err != nil {
			return nil, err
		}
		if err := s.tracker.Add(obj); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Client returns another client of the server. before, when not nil, is called
// before every request but watches; its error is the answer.
func (s *Server) Client(before func(clienttesting.Action) error) *fake.Clientset {
	client := &fake.Clientset{}
	client.AddReactor("*", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if before != nil {
			if err := before(action); err != nil {
				return true, nil, err
			}
		}
		return s.handle(action)
	})
	client.AddWatchReactor("*", func(action clienttesting.Action) (bool, watch.Interface, error) {
		s.count(action)
		a, ok := action.(clienttesting.WatchActionImpl)
		if !ok {
			return true, nil, fmt.Errorf("a watch that is a %T", action)
		}
		w, err := s.tracker.Watch(a.GetResource(), a.GetNamespace(), a.ListOptions)
		if err != nil {
			return true, nil, err
		}
		return true, filtered(w, a.GetWatchRestrictions()), nil
	})
	return client
}

// CopyWatched makes a client of client-go's own stand-in tell copies to those who
// watch, see filtered, and returns it.
func CopyWatched(client *fake.Clientset) *fake.Clientset {
	for i, r := range client.WatchReactionChain {
		client.WatchReactionChain[i] = copying{r}
	}
	return client
}

// copying is a reactor whose watches tell copies.
type copying struct{ clienttesting.WatchReactor }

// React implements clienttesting.WatchReactor.
func (c copying) React(action clienttesting.Action) (handled bool, w watch.Interface, err error) {
	handled, w, err = c.WatchReactor.React(action)
	if handled && err == nil {
		w = filtered(w, clienttesting.WatchRestrictions{})
	}
	return handled, w, err
}

// filtered leaves out what the selectors of a watch do not select. Objects that
// stop being selected are not told as deleted. Each is a copy: the tracker sends
// what a watch begins with as it keeps it, and reflectors change what they get.
func filtered(w watch.Interface, r clienttesting.WatchRestrictions) watch.Interface {
	return watch.Filter(w, func(e watch.Event) (watch.Event, bool) {
		obj, err := meta.Accessor(e.Object)
		if err != nil {
			return e, true // a bookmark or an error
		}
		e.Object = e.Object.DeepCopyObject()
		names := fields.Set{metav1.ObjectNameField: obj.GetName(), "metadata.namespace": obj.GetNamespace()}
		return e, (r.Fields == nil || r.Fields.Matches(names)) && (r.Labels == nil || r.Labels.Matches(labelSet(obj.GetLabels())))
	})
}

// labelSet has the methods that a label selector wants.
type labelSet map[string]string

func (l labelSet) Has(label string) bool              { _, ok := l[label]; return ok }
func (l labelSet) Get(label string) string            { return l[label] }
func (l labelSet) Lookup(label string) (string, bool) { value, ok := l[label]; return value, ok }

// OnWrite adds a function that is called, while nothing else happens, with every
// object that was created, updated, patched or deleted.
func (s *Server) OnWrite(f func(verb string, obj runtime.Object)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.written = append(s.written, f)
}

// Calls returns how often each "verb resource" was asked for.
func (s *Server) Calls() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.calls)
}

func (s *Server) count(action clienttesting.Action) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[action.GetVerb()+" "+action.GetResource().Resource]++
}

// stamp gives an object the next version, and a UID when it is new.
func (s *Server) stamp(obj runtime.Object, create bool) error {
	o, err := meta.Accessor(obj)
	if err != nil {
		return err
	}
	s.version++
	o.SetResourceVersion(strconv.FormatInt(s.version, 10))
	if create && o.GetUID() == "" {
		o.SetUID(types.UID(fmt.Sprintf("uid-%d", s.version)))
	}
	return nil
}

// stored returns an object as it is, and its metadata.
func (s *Server) stored(gvr schema.GroupVersionResource, namespace, name string) (metav1.Object, runtime.Object, error) {
	obj, err := s.tracker.Get(gvr, namespace, name)
	if err != nil {
		return nil, nil, err
	}
	o, err := meta.Accessor(obj)
	return o, obj, err
}

func conflict(action clienttesting.Action, name string) error {
	return apierrors.NewConflict(action.GetResource().GroupResource(), name, errors.New("the object has been modified"))
}

func (s *Server) handle(action clienttesting.Action) (handled bool, result runtime.Object, err error) {
	s.count(action)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch a := action.(type) {
	case clienttesting.CreateActionImpl:
		if binding, ok := a.Object.(*corev1.Binding); ok {
			return true, binding, s.bind(a, binding)
		}
		if err := s.stamp(a.Object, true); err != nil {
			return true, nil, err
		}
	case clienttesting.UpdateActionImpl:
		sent, err := meta.Accessor(a.Object)
		if err != nil {
			return true, nil, err
		}
		now, _, err := s.stored(a.GetResource(), a.GetNamespace(), sent.GetName())
		if err != nil {
			return true, nil, err
		}
		if v := sent.GetResourceVersion(); v != "" && v != now.GetResourceVersion() {
			return true, nil, conflict(action, sent.GetName())
		}
		sent.SetUID(now.GetUID())
		if err := s.stamp(a.Object, false); err != nil {
			return true, nil, err
		}
	case clienttesting.PatchActionImpl:
		return s.patch(a)
	case clienttesting.DeleteActionImpl:
		now, obj, err := s.stored(a.GetResource(), a.GetNamespace(), a.GetName())
		if err != nil {
			return true, nil, err
		}
		if p := a.GetDeleteOptions().Preconditions; p != nil {
			if p.UID != nil && *p.UID != now.GetUID() || p.ResourceVersion != nil && *p.ResourceVersion != now.GetResourceVersion() {
				return true, nil, conflict(action, a.GetName())
			}
		}
		err = s.tracker.Delete(a.GetResource(), a.GetNamespace(), a.GetName())
		if err == nil {
			s.tell("delete", obj)
		}
		return true, nil, err
	}
	if handled, result, err = s.react(action); err != nil {
		return handled, nil, err
	}
	switch verb := action.GetVerb(); verb {
	case "create", "update":
		s.tell(verb, result)
	case "list":
		if a, ok := action.(clienttesting.ListAction); ok {
			err = selectNames(result, a.GetListRestrictions().Fields)
		}
	}
	return handled, result, err
}

// selectNames leaves in a list what a field selector selects; the typed clients
// see to labels.
func selectNames(list runtime.Object, selector fields.Selector) error {
	if selector == nil || selector.Empty() {
		return nil
	}
	all, err := meta.ExtractList(list)
	if err != nil {
		return err
	}
	var kept []runtime.Object
	for _, obj := range all {
		o, err := meta.Accessor(obj)
		if err != nil {
			return err
		}
		if selector.Matches(fields.Set{metav1.ObjectNameField: o.GetName(), "metadata.namespace": o.GetNamespace()}) {
			kept = append(kept, obj)
		}
	}
	return meta.SetList(list, kept)
}

// patch applies a patch whose resourceVersion, if it has one, must be that of
// the object.
func (s *Server) patch(a clienttesting.PatchActionImpl) (handled bool, result runtime.Object, err error) {
	now, _, err := s.stored(a.GetResource(), a.GetNamespace(), a.GetName())
	if err != nil {
		return true, nil, err
	}
	var sent metav1.PartialObjectMetadata
	if err := json.Unmarshal(a.GetPatch(), &sent); err == nil && sent.ResourceVersion != "" &&
		sent.ResourceVersion != now.GetResourceVersion() {
		return true, nil, conflict(a, a.GetName())
	}
	if _, result, err = s.react(a); err != nil {
		return true, nil, err
	}
	if err := s.stamp(result, false); err != nil {
		return true, nil, err
	}
	if err := s.tracker.Update(a.GetResource(), result, a.GetNamespace()); err != nil {
		return true, nil, err
	}
	s.tell("patch", result)
	return true, result, nil
}

// bind binds a pod as the API server does: once, only the pod that is meant, and with
// the annotations of the binding.
func (s *Server) bind(a clienttesting.CreateActionImpl, binding *corev1.Binding) error {
	pods := corev1.SchemeGroupVersion.WithResource("pods")
	name := a.Name
	if name == "" {
		name = binding.Name
	}
	_, obj, err := s.stored(pods, a.GetNamespace(), name)
	if err != nil {
		return err
	}
	pod, ok := obj.DeepCopyObject().(*corev1.Pod)
	switch {
	case !ok:
		return fmt.Errorf("%s/%s is a %T", a.GetNamespace(), name, obj)
	case binding.UID != "" && binding.UID != pod.UID:
		return conflict(a, name)
	case pod.Spec.NodeName != "":
		return apierrors.NewConflict(schema.GroupResource{Resource: "pods/binding"}, name,
			fmt.Errorf("pod %s is already assigned to node %q", name, pod.Spec.NodeName))
	}
	pod.Spec.NodeName = binding.Target.Name
	for key, value := range binding.Annotations {
		metav1.SetMetaDataAnnotation(&pod.ObjectMeta, key, value)
	}
	if err := s.stamp(pod, false); err != nil {
		return err
	}
	if err := s.tracker.Update(pods, pod, a.GetNamespace()); err != nil {
		return err
	}
	s.tell("bind", pod)
	return nil
}

func (s *Server) tell(verb string, obj runtime.Object) {
	for _, f := range s.written {
		f(verb, obj)
	}
}
