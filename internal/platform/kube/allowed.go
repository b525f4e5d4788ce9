package kube

import (
	"context"
	"fmt"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Allowed asks the API server whether the client's user may do something with objects of a core
// resource in a namespace, or in all of them if it is "".
func Allowed(ctx context.Context, client kubernetes.Interface, verb, resource, namespace string) (bool, error) {
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: namespace, Verb: verb, Resource: resource},
	}}
	answer, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
	if err != nil {
		return false, fmt.Errorf("ask for the right to %s %s: %w", verb, resource, err)
	}
	return answer.Status.Allowed, nil
}

// MayDeletePods asks in which namespaces the client's user may delete pods: in all, or else in this
// one. Without an answer there is none.
func MayDeletePods(ctx context.Context, client kubernetes.Interface, namespace string) func(in string) bool {
	may := func(in string) bool {
		allowed, err := Allowed(ctx, client, "delete", "pods", in)
		return err == nil && allowed
	}
	everywhere := may(metav1.NamespaceAll)
	here := everywhere || may(namespace)
	return func(in string) bool { return everywhere || here && in == namespace }
}
