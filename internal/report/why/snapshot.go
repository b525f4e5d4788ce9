package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// Snapshot is what an explanation is made of. Explain does not change it.
type Snapshot struct {
	// Taken is when it was read.
	Taken time.Time
	Nodes []v1.Node
	// Pods are those of all namespaces, in any phase.
	Pods []v1.Pod
	// Events are those of the namespaces whose pods are explained.
	Events []v1.Event
	// Budgets are the PodDisruptionBudgets of all namespaces.
	Budgets []policyv1.PodDisruptionBudget
	// Queues are the objects of Kueue and of gang scheduling.
	Queues Queues
	// Claims are read where a pod that is explained may wait for them.
	Claims Claims
	// Failed says what could not be read, and why.
	Failed []Failure
	// Controller gets the Deployment or StatefulSet of a kind and name, nil if it is not known; a
	// nil func knows none.
	Controller func(kind, namespace, name string) (runtime.Object, error)
	// MayDelete reports whether the person may delete pods of a namespace; nil for no
	// namespace.
	MayDelete func(namespace string) bool
}

// A Failure is something that could not be read.
type Failure struct {
	// Source is what: one of the constants.
	Source string
	// Reason is the error, as a person reads it.
	Reason string
}

// The sources of a Failure.
const (
	SourceNodes  = "nodes"
	SourcePods   = "pods of other namespaces"
	SourceEvents = "events"
	// SourceWorkloads and SourceGroups are missing from answers about pods that they queue.
	SourceWorkloads = "Workloads of Kueue"
	SourceGroups    = "PodGroups"
	SourceBudgets   = "PodDisruptionBudgets"
)

// failed reports whether a source is missing.
func (s *Snapshot) failed(source string) bool {
	return slices.ContainsFunc(s.Failed, func(f Failure) bool { return f.Source == source })
}

// noteSource adds a note about a source that could not be read and that the answer needs.
func (s *Snapshot) noteSource(e *Explanation, source string) {
	for _, f := range s.Failed {
		if f.Source == source {
			e.Notes = append(e.Notes, fmt.Sprintf("The %s could not be read, so the answer may be incomplete: %s.", source,
				strings.TrimSuffix(f.Reason, ".")))
		}
	}
}

// Owner is a controller whose pods are explained.
type Owner struct {
	// Kind is as kubectl takes it: "job", "deployment", "statefulset".
	Kind, Namespace, Name string
	// Suspended is true for a Job that is not to run yet.
	Suspended bool
	// Wanted is how many pods it is to have.
	Wanted int32
	// Problem is the message of a condition that says why pods are not made, "" for none.
	Problem string
}

func (o *Owner) String() string { return o.Kind + "/" + o.Name }

func (o *Owner) owns(p *v1.Pod) bool {
	kind, name := controllerOf(p)
	return kind == o.Kind && name == o.Name
}

// podsOf returns the pods of an owner, the oldest first.
func (s *Snapshot) podsOf(o *Owner) []*v1.Pod {
	var out []*v1.Pod
	for i := range s.Pods {
		if p := &s.Pods[i]; p.Namespace == o.Namespace && o.owns(p) {
			out = append(out, p)
		}
	}
	oldestFirst(out)
	return out
}

// Waiting returns the pods of a namespace that have not started, the oldest first.
func (s *Snapshot) Waiting(namespace string) []*v1.Pod {
	var out []*v1.Pod
	for i := range s.Pods {
		if p := &s.Pods[i]; p.Namespace == namespace && waits(p) {
			out = append(out, p)
		}
	}
	oldestFirst(out)
	return out
}

// MayClaim reports whether a pod without a node may wait for devices by ResourceClaims: it names claims, or
// requests an extended resource that no node offers, which kube-scheduler may turn into one.
func (s *Snapshot) MayClaim(p *v1.Pod) bool {
	if p.Spec.NodeName != "" || !waits(p) {
		return false
	}
	return len(p.Spec.ResourceClaims) > 0 || slices.ContainsFunc(p.Spec.Containers, func(c v1.Container) bool {
		for name := range c.Resources.Requests {
			if strings.Contains(string(name), "/") && !s.offered(name) {
				return true
			}
		}
		return false
	})
}

// offered reports whether a node offers a resource to kubelet's device manager.
func (s *Snapshot) offered(name v1.ResourceName) bool {
	return slices.ContainsFunc(s.Nodes, func(n v1.Node) bool { q := n.Status.Allocatable[name]; return !q.IsZero() })
}

// Pod returns the pod of that name, nil for an unknown one.
func (s *Snapshot) Pod(namespace, name string) *v1.Pod {
	for i := range s.Pods {
		if p := &s.Pods[i]; p.Namespace == namespace && p.Name == name {
			return p
		}
	}
	return nil
}

func oldestFirst(pods []*v1.Pod) {
	slices.SortFunc(pods, func(a, b *v1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
}

// waits reports whether a pod has not started.
func waits(p *v1.Pod) bool { return p.Status.Phase == v1.PodPending || p.Status.Phase == "" }

func ended(p *v1.Pod) bool {
	return p.Status.Phase == v1.PodSucceeded || p.Status.Phase == v1.PodFailed
}

// scheduled returns the pod's condition PodScheduled, nil for none.
func scheduled(p *v1.Pod) *v1.PodCondition {
	for i := range p.Status.Conditions {
		if c := &p.Status.Conditions[i]; c.Type == v1.PodScheduled {
			return c
		}
	}
	return nil
}

// Add adds an object of a kind that a snapshot has, and no other.
func (s *Snapshot) Add(obj runtime.Object) {
	switch o := obj.(type) {
	case *v1.Node:
		s.Nodes = append(s.Nodes, *o)
	case *v1.Pod:
		s.Pods = append(s.Pods, *o)
	case *v1.Event:
		s.Events = append(s.Events, *o)
	case *policyv1.PodDisruptionBudget:
		s.Budgets = append(s.Budgets, *o)
	case *resourceapi.ResourceClaim:
		s.Claims.Claims = append(s.Claims.Claims, *o)
	case *resourceapi.DeviceClass:
		s.Claims.Classes = append(s.Claims.Classes, *o)
	case *resourceapi.ResourceSlice:
		s.Claims.Slices = append(s.Claims.Slices, *o)
	case *unstructured.Unstructured:
		s.Queues.add(o)
	}
}

// Newest is the latest time in a dump, which is about when it was written.
func (s *Snapshot) Newest() time.Time {
	var at time.Time
	see := func(t metav1.Time) {
		if t.After(at) {
			at = t.Time
		}
	}
	for i := range s.Nodes {
		for _, c := range s.Nodes[i].Status.Conditions {
			see(c.LastHeartbeatTime)
		}
		inventories, _ := wire.DecodeInventory(s.Nodes[i].Annotations[wire.InventoryAnnotation]) // broken ones are reported
		for _, in := range inventories {
			for _, share := range in.Shares {
				see(metav1.NewTime(share.Isolation.Attested))
			}
		}
	}
	for i := range s.Pods {
		see(s.Pods[i].CreationTimestamp)
		for _, c := range s.Pods[i].Status.Conditions {
			see(c.LastTransitionTime)
		}
	}
	for i := range s.Events {
		see(s.Events[i].LastTimestamp)
		see(metav1.Time(s.Events[i].EventTime))
	}
	return at
}
