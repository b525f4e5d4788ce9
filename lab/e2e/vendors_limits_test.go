//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/limitshost"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// TestMemoryLimits: four pods on one GPU have their memory and no more, whatever they try.
func TestMemoryLimits(t *testing.T) {
	ctx, gpu := beginLimits(t)

	// This node has version 1 of control groups, until the daemon gets to see the lab's version 2.
	condition(t, wire.IsolationCondition, corev1.ConditionTrue, "control groups v2 are required")
	stated(t, accel.TierNone, accel.TierNone)
	first := allocating("first", 3, "--mib", "3072", "--hold")
	first.Annotations = map[string]string{wire.IsolationAnnotation: "driver"}
	pending(t, create(t, first)[0], "isolation driver required, device states none")
	showGroups(t, ctx)
	running(t, "first")

	greedy := allocating("greedy", 3, "--mib", "3072", "--mib", "1", "--hold")
	greedy.Spec.Containers[0].Env = []corev1.EnvVar{
		{Name: "NVIDIA_GPU_MEMORY_LIMIT", Value: "40000"}, {Name: "NVIDIA_VISIBLE_DEVICES", Value: "all"},
		{Name: "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", Value: "0=40G"}, {Name: "CUDA_MPS_PIPE_DIRECTORY", Value: "/tmp"},
	}
	start(t, greedy, allocating("half", 3, "--mib", "2000", "--hold"), allocating("last", 3, "--mib", "3072", "--hold"))
	for name, want := range map[string][]string{
		"first":  {"allocated 3072 MiB, 3072 MiB in all"},
		"greedy": demos.Full,
		"half":   {"allocated 2000 MiB, 2000 MiB in all"},
		"last":   {"allocated 3072 MiB, 3072 MiB in all"},
	} {
		printed(t, name, want...)
		must(t, limitshost.Limited(ctx, gpu, groupOf(t, name), 3<<30))
	}
	// A second process of a container gets the rest.
	text, err := lab.Pods.Exec(ctx, "half", "app", limitshost.Allocator("--mib", "1072", "--mib", "1")...)
	if want := "allocated 1072 MiB, 1072 MiB in all\nrejected 1 MiB, 1072 MiB in all: out of memory, code 2"; text != want {
		t.Errorf("the second process of the pod printed %q (%v), want %q", text, err, want)
	}

	stated(t, accel.TierDriver, accel.TierDriver)
	condition(t, wire.IsolationCondition, corev1.ConditionFalse, "")
	chargedOnly(t, ctx, "half", 2000<<20)
	must(t, poll.Until(ctx, podTimeout, "the label of the tier", func(ctx context.Context) error {
		node, err := lab.Node.Get(ctx)
		if err == nil && node.Labels["divvy.dev/nvidia.isolation"] != "driver" {
			err = fmt.Errorf("labels are %v", node.Labels)
		}
		return err
	}))
	table, err := lab.CLI.Kubectl(ctx, "divvy", "inspect", "--resource", string(demos.GPUMemory), "--output", "wide", layout.NodeName)
	must(t, err)
	t.Log(table)
	if !strings.Contains(table, "TIER") || strings.Count(table, "driver/none") != 2 {
		t.Errorf("kubectl divvy inspect -o wide does not show tier driver of two GPUs:\n%s", table)
	}

	withoutHook(t, ctx)

	// An administrator removes a limit by hand.
	group := groupOf(t, "first")
	must(t, limitshost.RemoveLimit(ctx, gpu, group))
	must(t, poll.Until(ctx, demos.TwoPasses, "the limit to be back", func(ctx context.Context) error {
		return limitshost.Limited(ctx, gpu, group, 3<<30)
	}))
	pod, err := lab.Pods.API.Get(ctx, "first", metav1.GetOptions{})
	must(t, err)
	_, err = lab.Pods.WaitEvent(ctx, podTimeout, pod, "it is 3072 MiB again")
	must(t, err)
	condition(t, wire.IsolationCondition, corev1.ConditionTrue, "/first/app was without its limit")
	stated(t, accel.TierNone, accel.TierDriver)
}

