package demos

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/hardware"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/limitshost"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// Values as helm's --set takes them, besides those of MixedValues.
const (
	// LimitValues are those with which the driver limits units of memory of NVIDIA's GPUs.
	LimitValues = "sharedResources[1].isolation=driver,node.vendors.nvidia.injection={cdi},node.vendors.nvidia.cdiDisableHooks={all}"
	// OveruseValues are those with which pods are evicted that use more memory than their
	// allocation.
	OveruseValues = "node.usage.enabled=true,node.usage.interval=5s,node.usage.overuse.contextAllowanceMiB.enflame=0," +
		"extender.eviction.enabled=true,extender.eviction.gracePeriod=30s"
)

// TwoPasses is how long a limit may be missing: two passes of the daemon.
const TwoPasses = 30 * time.Second

// Full is what a container prints that allocates 3 GiB and then 1 MiB of 3 GiB.
var Full = []string{"allocated 3072 MiB, 3072 MiB in all", "rejected 1 MiB, 3072 MiB in all: out of memory, code 2"}

// limits plays the demo of limits.
type limits struct {
	*Demo

	hardware vendorsim.Topology
	gpu      accel.DeviceID
}

// Limits shows limits in NVIDIA's driver, and what is done about overuse where a vendor's
// driver has none.
func (s *Demo) Limits(ctx context.Context) error {
	plain, err := s.Cards(Mixed)
	if err != nil {
		return err
	}
	l := &limits{Demo: s}
	if l.hardware, err = limitshost.SetUp(ctx, plain); err != nil {
		return err
	}
	l.gpu = accel.DeviceID(l.hardware.Cards[0].UUID)
	for _, part := range []func(context.Context) error{l.tier, l.shares, l.byHand, l.withoutHook, l.Overuse} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

// tier shows a node that can promise nothing, and one that can.
func (l *limits) tier(ctx context.Context) error {
	l.Title("A node states what it can prove")
	l.Say(`The administrator sets isolation: driver for nvidia.com/gpu-memory. This node has
control groups of version 1, on which the driver keeps no limits.`)
	if err := l.SetHardware(ctx, l.hardware); err != nil {
		return err
	}
	if err := l.Divvy.Reconfigure(ctx, nil, "--set", LimitValues+","+OveruseValues); err != nil {
		return err
	}
	if err := l.Divvy.Wait(ctx, configTimeout); err != nil {
		return err
	}
	if err := l.isolation(ctx, corev1.ConditionTrue, "control groups v2 are required"); err != nil {
		return err
	}
	picky := l.allocating("first", 3, "--mib", "3072", "--hold")
	picky.Annotations = map[string]string{wire.IsolationAnnotation: string(accel.TierDriver)}
	if err := l.Pending(ctx, picky, "isolation driver required, device states none"); err != nil {
		return err
	}
	l.Say(`
Now the daemon sees the lab's control groups of version 2. It installs the hook,
tries a limit of its own, and states the tier after a pass without a loss.`)
	if err := l.Divvy.AddArgument(ctx, limitshost.Argument); err != nil {
		return err
	}
	if err := l.Node.WaitTiers(ctx, offerTimeout, GPUMemory, accel.TierDriver, accel.TierDriver); err != nil {
		return err
	}
	l.Checks.NoError("pod first runs", l.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "first"))
	return ctx.Err()
}

