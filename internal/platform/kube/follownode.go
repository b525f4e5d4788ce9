package kube

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
)

// FollowNode calls see with a node and with each change of it, until ctx ends; name is what
// the reflector's log calls it. A node that is gone for a moment, while it registers again,
// is not reported. The calls come one after the other.
func FollowNode(ctx context.Context, name string, client kubernetes.Interface, node string, see func(*corev1.Node)) {
	nodes := client.CoreV1().Nodes()
	selector := fields.OneTermEqualSelector("metadata.name", node).String()
	NewReflector(name, &corev1.Node{}, nodeStore{node, see}, ListWatch(client, selector, nodes.List, nodes.Watch)).RunWithContext(ctx)
}

// nodeStore is a reflector's store that keeps nothing.
type nodeStore struct {
	node string
	see  func(*corev1.Node)
}

// Add takes in a new object.
func (s nodeStore) Add(object any) error { return s.Update(object) }

// Update takes in a changed object.
func (s nodeStore) Update(object any) error {
	if n, ok := object.(*corev1.Node); ok && n.Name == s.node {
		s.see(n)
	}
	return nil
}

// Delete has nothing to do.
func (nodeStore) Delete(any) error { return nil }

// Replace takes in a whole list.
func (s nodeStore) Replace(list []any, _ string) error {
	for _, object := range list {
		if err := s.Update(object); err != nil {
			return err
		}
	}
	return nil
}

// Resync has nothing to do.
func (nodeStore) Resync() error { return nil }