// withoutHook checks that there is no container where the hook fails or is missing, and that
// the pod's event says why.
func withoutHook(t *testing.T, ctx context.Context) {
	t.Helper()
	greedy := func(name string) *corev1.Pod {
		pod := allocating(name, 3, "--mib", "3072", "--mib", "1", "--hold")
		pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
		return pod
	}
	refused := func(pod *corev1.Pod, want string) {
		t.Helper()
		_, err := lab.Pods.WaitEvent(ctx, podTimeout, pod, want)
		must(t, err)
		pod, err = lab.Pods.API.Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil || pod.Status.ContainerStatuses[0].State.Running != nil {
			t.Errorf("the container runs without a limit (%v)", err)
		}
	}
	restore := replaceHook(t, "#!/bin/sh\necho no limits today >&2\nexit 1\n")
	refused(create(t, greedy("failing"))[0], "no limits today")
	restore()

	// The hook goes between the allocation and the start of the container. The daemon stands
	// still meanwhile, as it would install the hook again, or withdraw the tier.
	missing := greedy("missing")
	missing.Spec.InitContainers = []corev1.Container{testenv.Container("early", 0, "sleep", "5")}
	missing = create(t, missing)[0]
	must(t, poll.Until(ctx, podTimeout, "the init container to run", func(ctx context.Context) error {
		pod, err := lab.Pods.API.Get(ctx, "missing", metav1.GetOptions{})
		if err == nil && (len(pod.Status.InitContainerStatuses) == 0 || pod.Status.InitContainerStatuses[0].State.Running == nil) {
			err = errors.New(testenv.Describe(pod))
		}
		return err
	}))
	resume := holdDaemon(t, ctx)
	hook, err := limitshost.Hook()
	must(t, err)
	must(t, os.RemoveAll(hook))
	refused(missing, "no such file or directory")
	resume()
	// The daemon installs it again, and kubelet tries again.
	running(t, "failing", "missing")
	printed(t, "missing", demos.Full...)
	must(t, lab.Pods.Delete(ctx, "failing", "missing"))
}

// holdDaemon stops the node's daemon until resume, or the end of the test.
func holdDaemon(t *testing.T, ctx context.Context) (resume func()) {
	t.Helper()
	pod, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
	must(t, err)
	pid, err := testenv.ContainerPID(pod.Status.ContainerStatuses[0].ContainerID)
	must(t, err)
	must(t, syscall.Kill(pid, syscall.SIGSTOP))
	resume = sync.OnceFunc(func() { must(t, syscall.Kill(pid, syscall.SIGCONT)) })
	t.Cleanup(resume)
	return resume
}

// TestMemoryLimitsStay: limits and the tier outlast restarts, and are found missing where the
// hook does nothing.
func TestMemoryLimitsStay(t *testing.T) {
	ctx, gpu := beginLimits(t)
	showGroups(t, ctx)
	again := allocating("again", 3, "--mib", "3072", "--mib", "1", "--hold")
	again.Spec.RestartPolicy = corev1.RestartPolicyAlways
	start(t, again, allocating("calm", 3, "--mib", "3072", "--hold"))
	alive := lives(t)

	for _, restart := range lab.Restarts() {
		if !slices.Contains([]string{"kubelet restarted", "kubelet killed", "divvy-node deleted", "divvy-node killed"}, restart.Name) {
			continue
		}
		since := time.Now()
		must(t, restart.Do(ctx))
		attestedSince(t, ctx, since)
		undisturbed(t, alive)
		for name := range alive {
			must(t, limitshost.Limited(ctx, gpu, groupOf(t, strings.TrimSuffix(name, "/app")), 3<<30))
		}
	}

	// Kubelet, which has read its records again, gives the container its limit again.
	before := alive["again/app"]
	must(t, syscall.Kill(pidOf(t, "again"), syscall.SIGKILL))
	must(t, poll.Until(ctx, podTimeout, "the container to be started again", func(context.Context) error {
		if now := lives(t)["again/app"]; now == before || !strings.HasPrefix(now, "running") {
			return errors.New(now)
		}
		return nil
	}))
	printed(t, "again", demos.Full...)
	must(t, limitshost.Limited(ctx, gpu, groupOf(t, "again"), 3<<30))

	// With a hook that does nothing, memory goes through that the limit rejects, and the next
	// pass finds it.
	restore := replaceHook(t, "#!/bin/sh\n")
	start(t, allocating("breach", 2, "--mib", "3000", "--hold"))
	printed(t, "breach", "allocated 3000 MiB, 3000 MiB in all")
	condition(t, wire.IsolationCondition, corev1.ConditionTrue, "/breach/app")
	stated(t, accel.TierNone, accel.TierDriver)
	restore()
	must(t, lab.Pods.Delete(ctx, "breach"))
	stated(t, accel.TierDriver, accel.TierDriver)
	condition(t, wire.IsolationCondition, corev1.ConditionFalse, "")
	wholeDevice(t, ctx)
}

// attestedSince waits until the node has attested tier driver of all GPUs after a time, and fails if
// it states another one meanwhile.
func attestedSince(t *testing.T, ctx context.Context, since time.Time) {
	t.Helper()
	must(t, poll.Until(ctx, podTimeout, "the node to attest its tiers", func(ctx context.Context) error {
		all, err := lab.Node.Isolations(ctx, demos.GPUMemory)
		if err != nil {
			return err
		}
		for _, one := range all {
			if one.Memory != accel.TierDriver {
				return fmt.Errorf("%w: tier %q is stated", poll.ErrHopeless, one.Memory)
			}
			if one.Attested.Before(since) {
				return fmt.Errorf("last attested at %v", one.Attested)
			}
		}
		return nil
	}))
}

