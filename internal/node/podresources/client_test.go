package podresources

import (
	"context"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// stubKubelet answers with a fixed list.
type stubKubelet struct {
	podresourcesv1.UnimplementedPodResourcesListerServer
	answer *podresourcesv1.ListPodResourcesResponse
}

func (s stubKubelet) List(context.Context, *podresourcesv1.ListPodResourcesRequest) (*podresourcesv1.ListPodResourcesResponse, error) {
	return s.answer, nil
}

func (s stubKubelet) GetAllocatableResources(context.Context,
	*podresourcesv1.AllocatableResourcesRequest) (*podresourcesv1.AllocatableResourcesResponse, error) {
	return &podresourcesv1.AllocatableResourcesResponse{Devices: s.answer.GetPodResources()[0].GetContainers()[0].GetDevices()}, nil
}

func serve(t *testing.T, socket string, s stubKubelet) (stop func()) {
	t.Helper()
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresourcesv1.RegisterPodResourcesListerServer(server, s)
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(l) }()
	return func() { server.Stop(); <-done }
}

func answer() *podresourcesv1.ListPodResourcesResponse {
	devices := func(resource string, ids ...string) *podresourcesv1.ContainerDevices {
		return &podresourcesv1.ContainerDevices{ResourceName: resource, DeviceIds: ids}
	}
	return &podresourcesv1.ListPodResourcesResponse{PodResources: []*podresourcesv1.PodResources{{
		Namespace: "ns", Name: "p", Containers: []*podresourcesv1.ContainerResources{
			{Name: "c", Devices: []*podresourcesv1.ContainerDevices{devices("e.com/a", "1", "2"), devices("e.com/b", "9"),
				devices("e.com/a", "3")}},
			{Name: "idle"},
		},
	}}}
}

func TestListReadsAllEntriesOfAResource(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "k.sock")
	defer serve(t, socket, stubKubelet{answer: answer()})()
	c, err := NewClient(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // the test is over
	got, err := c.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []Pod{{Namespace: "ns", Name: "p", Containers: []Container{
		{Name: "c", Units: map[accel.Resource][]string{"e.com/a": {"1", "2", "3"}, "e.com/b": {"9"}}},
		{Name: "idle", Units: map[accel.Resource][]string{}},
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestListFindsAKubeletThatWasAwayForLong(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "k.sock")
	c, err := NewClient(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // the test is over
	for range 10 {  // long enough for gRPC's own pauses to grow beyond a second
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		if _, err := c.List(ctx); err == nil {
			t.Error("an answer without a kubelet")
		}
		cancel()
	}
	defer serve(t, socket, stubKubelet{answer: answer()})()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := c.List(ctx); err != nil {
		t.Errorf("within a second of kubelet's return: %v", err)
	}
}

func TestAllocatableCountsEachIDOnce(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "k.sock")
	list := answer()
	// A board near two NUMA nodes is listed for each of them.
	c := list.PodResources[0].Containers[0]
	c.Devices = append(c.Devices, &podresourcesv1.ContainerDevices{ResourceName: "e.com/b", DeviceIds: []string{"9", "8"}})
	defer serve(t, socket, stubKubelet{answer: list})()
	client, err := NewClient(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close() //nolint:errcheck // the test is over
	got, err := client.Allocatable(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[accel.Resource]int{"e.com/a": 3, "e.com/b": 2}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