// shares shows four pods on one GPU.
func (l *limits) shares(ctx context.Context) error {
	l.Title("Four pods on one GPU, 3 GiB each")
	l.Say(`Each allocates its 3 GiB. The pod greedy sets variables for more, and wants one MiB
more. A second process in half gets what the first has left.`)
	greedy := l.allocating("greedy", 3, "--mib", "3072", "--mib", "1", "--hold")
	greedy.Spec.Containers[0].Env = []corev1.EnvVar{
		{Name: "NVIDIA_GPU_MEMORY_LIMIT", Value: "40000"}, {Name: "NVIDIA_VISIBLE_DEVICES", Value: "all"},
		{Name: "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", Value: "0=40G"},
	}
	for _, pod := range []*corev1.Pod{
		greedy, l.allocating("half", 3, "--mib", "2000", "--hold"), l.allocating("last", 3, "--mib", "3072", "--hold"),
	} {
		if err := l.Start(ctx, pod); err != nil {
			return err
		}
	}
	for _, name := range []string{"first", "greedy", "half", "last"} {
		want := map[string][]string{"greedy": Full, "half": {"allocated 2000 MiB, 2000 MiB in all"}}[name]
		if want == nil {
			want = Full[:1]
		}
		l.Checks.NoError(fmt.Sprintf("pod %s: %s", name, strings.Join(want, ", then ")),
			l.Pods.WaitPrinted(ctx, podTimeout, name, "app", want...))
	}
	second, _ := l.Pods.Exec(ctx, "half", "app", limitshost.Allocator("--mib", "1072", "--mib", "1")...) // it fails when memory is rejected
	l.Checks.Equal("second process of half", strings.Split(second, "\n"),
		[]string{"allocated 1072 MiB, 1072 MiB in all", "rejected 1 MiB, 1072 MiB in all: out of memory, code 2"})
	table, err := l.Run(ctx, "divvy", "inspect", "--resource", string(GPUMemory), "--output", "wide")
	l.Checks.Equal("devices at tier driver", strings.Count(table, "driver/none"), 2)
	return err
}

// byHand shows a limit that is removed.
func (l *limits) byHand(ctx context.Context) error {
	l.Title("A limit that is removed by hand")
	pod, err := l.Pods.API.Get(ctx, "first", metav1.GetOptions{})
	if err != nil {
		return err
	}
	group, err := limitshost.Group(pod)
	if err != nil {
		return err
	}
	begun := time.Now()
	if err := limitshost.RemoveLimit(ctx, l.gpu, group); err != nil {
		return err
	}
	back := poll.Until(ctx, TwoPasses, "the limit", func(ctx context.Context) error {
		return limitshost.Limited(ctx, l.gpu, group, 3<<30)
	})
	l.Checks.NoError("the limit of first is back within two passes", back)
	l.Tell("after %.1f s", time.Since(begun).Seconds())
	message, err := l.Pods.WaitEvent(ctx, podTimeout, pod, "it is 3072 MiB again")
	if err != nil {
		return err
	}
	l.Checks.Contains("the event of first", message, "it is 3072 MiB again")
	if err := l.isolation(ctx, corev1.ConditionTrue, "/first/app was without its limit"); err != nil {
		return err
	}
	l.Say("\nThe device states no tier until the container that was without a limit has ended.")
	if err := l.Pods.DeleteAll(ctx); err != nil {
		return err
	}
	return l.isolation(ctx, corev1.ConditionFalse, "holds on all devices")
}

// withoutHook shows that all this can fail.
func (l *limits) withoutHook(ctx context.Context) error {
	l.Title("The same with the hook disabled")
	l.Say("The program that sets limits is replaced by one that does nothing. Pod breach may use\n2048 MiB, and allocates 3000.")
	restore, err := limitshost.ReplaceHook("#!/bin/sh\n")
	if err != nil {
		return err
	}
	if err := l.Start(ctx, l.allocating("breach", 2, "--mib", "3000", "--hold")); err != nil {
		return err
	}
	l.Checks.NoError("3000 MiB go through", l.Pods.WaitPrinted(ctx, podTimeout, "breach", "app", "allocated 3000 MiB, 3000 MiB in all"))
	if err := l.isolation(ctx, corev1.ConditionTrue, "/breach/app"); err != nil {
		return err
	}
	if err := restore(); err != nil {
		return err
	}
	if err := l.Pods.DeleteAll(ctx); err != nil {
		return err
	}
	return l.isolation(ctx, corev1.ConditionFalse, "holds on all devices")
}

// isolation checks the node's condition, which it waits for.
func (l *limits) isolation(ctx context.Context, status corev1.ConditionStatus, message string) error {
	found, err := l.Node.WaitCondition(ctx, podTimeout, wire.IsolationCondition, status, message)
	if err != nil {
		return err
	}
	l.Checks.Contains(fmt.Sprintf("condition %s, %s,", wire.IsolationCondition, status), found, message)
	return nil
}

// allocating returns a pod that allocates memory of the first GPU.
func (l *limits) allocating(name string, units int64, args ...string) *corev1.Pod {
	return limitshost.Allocate(l.One(name, GPUMemory, units), args...)
}

