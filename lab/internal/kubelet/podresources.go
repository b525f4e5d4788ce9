package kubelet

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	apisgrpc "k8s.io/kubernetes/pkg/kubelet/apis/grpc"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
)

func (k *Kubelet) servePodResources() error {
	path := filepath.Join(k.Dir, "pod-resources", "kubelet.sock")
	if err := os.RemoveAll(path); err != nil {
		return fmt.Errorf("pod-resources socket: %w", err)
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("pod-resources socket: %w", err)
	}
	// As ListenAndServePodResources in pkg/kubelet/server, which never stops.
	k.life.server = grpc.NewServer(grpc.ChainUnaryInterceptor(
		apisgrpc.LimiterUnaryServerInterceptor(rate.NewLimiter(k.Lists, podresources.DefaultBurstTokens)),
		func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			if k.RefuseLists.Load() {
				return nil, apisgrpc.ErrorLimitExceeded
			}
			return handler(klog.NewContext(ctx, k.Log), req)
		},
	))
	podresourcesv1.RegisterPodResourcesListerServer(k.life.server, podresources.NewV1PodResourcesServer(k.life.ctx,
		podresources.PodResourcesProviders{
			Pods: k, Devices: provider{k.life.devices}, Cpus: nothing{}, Memory: nothing{}, DynamicResources: nothing{},
		}))
	server := k.life.server
	k.life.serving.Go(func() { _ = server.Serve(listener) })
	return nil
}

// provider gives kubelet's pod-resources server what the device manager knows,
// as kubelet's container manager does.
type provider struct{ *devicemanager.ManagerImpl }

func (p provider) GetDevices(uid, name string) []*podresourcesv1.ContainerDevices {
	return flat(p.ManagerImpl.GetDevices(uid, name))
}

func (p provider) GetAllocatableDevices(log klog.Logger) []*podresourcesv1.ContainerDevices {
	return flat(p.ManagerImpl.GetAllocatableDevices(log))
}

// flat has one entry per id, as in containerDevicesFromResourceDeviceInstances.
func flat(all devicemanager.ResourceDeviceInstances) []*podresourcesv1.ContainerDevices {
	var out []*podresourcesv1.ContainerDevices
	for name, devices := range all {
		for id := range devices {
			out = append(out, &podresourcesv1.ContainerDevices{ResourceName: name, DeviceIds: []string{id}})
		}
	}
	return out
}

// nothing is a kubelet that manages no CPUs, memory or claims.
type nothing struct{}

func (nothing) GetCPUs(*corev1.Pod, *corev1.Container) []int64 { return nil }
func (nothing) GetPodCPUs(string) []int64                      { return nil }
func (nothing) GetAllocatableCPUs() []int64                    { return nil }
func (nothing) GetMemory(klog.Logger, *corev1.Pod, *corev1.Container) []*podresourcesv1.ContainerMemory {
	return nil
}
func (nothing) GetPodMemory(klog.Logger, string) []*podresourcesv1.ContainerMemory { return nil }
func (nothing) GetAllocatableMemory(klog.Logger) []*podresourcesv1.ContainerMemory { return nil }
func (nothing) GetDynamicResources(klog.Logger, *corev1.Pod, *corev1.Container) []*podresourcesv1.DynamicResource {
	return nil
}
