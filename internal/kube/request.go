package kube

import (
	"math"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/accel"
)

// RequestOf returns what the pod asks of the resource, with the containers in
// the order in which kubelet allocates. Its Peak is what kube-scheduler's own
// formula gives. A pod that asks for nothing has no containers in it.
func RequestOf(pod *v1.Pod, resource accel.Resource) accel.Request {
	req := accel.Request{Resource: resource}
	add := func(c *v1.Container, kind accel.ContainerKind) {
		if units := unitsOf(&c.Resources, resource); units > 0 {
			req.Containers = append(req.Containers, accel.ContainerRequest{Name: c.Name, Kind: kind, Units: units})
		}
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		kind := accel.InitContainer
		if c.RestartPolicy != nil && *c.RestartPolicy == v1.ContainerRestartPolicyAlways {
			kind = accel.SidecarContainer
		}
		add(c, kind)
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i], accel.AppContainer)
	}
	return req
}

// RequestsOf returns what the pod asks of each of the resources, without those
// that it asks nothing of: nil for most pods of a cluster.
func RequestsOf(pod *v1.Pod, resources []accel.Resource) []accel.Request {
	var requests []accel.Request
	for _, resource := range resources {
		if req := RequestOf(pod, resource); len(req.Containers) > 0 {
			requests = append(requests, req)
		}
	}
	return requests
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
