package kube

import (
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// PodClaimAnnotation has the name of a ResourceClaim in the spec of its pod. The API of Kubernetes 1.35 has no
// constant for it.
const PodClaimAnnotation = "resource.kubernetes.io/pod-claim-name"

// PodClaim is a claim in the spec of a pod.
type PodClaim struct {
	Pod  types.UID
	Name string
}

// PodClaimOf returns what kube-controller-manager has made a claim for, from a template; the zero value for other
// claims. The owner and the annotation that say so can be forged by users who may create claims.
func PodClaimOf(claim *resourceapi.ResourceClaim) PodClaim {
	owner, name := metav1.GetControllerOfNoCopy(claim), claim.Annotations[PodClaimAnnotation]
	if owner == nil || owner.APIVersion != "v1" || owner.Kind != "Pod" || owner.UID == "" || name == "" {
		return PodClaim{}
	}
	return PodClaim{owner.UID, name}
}
