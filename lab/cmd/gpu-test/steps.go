package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/container"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

// What the daemon offers in the test.
const (
	gpu    = "nvidia.com/gpu"
	memory = "nvidia.com/gpu-memory"
)

var cardNode = regexp.MustCompile(`^/dev/nvidia[0-9]+$`)

// test is one run.
type test struct {
	options
	record

	backend backend.Backend
	found   backend.Found
	node    *node

	// inspected is what NVML reports beside what discovery does.
	inspected inspection
	// seesAllProcesses is true in the host's pid namespace.
	seesAllProcesses bool
	// multiprocessors are those of the first GPU outside of MPS, 0 if they are not known.
	multiprocessors int32
}

func (t *test) all(ctx context.Context) (err error) {
	defer func() {
		if t.backend != nil {
			err = errors.Join(err, t.backend.Close())
		}
	}()
	if err := t.driver(ctx); err != nil {
		return err
	}
	log := io.Discard
	if t.verbose {
		log = os.Stderr
	}
	if t.node, err = newNode(t.backend, log); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.node.close()) }()
	for _, step := range []func(context.Context) error{
		t.register, t.allocate, t.prefer, t.shareMemory, t.shareTime, t.labels, containers{t}.program, containers{t}.multiProcess,
		func(context.Context) error { return t.node.offer(whole, byGB) }, t.health,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// driver does what needs no kubelet.
func (t *test) driver(ctx context.Context) error {
	for _, step := range []func(context.Context) error{
		t.discover, t.machine, t.memoryLimits, t.processes, t.cudaContext, t.specification,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// gpus is how many GPUs there are, units how many GB they have.
func (t *test) gpus() int64 { return int64(len(t.found.Devices)) }

func (t *test) units() (sum int64) {
	for _, d := range t.found.Devices {
		sum += d.MemoryBytes >> 30
	}
	return sum
}

var (
	whole   = config.Resource{Name: gpu, Vendor: vendor, Mode: config.ModeExclusive}
	byGB    = config.Resource{Name: memory, Vendor: vendor, Mode: config.ModeMemory, MemoryUnit: "1"}
	byTurns = config.Resource{Name: gpu, Vendor: vendor, Mode: config.ModeTimeSlicing, Replicas: 4}
)

func (t *test) register(ctx context.Context) error {
	t.title("Registration with kubelet's device manager")
	begun := time.Now()
	if err := t.node.offer(whole, byGB); err != nil {
		return err
	}
	t.offered(ctx, gpu, t.gpus(), t.gpus())
	t.offered(ctx, memory, t.units(), t.units())
	t.note("Registered %s after the start.", time.Since(begun).Round(time.Millisecond))
	return nil
}

// offered checks what kubelet shows of a resource.
func (t *test) offered(ctx context.Context, name string, all, free int64) {
	gotAll, gotFree := t.node.capacity(ctx, name, all, free)
	t.checks.Equal("capacity and allocatable of "+name, []int64{gotAll, gotFree}, []int64{all, free})
}

func (t *test) allocate(ctx context.Context) error {
	t.title("A pod with every GPU")
	begun := time.Now()
	pod, err := t.node.run(ctx, gpu, t.gpus())
	if err != nil {
		return err
	}
	t.note("Admitted in %s.", time.Since(begun).Round(time.Millisecond))
	t.container(pod)
	held := t.node.kubelet.IDs(pod.UID, "app", gpu)

	t.offered(ctx, memory, t.units(), 0) // withdrawn while a container has the GPUs whole
	if _, err := t.node.run(ctx, gpu, 1); err == nil {
		t.checks.True("another pod is rejected", false, "it was admitted")
	} else {
		t.checks.True("another pod is rejected", true, err.Error())
	}

	t.title("The daemon and then kubelet start again under the pod")
	if err := t.node.offer(whole, byGB); err != nil {
		return err
	}
	t.offered(ctx, memory, t.units(), 0)
	if err := t.node.kubelet.Stop(); err != nil {
		return err
	}
	if err := t.node.kubelet.Boot(); err != nil {
		return err
	}
	t.offered(ctx, gpu, t.gpus(), t.gpus())
	t.node.kubelet.Readd()
	object, err := t.node.client.CoreV1().Pods(namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	t.checks.Equal("phase of the pod", object.Status.Phase, corev1.PodRunning)
	t.checks.Equal("GPUs of the pod", t.node.kubelet.IDs(pod.UID, "app", gpu), held)
	t.container(pod)
	t.node.kubelet.Remove(pod)
	t.offered(ctx, memory, t.units(), t.units())
	return nil
}

// container checks that a container can reach exactly the GPUs that kubelet
// gave it.
func (t *test) container(pod *corev1.Pod) {
	c := t.node.kubelet.Container(pod.UID, "app")
	if c == nil {
		t.checks.True("the container runs", false, "it was not started")
		return
	}
	got := strings.Split(c.Env["NVIDIA_VISIBLE_DEVICES"], ",")
	slices.Sort(got)
	var physical []string
	for _, id := range t.node.kubelet.IDs(pod.UID, "app", gpu) {
		uuid, _, _ := strings.Cut(id, "::")
		physical = append(physical, uuid)
	}
	slices.Sort(physical)
	t.checks.Equal("NVIDIA_VISIBLE_DEVICES in the container", got, slices.Compact(physical))
	t.nodes(c.Devices, len(slices.Compact(physical)))
}

// nodes checks the device nodes of a container: one of each GPU, and those that
// all GPUs have in common.
func (t *test) nodes(devices []container.DeviceInfo, want int) {
	var cards, control []string
	for _, d := range devices {
		if cardNode.MatchString(d.PathOnHost) {
			cards = append(cards, d.PathOnHost)
		} else {
			control = append(control, d.PathOnHost)
		}
	}
	t.checks.True(fmt.Sprintf("device nodes of %d GPUs, and nvidiactl", want), len(cards) == want &&
		slices.Contains(control, "/dev/nvidiactl"), fmt.Sprint(cards, control))
}

func (t *test) prefer(ctx context.Context) error {
	t.title("Preferred allocation")
	socket := filepath.Join(t.node.dir, "device-plugins", "nvidia-gpu.sock")
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to the plugin: %w", err)
	}
	defer connection.Close() //nolint:errcheck // nothing is lost
	client := deviceplugin.NewDevicePluginClient(connection)
	options, err := client.GetDevicePluginOptions(ctx, &deviceplugin.Empty{})
	if err != nil {
		return fmt.Errorf("ask the plugin at %s: %w", socket, err)
	}
	t.checks.Equal("the plugin prefers", options.GetPreferredAllocationAvailable, true)
	var available []string
	for _, id := range ids(t.found) {
		available = append(available, string(id))
	}
	for size := range available {
		request := &deviceplugin.ContainerPreferredAllocationRequest{
			AvailableDeviceIDs: available, MustIncludeDeviceIDs: available[len(available)-1:], AllocationSize: int32(size + 1),
		}
		begun := time.Now()
		answer, err := client.GetPreferredAllocation(ctx, &deviceplugin.PreferredAllocationRequest{
			ContainerRequests: []*deviceplugin.ContainerPreferredAllocationRequest{request},
		})
		took := time.Since(begun)
		what := fmt.Sprintf("%d of %d, one of them required", size+1, len(available))
		if err != nil || len(answer.GetContainerResponses()) != 1 {
			t.checks.NoError(what, errors.Join(err, errors.New("no answer")))
			continue
		}
		got := answer.GetContainerResponses()[0].GetDeviceIDs()
		right := len(got) == size+1 && slices.Contains(got, available[len(available)-1]) &&
			!slices.ContainsFunc(got, func(id string) bool { return !slices.Contains(available, id) })
		t.checks.True(what, right, fmt.Sprintf("%v in %s", got, took.Round(10*time.Microsecond)))
	}
	return nil
}

func (t *test) shareMemory(ctx context.Context) error {
	t.title("A pod with a share of a GPU's memory")
	const gb = 4
	pod, err := t.node.run(ctx, memory, gb)
	if err != nil {
		return err
	}
	t.offered(ctx, gpu, t.gpus(), t.gpus()-1)
	c := t.node.kubelet.Container(pod.UID, "app")
	named := slices.ContainsFunc(t.found.Devices, func(d accel.Device) bool { return string(d.ID) == c.Env["NVIDIA_VISIBLE_DEVICES"] })
	t.checks.True("NVIDIA_VISIBLE_DEVICES names one GPU", named, c.Env["NVIDIA_VISIBLE_DEVICES"])
	t.nodes(c.Devices, 1)
	t.node.kubelet.Remove(pod)
	t.offered(ctx, gpu, t.gpus(), t.gpus())
	return nil
}

func (t *test) shareTime(ctx context.Context) error {
	t.title("Time slices: another configuration")
	if err := t.node.offer(byTurns); err != nil {
		return err
	}
	const replicas = 4
	t.offered(ctx, gpu, replicas*t.gpus(), replicas*t.gpus())
	var pods []*corev1.Pod
	sharers := map[string]int{}
	for range replicas * t.gpus() {
		pod, err := t.node.run(ctx, gpu, 1)
		if err != nil {
			return err
		}
		pods = append(pods, pod)
		sharers[t.node.kubelet.Container(pod.UID, "app").Env["NVIDIA_VISIBLE_DEVICES"]]++
	}
	want := map[string]int{}
	for _, id := range ids(t.found) {
		want[string(id)] = replicas
	}
	t.checks.Equal("pods on each GPU", sharers, want)
	for _, pod := range pods {
		t.node.kubelet.Remove(pod)
	}
	return t.node.offer(whole, byGB)
}

func (t *test) labels(ctx context.Context) error {
	t.title("Labels of the node")
	var labels map[string]string
	err := poll.Until(ctx, patience, "the node's labels", func(ctx context.Context) error {
		node, err := t.node.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if labels = node.Labels; labels["nvidia.com/gpu.present"] == "" {
			return fmt.Errorf("it has %v", labels)
		}
		return nil
	})
	if err != nil {
		return err
	}
	rows := [][]string{}
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		rows = append(rows, []string{key, labels[key]})
	}
	t.table(table{Head: []string{"label", "value"}, Rows: rows})
	first := t.found.Devices[0]
	wanted := map[string]string{
		"nvidia.com/gpu.present":              "true",
		"nvidia.com/gpu.count":                fmt.Sprint(t.gpus()),
		"nvidia.com/gpu.product":              strings.ReplaceAll(first.Model, " ", "-"),
		"nvidia.com/gpu.memory":               fmt.Sprint(first.MemoryBytes >> 20),
		"nvidia.com/cuda.driver-version.full": t.found.Driver,
		"divvy.dev/nvidia.present":            "true",
		"divvy.dev/nvidia.count":              fmt.Sprint(t.gpus()),
	}
	for _, key := range slices.Sorted(maps.Keys(wanted)) {
		t.checks.Equal(key, labels[key], wanted[key])
	}
	return nil
}

// health watches for false alarms.
func (t *test) health(ctx context.Context) error {
	t.title(fmt.Sprintf("Health, for %s", t.watch))
	looks, ill := 0, 0
	for end := time.Now().Add(t.watch); time.Now().Before(end); looks++ {
		if all, free := t.node.kubelet.Capacity(gpu); all != t.gpus() || free != t.gpus() {
			ill++
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
	t.checks.Equal(fmt.Sprintf("of %d looks at kubelet, those that showed a GPU as unhealthy", looks), ill, 0)
	now, err := t.backend.Discover(ctx)
	if err != nil {
		return err
	}
	t.checks.True("the GPUs are as before", slices.Equal(now.Devices, t.found.Devices), fmt.Sprintf("%d, all as they were: %t",
		len(now.Devices), slices.Equal(now.Devices, t.found.Devices)))
	notifier, ok := t.backend.(backend.Notifier)
	if !ok {
		return nil
	}
	// Whatever the daemon waits for, it has let go of by now.
	if err := t.node.stop(); err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, min(t.watch, 3*time.Second))
	defer cancel()
	err = notifier.AwaitChange(waiting)
	t.checks.True("NVML's events can be waited for, and there is none", errors.Is(err, context.DeadlineExceeded), fmt.Sprint(err))
	return nil
}
