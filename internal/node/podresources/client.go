// Package podresources asks kubelet which container holds which units of an
// extended resource, over the pod-resources API
// (k8s.io/kubelet/pkg/apis/podresources/v1).
package podresources

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// APIVersion is the version of the API, which is in the name of its service.
const APIVersion = "v1"

// maxAnswerBytes bounds kubelet's answer. 256 000 units with ids of three
// characters are 1.3 MB; gRPC's default of 4 MiB would do, but not by much.
const maxAnswerBytes = 64 << 20

// reconnect is how often the socket is tried while kubelet is away. gRPC's own
// default grows to two minutes; pods that start right after kubelet would be
// refused for that long.
var reconnect = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 300 * time.Millisecond},
	MinConnectTimeout: time.Second,
}

// Pod is one pod of the node that kubelet counts as active. Kubelet names pods
// here without their UID.
type Pod struct {
	Namespace, Name string
	// Containers are the app containers and sidecars; kubelet does not list
	// plain init containers.
	Containers []Container
}

// Container is what one container holds.
type Container struct {
	Name string
	// Units are the ids held of each resource.
	Units map[accel.Resource][]string
}

// Client talks to kubelet. It is safe for concurrent use, connects when it is
// first used and again after kubelet restarted.
type Client struct {
	conn   *grpc.ClientConn
	lister podresourcesv1.PodResourcesListerClient
}

// NewClient returns a client of the socket at path. The socket need not exist
// yet. It is local to the node and only root may open it, so the connection is
// not encrypted.
func NewClient(path string) (*Client, error) {
	conn, err := grpc.NewClient("unix://"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(reconnect),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswerBytes)))
	if err != nil {
		return nil, fmt.Errorf("pod-resources socket %s: %w", path, err)
	}
	return &Client{conn: conn, lister: podresourcesv1.NewPodResourcesListerClient(conn)}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.conn.Close() }

// List returns the active pods and the units that their containers hold. While
// kubelet is away it waits for it until ctx ends, so ctx needs a deadline.
func (c *Client) List(ctx context.Context) ([]Pod, error) {
	answer, err := c.lister.List(ctx, &podresourcesv1.ListPodResourcesRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, fmt.Errorf("ask kubelet for pod resources: %w", err)
	}
	pods := make([]Pod, 0, len(answer.GetPodResources()))
	for _, p := range answer.GetPodResources() {
		pod := Pod{Namespace: p.GetNamespace(), Name: p.GetName()}
		for _, c := range p.GetContainers() {
			units := map[accel.Resource][]string{}
			// One entry per NUMA node: a resource may come in several.
			for _, d := range c.GetDevices() {
				r := accel.Resource(d.GetResourceName())
				units[r] = append(units[r], d.GetDeviceIds()...)
			}
			pod.Containers = append(pod.Containers, Container{Name: c.GetName(), Units: units})
		}
		pods = append(pods, pod)
	}
	return pods, nil
}

// Allocatable returns how many healthy ids kubelet knows of each resource, held
// or free: what it will report as allocatable. Unlike List it leaves kubelet's
// books as they are, so it may be called at any moment.
func (c *Client) Allocatable(ctx context.Context) (map[accel.Resource]int, error) {
	answer, err := c.lister.GetAllocatableResources(ctx, &podresourcesv1.AllocatableResourcesRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, fmt.Errorf("ask kubelet for allocatable resources: %w", err)
	}
	ids := map[accel.Resource]map[string]struct{}{}
	for _, d := range answer.GetDevices() {
		r := accel.Resource(d.GetResourceName())
		if ids[r] == nil {
			ids[r] = map[string]struct{}{}
		}
		for _, id := range d.GetDeviceIds() {
			ids[r][id] = struct{}{}
		}
	}
	out := make(map[accel.Resource]int, len(ids))
	for r, set := range ids {
		out[r] = len(set)
	}
	return out, nil
}
