package kube

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
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

// SelectsDriver reports whether a DeviceClass is for devices of a driver: its name ends with the
// driver's, or a selector names it.
func SelectsDriver(class *resourceapi.DeviceClass, driver string) bool {
	return strings.HasSuffix(class.Name, "."+driver) || slices.ContainsFunc(class.Spec.Selectors, func(s resourceapi.DeviceSelector) bool {
		return s.CEL != nil && strings.Contains(s.CEL.Expression, driver)
	})
}

// ClaimsOf returns the names of the claims of a pod by the pod's own names for them; the name for
// the claim of its extended resources is "".
func ClaimsOf(pod *corev1.Pod) map[string]string {
	out := map[string]string{}
	for i := range pod.Spec.ResourceClaims {
		c := &pod.Spec.ResourceClaims[i]
		if name, _, err := resourceclaim.Name(pod, c); err == nil && name != nil {
			out[c.Name] = *name
		}
	}
	if s := pod.Status.ExtendedResourceClaimStatus; s != nil {
		out[""] = s.ResourceClaimName
	}
	return out
}
