package cluster

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

const gcuMemory accel.Resource = "enflame.com/gcu-memory"

func container(name, amount string) v1.Container {
	c := v1.Container{Name: name}
	if amount != "" {
		list := v1.ResourceList{v1.ResourceName(gcuMemory): resource.MustParse(amount)}
		c.Resources = v1.ResourceRequirements{Limits: list, Requests: list.DeepCopy()}
	}
	return c
}

func podSpec(inits, apps []v1.Container) *v1.Pod {
	return &v1.Pod{Spec: v1.PodSpec{InitContainers: inits, Containers: apps}}
}
