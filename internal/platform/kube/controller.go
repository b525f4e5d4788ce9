package kube

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
)

// Controller gets a Job, Deployment or StatefulSet by its kind as kubectl takes it; nil for another
// kind.
func Controller(ctx context.Context, client kubernetes.Interface, kind, namespace, name string) (runtime.Object, error) {
	switch kind {
	case "job":
		return client.BatchV1().Jobs(namespace).Get(ctx, name, metav1.GetOptions{})
	case "deployment":
		return client.AppsV1().Deployments(namespace).Get(ctx, name, metav1.GetOptions{})
	case "statefulset":
		return client.AppsV1().StatefulSets(namespace).Get(ctx, name, metav1.GetOptions{})
	}
	return nil, nil
}
