package admission

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// Secrets returns the names of the pool's secrets that the volumes of a pod
// reference, sorted, each once. Secrets of others are not among them.
func Secrets(pod *corev1.Pod) []string {
	var names []string
	add := func(name string) {
		switch name {
		case pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret:
			names = append(names, name)
		}
	}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.Secret != nil {
			add(v.Secret.SecretName)
		}
		if v.Projected == nil {
			continue
		}
		for _, source := range v.Projected.Sources {
			if source.Secret != nil {
				add(source.Secret.Name)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
