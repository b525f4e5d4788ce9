package kube

import (
	"errors"
	"math"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// RequestOf returns what the pod asks of the resource, with the containers in
// the order in which kubelet allocates. Its Peak is what kube-scheduler's own
// formula gives. A pod that asks for nothing has no containers in it. Of the
// annotations by which a pod chooses devices, those that cannot be followed count
// as not there; see RequestsOf. CPU and memory are not in it, see AddPeak.
func RequestOf(pod *v1.Pod, resource accel.Resource) accel.Request {
	req := unitsAsked(pod, resource)
	if len(req.Containers) > 0 {
		a, _ := readAsk(pod.Annotations)
		_ = a.put(&req)
	}
	return req
}

// IsSidecar reports whether an init container is a sidecar, which runs beside the containers that
// follow it.
func IsSidecar(c *v1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == v1.ContainerRestartPolicyAlways
}

func unitsAsked(pod *v1.Pod, name accel.Resource) accel.Request {
	req := accel.Request{Resource: name, Pod: string(pod.UID)}
	if pod.Spec.Priority != nil {
		req.Priority = *pod.Spec.Priority
	}
	add := func(c *v1.Container, kind accel.ContainerKind) {
		if units := unitsOf(&c.Resources, name); units > 0 {
			req.Containers = append(req.Containers, accel.ContainerRequest{Name: c.Name, Kind: kind, Units: units})
		}
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		kind := accel.InitContainer
		if IsSidecar(c) {
			kind = accel.SidecarContainer
		}
		add(c, kind)
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i], accel.AppContainer)
	}
	return req
}

// RequestsOf is RequestOf for each of the resources, without those that the pod
// asks nothing of: nil for most pods of a cluster. The error, of a pod that asks
// for something, says which of its annotations cannot be followed; it is an
// *AskError or several joined.
func RequestsOf(pod *v1.Pod, resources []accel.Resource) ([]accel.Request, error) {
	var requests []accel.Request
	for _, resource := range resources {
		if req := unitsAsked(pod, resource); len(req.Containers) > 0 {
			requests = append(requests, req)
		}
	}
	if len(requests) == 0 {
		return nil, nil
	}
	a, err := readAsk(pod.Annotations)
	errs := []error{err}
	for i := range requests {
		errs = append(errs, a.put(&requests[i]))
	}
	return requests, errors.Join(errs...)
}

// PeakOf returns the CPU in millicores and the memory in MiB, rounded up, that
// kube-scheduler counts the pod with.
func PeakOf(pod *v1.Pod) (cpu, memory int64) {
	peak := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})
	cpu = math.MaxInt64
	if peak.Cpu().CmpInt64(math.MaxInt64/1000) < 0 {
		cpu = max(peak.Cpu().MilliValue(), 0)
	}
	return cpu, mebibytes(peak.Memory(), mebibyte-1)
}

const mebibyte = 1 << 20

// mebibytes rounds down after adding some bytes.
func mebibytes(q *resource.Quantity, add int64) int64 {
	bytes := min(max(q.Value(), 0), math.MaxInt64-add)
	return (bytes + add) / mebibyte
}

// AddPeak puts the pod's CPU and memory into its requests.
func AddPeak(pod *v1.Pod, requests []accel.Request) {
	if len(requests) == 0 {
		return
	}
	cpu, memory := PeakOf(pod)
	for i := range requests {
		requests[i].CPU, requests[i].Memory = cpu, memory
	}
}

// unitsOf prefers the request. The API server makes it equal to the limit, but
// a pod that did not pass it yet may have the limit alone. No container counts
// for more than accel.MaxUnits, so that sums stay far from overflow.
func unitsOf(r *v1.ResourceRequirements, resource accel.Resource) accel.Units {
	q, ok := r.Requests[v1.ResourceName(resource)]
	if !ok {
		q, ok = r.Limits[v1.ResourceName(resource)]
	}
	if !ok || q.Sign() <= 0 {
		return 0
	}
	if n, ok := q.AsInt64(); ok {
		return min(accel.Units(n), accel.MaxUnits)
	}
	// A fraction, which the API server refuses for extended resources, counts
	// as a whole unit. Quantity's exact methods are not used: for 1e999999999
	// they build a number of that many digits.
	return accel.Units(min(math.Ceil(q.AsApproximateFloat64()), float64(accel.MaxUnits)))
}