// Overuse shows what is done about a pod that uses more than its allocation where the driver
// has no limits, with OveruseValues: it is reported and then evicted, once its budget allows
// it, and no other.
func (s *Demo) Overuse(ctx context.Context) error {
	s.Title("A vendor without limits")
	s.Say("Pod greedy uses 6 GiB of a GCU, its allocation is 4. A budget forbids to evict it.")
	budgets := s.Client.PolicyV1().PodDisruptionBudgets(s.Pods.Namespace)
	selected := map[string]string{"budget": "greedy"}
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "greedy"}, Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: ptr.To(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: selected}}}
	if _, err := budgets.Create(ctx, budget, metav1.CreateOptions{}); err != nil {
		return err
	}
	spare := func(ctx context.Context) error {
		return budgets.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{FieldSelector: "metadata.name=greedy"})
	}
	defer spare(context.WithoutCancel(ctx)) //nolint:errcheck // it is deleted below
	greedy := s.One("greedy", GCUMemory, 4)
	greedy.Labels = selected
	if err := s.Start(ctx, greedy, s.One("modest", GCUMemory, 4)); err != nil {
		return err
	}
	before, err := s.onOneCard(ctx, map[string]int64{"greedy": 6 << 10, "modest": 4 << 10})
	if err != nil {
		return err
	}

	for _, text := range []string{"its allocation of enflame.com/gcu-memory is 4096 MiB", "PodDisruptionBudget"} {
		message, err := s.Pods.WaitEvent(ctx, podTimeout, before["greedy"], text)
		if err != nil {
			return err
		}
		s.Checks.Contains("an event of greedy", message, text)
	}
	const overusing = "/greedy/app on enflame device "
	if _, err := s.Node.WaitCondition(ctx, podTimeout, wire.OveruseCondition, corev1.ConditionTrue, overusing); err != nil {
		return err
	}
	now, err := s.Pods.API.Get(ctx, "greedy", metav1.GetOptions{})
	if err != nil {
		return err
	}
	s.Checks.True("greedy is not evicted against its budget", now.DeletionTimestamp == nil, testenv.Describe(now))
	if _, err := s.Run(ctx, "divvy", "inspect", "--usage", layout.NodeName); err != nil {
		return err
	}
	if err := spare(ctx); err != nil {
		return err
	}
	s.Checks.NoError("without the budget greedy goes", s.Pods.WaitGone(ctx, "greedy"))
	message, err := s.Pods.WaitEvent(ctx, podTimeout, before["greedy"], "the pod is evicted")
	if err != nil {
		return err
	}
	s.Checks.Contains("an event of greedy", message, "the pod is evicted")
	if _, err := s.Node.WaitCondition(ctx, podTimeout, wire.OveruseCondition, corev1.ConditionFalse, "no container"); err != nil {
		return err
	}
	modest, err := s.Pods.API.Get(ctx, "modest", metav1.GetOptions{})
	if err != nil {
		return err
	}
	s.Checks.True("modest is as before", modest.UID == before["modest"].UID && modest.DeletionTimestamp == nil &&
		modest.Status.Phase == corev1.PodRunning, testenv.Describe(modest))
	return nil
}

// onOneCard makes the first processes of pods on one GCU use so many MiB, and returns the pods.
func (s *Demo) onOneCard(ctx context.Context, uses map[string]int64) (map[string]*corev1.Pod, error) {
	idle := map[string]uint64{}
	for name := range uses {
		idle[name] = 0
	}
	on, err := s.WaitUsed(ctx, podTimeout, idle)
	if err != nil {
		return nil, err
	}
	cards, err := vendorsim.Read(hardware.Default.TopologyPath())
	if err != nil {
		return nil, err
	}
	pods := map[string]*corev1.Pod{}
	devices := map[accel.DeviceID]bool{}
	for name, mib := range uses {
		if pods[name], err = s.Pods.API.Get(ctx, name, metav1.GetOptions{}); err != nil {
			return nil, err
		}
		pid, err := s.Pods.PID(ctx, name)
		if err != nil {
			return nil, err
		}
		devices[on[name]] = true
		// Enflame's backend puts a prefix before the UUID.
		card := slices.IndexFunc(cards.Cards, func(c vendorsim.Card) bool { return strings.HasSuffix(string(on[name]), c.UUID) })
		cards.Processes = append(cards.Processes, vendorsim.Process{Card: card, PID: pid, MemoryMiB: mib})
	}
	s.Checks.Equal("cards that the pods are on", len(devices), 1)
	return pods, s.SetHardware(ctx, cards)
}
