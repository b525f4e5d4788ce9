package kubelet

import (
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/container"
)

// runtime is the container runtime: what it knows outlives kubelet.
type runtime struct {
	mu         sync.Mutex
	containers map[types.UID]map[string]*Container // by pod and name
}

// Container is one that was started at least once, with what it got of its
// devices at its last start.
type Container struct {
	Env         map[string]string
	Annotations map[string]string
	Devices     []container.DeviceInfo
	Mounts      []container.Mount
	CDIDevices  []string

	running bool
}

func containerID(uid types.UID, name string) string { return string(uid) + "-" + name }

// Run starts the containers of an admitted pod: plain init containers run to
// their end, the others keep running.
func (k *Kubelet) Run(pod *corev1.Pod) error {
	var statuses, inits []corev1.ContainerStatus
	for i, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		options, err := k.life.devices.GetDeviceRunContainerOptions(k.life.ctx, pod, &c)
		if err != nil {
			return fmt.Errorf("start container %s of %s: %w", c.Name, pod.Name, err)
		}
		one := &Container{running: i >= len(pod.Spec.InitContainers) || isSidecar(&c), Env: map[string]string{},
			Annotations: map[string]string{}}
		if options != nil {
			one.Devices, one.Mounts = options.Devices, options.Mounts
			for _, e := range options.Envs {
				one.Env[e.Name] = e.Value
			}
			for _, a := range options.Annotations {
				one.Annotations[a.Name] = a.Value
			}
			for _, d := range options.CDIDevices {
				one.CDIDevices = append(one.CDIDevices, d.Name)
			}
		}
		k.runtime.mu.Lock()
		if k.runtime.containers[pod.UID] == nil {
			k.runtime.containers[pod.UID] = map[string]*Container{}
		}
		k.runtime.containers[pod.UID][c.Name] = one
		k.runtime.mu.Unlock()
		status := corev1.ContainerStatus{Name: c.Name, ContainerID: "containerd://" + containerID(pod.UID, c.Name)}
		if i < len(pod.Spec.InitContainers) {
			inits = append(inits, status)
		} else {
			statuses = append(statuses, status)
		}
	}
	k.Server.Update(pod.UID, func(p *corev1.Pod) {
		p.Status.Phase, p.Status.InitContainerStatuses, p.Status.ContainerStatuses = corev1.PodRunning, inits, statuses
	})
	return nil
}

func isSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// Container returns a container that was started, nil for none.
func (k *Kubelet) Container(uid types.UID, name string) *Container {
	k.runtime.mu.Lock()
	defer k.runtime.mu.Unlock()
	return k.runtime.containers[uid][name]
}

// Kill ends the containers of a pod.
func (k *Kubelet) Kill(pod *corev1.Pod) {
	k.runtime.mu.Lock()
	defer k.runtime.mu.Unlock()
	delete(k.runtime.containers, pod.UID)
}

// containerMap is what a starting kubelet asks the container runtime.
func (r *runtime) containerMap() (containermap.ContainerMap, sets.Set[string]) {
	ids, running := containermap.NewContainerMap(), sets.New[string]()
	r.mu.Lock()
	defer r.mu.Unlock()
	for uid, containers := range r.containers {
		for name, c := range containers {
			ids.Add(string(uid), name, containerID(uid, name))
			if c.running {
				running.Insert(containerID(uid, name))
			}
		}
	}
	return ids, running
}