// wholeDevice checks that a container of whole GPUs gets them without a limit that its control group
// has from before, as the driver may keep that of a group that has ended. A script in the place of the
// hook sets such a limit, and runs the hook or does not.
func wholeDevice(t *testing.T, ctx context.Context) {
	t.Helper()
	const stale = `#!/bin/sh
state=$(cat)
printf %s "$state" | "$0.kept" $(for a in "$@"; do [ "$a" = --max ] && a=--hard-mib=1024; echo "$a"; done) || exit
`
	must(t, lab.Pods.Delete(ctx, "again", "calm"))
	for name, one := range map[string]struct{ script, printed string }{
		"inherits": {stale, "rejected 3072 MiB, 0 MiB in all: out of memory, code 2"},
		"whole":    {stale + `printf %s "$state" | "$0.kept" "$@"` + "\n", "allocated 3072 MiB, 3072 MiB in all"},
	} {
		restore := replaceHook(t, one.script)
		start(t, limitshost.Allocate(asking(name, demos.GPU, 2), "--mib", "3072", "--hold"))
		printed(t, name, one.printed)
		restore()
		must(t, lab.Pods.Delete(ctx, name))
	}
}

// beginLimits starts a test on cards of three vendors, of which NVIDIA's driver limits memory,
// and with tier driver configured for it. It returns the first GPU.
func beginLimits(t *testing.T) (context.Context, accel.DeviceID) {
	t.Helper()
	ctx := beginMixed(t)
	plain, err := lab.Cards(demos.Mixed)
	must(t, err)
	hardware, err := limitshost.SetUp(ctx, plain)
	if errors.Is(err, limitshost.ErrUnified) {
		t.Skip(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		must(t, errors.Join(lab.SetHardware(ctx, plain), limitshost.TearDown(ctx)))
	})
	must(t, err)
	must(t, lab.SetHardware(ctx, hardware))
	withValues(t, ctx, demos.LimitValues+",node.usage.enabled=true,node.usage.interval=5s")
	t.Cleanup(func() { must(t, lab.Pods.DeleteAll(context.WithoutCancel(ctx))) })
	return ctx, accel.DeviceID(hardware.Cards[0].UUID)
}

// chargedOnly checks that measured use is what the driver has charged to a container, where the list
// of processes has more of it, as of memory that another process has exported.
func chargedOnly(t *testing.T, ctx context.Context, name string, bytes uint64) {
	t.Helper()
	hardware, err := vendorsim.Read(filepath.Join(layout.DriverDir, vendorsim.TopologyName))
	must(t, err)
	hardware.Processes = []vendorsim.Process{{Card: 0, PID: pidOf(t, name), MemoryMiB: 700}}
	must(t, lab.SetHardware(ctx, hardware))
	measured(t, map[string]uint64{name: bytes})
	hardware.Processes = nil
	must(t, lab.SetHardware(ctx, hardware))
}

// showGroups lets the daemon see control groups of version 2, and waits until the tier is stated.
func showGroups(t *testing.T, ctx context.Context) {
	t.Helper()
	must(t, lab.Divvy.AddArgument(ctx, limitshost.Argument))
	stated(t, accel.TierDriver, accel.TierDriver)
}

// allocating returns a pod that allocates memory of the first GPU.
func allocating(name string, units int64, args ...string) *corev1.Pod {
	return limitshost.Allocate(asking(name, demos.GPUMemory, units), args...)
}

// printed waits until a pod has printed these lines, and no others.
func printed(t *testing.T, name string, lines ...string) {
	t.Helper()
	must(t, lab.Pods.WaitPrinted(t.Context(), podTimeout, name, "app", lines...))
}

// groupOf returns the control group of a pod's container.
func groupOf(t *testing.T, name string) string {
	t.Helper()
	pod, err := lab.Pods.API.Get(t.Context(), name, metav1.GetOptions{})
	must(t, err)
	group, err := limitshost.Group(pod)
	must(t, err)
	return group
}

// stated waits until the node states these tiers of its GPUs' memory.
func stated(t *testing.T, want ...accel.Tier) {
	t.Helper()
	must(t, lab.Node.WaitTiers(t.Context(), podTimeout, demos.GPUMemory, want...))
}

// replaceHook puts a script in the place of the hook; restore puts the hook back.
func replaceHook(t *testing.T, script string) (restore func()) {
	t.Helper()
	back, err := limitshost.ReplaceHook(script)
	must(t, err)
	return func() { must(t, back()) }
}
