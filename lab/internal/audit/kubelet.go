package audit

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// Given is a container and the units of the resource that kubelet gave it.
type Given struct {
	Namespace, Pod, Container string
	Units                     []string
}

// kubeletSocket is kubelet's pod-resources API.
const kubeletSocket = "unix:///var/lib/kubelet/pod-resources/kubelet.sock"

// maxAnswer bounds kubelet's answer in bytes; 256 000 units are some 1.3 MB.
const maxAnswer = 64 << 20

// askKubelet returns all containers that hold units.
func askKubelet(ctx context.Context) ([]Given, error) {
	pods, err := listKubelet(ctx)
	if err != nil {
		return nil, err
	}
	var given []Given
	for _, pod := range pods {
		for _, container := range pod.GetContainers() {
			g := Given{Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: container.GetName()}
			for _, devices := range container.GetDevices() {
				if devices.GetResourceName() == string(product.Resource) {
					g.Units = append(g.Units, devices.GetDeviceIds()...)
				}
			}
			if len(g.Units) > 0 {
				given = append(given, g)
			}
		}
	}
	return given, nil
}

// listKubelet returns what kubelet says of all pods. It uses a new connection each time: one from
// before a restart of kubelet would wait before it tries again.
func listKubelet(ctx context.Context) (pods []*podresources.PodResources, err error) {
	connection, err := grpc.NewClient(kubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return nil, fmt.Errorf("ask kubelet who holds what: %w", err)
	}
	defer func() { err = errors.Join(err, connection.Close()) }()
	answer, err := podresources.NewPodResourcesListerClient(connection).List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask kubelet who holds what: %w", err)
	}
	return answer.GetPodResources(), nil
}
