package demos

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/dra"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// DRATopology is one of cards of three vendors with a MIG device. DRAValues go over MixedValues: a
// configuration both that divides the devices between pods with units and pods with claims, beside
// claims of MixedValues.
const (
	DRATopology = "mixed-mig.ini"
	DRAValues   = "dra.yaml"
)

// The examples that the demo uses have these pods.
const (
	wholePod = "claim-whole-gpu"
	chipsPod = "claim-two-chips"
)

// claims plays the demo of ResourceClaims.
type claims struct {
	*Demo

	hardware vendorsim.Topology
	life     string // of the daemon, which nothing here may end
	// pods are the lives of the containers, which nothing here may end either, and what they see.
	pods map[string]podState
}

// podState is what a pod is, and what its container has.
type podState struct {
	Container string
	Sight     testenv.Sight
}

// DRA shows devices of three vendors that claims and units have on one node, and the node's way to
// claims and back under running pods.
func (s *Demo) DRA(ctx context.Context) (err error) {
	c := &claims{Demo: s, pods: map[string]podState{}}
	if c.hardware, err = c.Cards(DRATopology); err != nil {
		return err
	}
	if c.life, err = c.Divvy.DaemonLife(ctx); err != nil {
		return err
	}
	for _, part := range []func(context.Context) error{
		c.units, c.divide, c.claimed, c.extended, c.translated, c.unhealthy, c.moved, c.movedBack, c.lookBack,
	} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

// units begins as before claims: with extended resources.
func (c *claims) units(ctx context.Context) error {
	c.Title("Extended resources, as before")
	c.Say(`Three NVIDIA GPUs, of which one is cut into a MIG device, two Iluvatar boards of two
chips, and two GCUs. allocationPath is plugin.`)
	for name, amount := range map[corev1.ResourceName]int64{GPU: 2, profile("3g.20gb"): 1, IXMemory: 128, GCUMemory: 32} {
		if _, err := c.Offer(ctx, name, amount); err != nil {
			return err
		}
	}
	if err := c.Start(ctx, c.One("units-6", GCUMemory, 6)); err != nil {
		return err
	}
	return c.has(ctx, "units-6", "gcu0")
}

// divide gives devices to claims, and keeps some for units.
func (c *claims) divide(ctx context.Context) error {
	c.Title("The node serves both: allocationPath both")
	c.Say(`The configuration divides the devices: GCU 0 is for units, GCU 1 and the devices of the
other vendors are for claims. The node's label chooses it, under the running pod.`)
	if err := c.choose(ctx, "both"); err != nil {
		return err
	}
	if err := c.published(ctx, map[string]int{"nvidia gpu": 2, "nvidia mig": 1, "iluvatar chip": 4, "enflame gcu": 1}); err != nil {
		return err
	}
	for name, amount := range map[corev1.ResourceName]int64{GPU: 0, IXMemory: 0, GCUMemory: 16} {
		if _, err := c.Offer(ctx, name, amount); err != nil {
			return err
		}
	}
	if _, err := c.Run(ctx, "get", "deviceclasses"); err != nil {
		return err
	}
	return c.undisturbed(ctx)
}

// claimed starts pods with claims of all vendors beside pods with units.
func (c *claims) claimed(ctx context.Context) error {
	c.Title("Claims of three vendors, beside units")
	for _, example := range []string{"nvidia-whole.yaml", "iluvatar-two-chips.yaml"} {
		if _, err := c.Run(ctx, "apply", "--namespace", c.Pods.Namespace, "--filename", c.CLI.Example("dra/"+example)); err != nil {
			return err
		}
	}
	for name, amount := range map[string]string{"gcu-10": "10Gi", "gcu-4": "4Gi"} {
		if err := c.claim(ctx, name, testenv.MemoryRequest(testenv.ClassGCU, amount)); err != nil {
			return err
		}
	}
	if err := c.claim(ctx, "mig", resourceapi.ExactDeviceRequest{DeviceClassName: testenv.ClassMIG, Selectors: []resourceapi.DeviceSelector{
		{CEL: &resourceapi.CELDeviceSelector{Expression: `device.attributes["nvidia.divvy.dev"].profile == "3g.20gb"`}},
	}}); err != nil {
		return err
	}
	if err := c.Start(ctx, c.One("units-10", GCUMemory, 10)); err != nil {
		return err
	}
	if err := c.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, wholePod, chipsPod, "gcu-10", "gcu-4", "mig"); err != nil {
		return err
	}
	for pod, device := range map[string]string{"units-6": "gcu0", "units-10": "gcu0", "gcu-10": "gcu1", "gcu-4": "gcu1"} {
		if err := c.has(ctx, pod, device); err != nil {
			return err
		}
	}
	sight, err := c.Pods.See(ctx, wholePod)
	if err != nil {
		return err
	}
	minor := c.minorOf(sight.Env["NVIDIA_VISIBLE_DEVICES"])
	c.Checks.True("the pod of a whole GPU has one", (minor == "0" || minor == "2") && slices.Contains(sight.Nodes, "nvidia"+minor) &&
		!slices.Contains(sight.Nodes, "nvidia1"), fmt.Sprint(sight))
	if sight, err = c.Pods.See(ctx, chipsPod); err != nil {
		return err
	}
	nodes := strings.Join(sight.Nodes, " ")
	boards := []string{"iluvatar0 iluvatar1 itrctl", "iluvatar2 iluvatar3 itrctl"}
	c.Checks.True("the two chips are of one board", slices.Contains(boards, nodes), nodes)
	if err := (&mig{Demo: c.Demo, hardware: c.hardware}).seesOne(ctx, "mig", "3g.20gb"); err != nil {
		return err
	}
	return c.inspect(ctx, "units-10", "/gcu-10 ", "/two-chips ", "10 GiB", "8 GiB")
}

// extended starts an old pod, which knows nothing of claims.
func (c *claims) extended(ctx context.Context) error {
	c.Title("An old pod that requests nvidia.com/gpu")
	c.Say(`No GPU is for units. The class gpu.nvidia.divvy.dev has the extended resource name
nvidia.com/gpu, so kube-scheduler makes a claim for the pod.`)
	if err := c.Start(ctx, c.One("old", GPU, 1)); err != nil {
		return err
	}
	pod, err := c.Pods.API.Get(ctx, "old", metav1.GetOptions{})
	if err != nil {
		return err
	}
	made := pod.Status.ExtendedResourceClaimStatus
	c.Checks.True("kube-scheduler made a claim for it", made != nil, fmt.Sprint(made))
	if made == nil {
		return nil
	}
	first, err := c.Pods.See(ctx, wholePod)
	if err != nil {
		return err
	}
	second, err := c.Pods.See(ctx, "old")
	if err != nil {
		return err
	}
	got, other := c.minorOf(second.Env["NVIDIA_VISIBLE_DEVICES"]), c.minorOf(first.Env["NVIDIA_VISIBLE_DEVICES"])
	c.Checks.True("the old pod has the other whole GPU", got != other && (got == "0" || got == "2") &&
		slices.Contains(second.Nodes, "nvidia"+got), fmt.Sprint(second))
	return c.inspect(ctx, "/"+made.ResourceClaimName+" ")
}

// translated starts an old pod with units of memory where units become claims.
func (c *claims) translated(ctx context.Context) error {
	c.Title("An old pod that requests units of memory")
	c.Say(`The namespace is labelled, so that its new pods get a claim in place of their units of
memory. The pods with units that run keep them.`)
	const name = "old-units"
	if _, err := c.Run(ctx, "label", "namespace", c.Pods.Namespace, wire.UnitsLabel+"="+wire.UnitsAsClaims); err != nil {
		return err
	}
	if err := c.Start(ctx, c.One(name, GCUMemory, 2)); err != nil {
		return err
	}
	pod, err := c.Pods.API.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	_, units := pod.Spec.Containers[0].Resources.Limits[GCUMemory]
	c.Checks.Equal(name+" has units", units, false)
	c.Checks.Contains("annotation "+wire.UnitsAnnotation, pod.Annotations[wire.UnitsAnnotation], `"units":2`)
	if err := c.has(ctx, name, "gcu1"); err != nil {
		return err
	}
	if len(pod.Status.ResourceClaimStatuses) != 1 {
		return fmt.Errorf("pod %s has %d claims, want 1", name, len(pod.Status.ResourceClaimStatuses))
	}
	if err := c.inspect(ctx, "/"+*pod.Status.ResourceClaimStatuses[0].ResourceClaimName+" ", "2 GiB"); err != nil {
		return err
	}
	if err := c.end(ctx, name); err != nil {
		return err
	}
	_, err = c.Run(ctx, "label", "namespace", c.Pods.Namespace, wire.UnitsLabel+"-")
	return err
}

// unhealthy breaks a device under its pods, and repairs it.
func (c *claims) unhealthy(ctx context.Context) error {
	c.Title("A GCU breaks, and recovers")
	c.Say(`GCU 1 is lost. Its device gets a taint, so no further claim gets it; pods that have it
stay. The pod late claims the 2 GiB that are left.`)
	gcu := slices.IndexFunc(c.hardware.Cards, func(card vendorsim.Card) bool {
		return card.Vendor == vendorsim.Enflame && card.Minor != nil && *card.Minor == 1
	})
	broken := c.hardware.Clone()
	broken.Cards[gcu].Lost = true
	if err := c.SetHardware(ctx, broken); err != nil {
		return err
	}
	if err := c.tainted(ctx, dra.UnhealthyTaint, 1); err != nil {
		return err
	}
	if err := c.claim(ctx, "late", testenv.MemoryRequest(testenv.ClassGCU, "2Gi")); err != nil {
		return err
	}
	if err := c.waits(ctx, "late", "has the taint divvy.dev/unhealthy=lost"); err != nil {
		return err
	}
	if err := c.inspect(ctx, "unhealthy=lost"); err != nil {
		return err
	}
	if err := c.SetHardware(ctx, c.hardware); err != nil {
		return err
	}
	if err := c.tainted(ctx, dra.UnhealthyTaint, 0); err != nil {
		return err
	}
	c.Checks.NoError("pod late runs", c.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "late"))
	if err := c.has(ctx, "late", "gcu1"); err != nil {
		return err
	}
	return c.undisturbed(ctx)
}

// moved moves the node to claims alone.
func (c *claims) moved(ctx context.Context) error {
	c.Title("The node moves to claims: allocationPath dra")
	c.Say(`All devices are for claims now. GCU 0 has a taint while pods have units of it, and the
extended resource falls to what they have.`)
	if err := c.choose(ctx, "claims"); err != nil {
		return err
	}
	all := map[string]int{"nvidia gpu": 2, "nvidia mig": 1, "iluvatar board": 2, "iluvatar chip": 4, "enflame gcu": 2}
	if err := c.published(ctx, all); err != nil {
		return err
	}
	if err := c.tainted(ctx, dra.InUseTaint, 1); err != nil {
		return err
	}
	if _, err := c.Offer(ctx, GCUMemory, 16); err != nil {
		return err
	}
	if err := c.claim(ctx, "moved", testenv.MemoryRequest(testenv.ClassGCU, "12Gi")); err != nil {
		return err
	}
	if err := c.waits(ctx, "moved", "has the taint divvy.dev/in-use-by-plugin"); err != nil {
		return err
	}
	if err := c.inspect(ctx, "in-use-by-plugin"); err != nil {
		return err
	}
	if err := c.undisturbed(ctx); err != nil {
		return err
	}
	c.Say("\nThe pods with units end. Their GCU is for claims then, and for no units.")
	if err := c.end(ctx, "units-6", "units-10"); err != nil {
		return err
	}
	c.Checks.NoError("pod moved runs", c.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "moved"))
	if err := c.has(ctx, "moved", "gcu0"); err != nil {
		return err
	}
	if err := c.tainted(ctx, dra.InUseTaint, 0); err != nil {
		return err
	}
	_, err := c.Offer(ctx, GCUMemory, 0)
	return err
}

// movedBack moves the node back to extended resources.
func (c *claims) movedBack(ctx context.Context) error {
	c.Title("And back: allocationPath plugin")
	c.Say(`The devices are withdrawn from claims at once. Those that claims have stay published
with a taint, and are not offered as extended resources before the pods have ended.`)
	if err := c.choose(ctx, ""); err != nil {
		return err
	}
	held := map[string]int{"nvidia gpu": 2, "nvidia mig": 1, "iluvatar chip": 2, "enflame gcu": 2}
	if err := c.published(ctx, held); err != nil {
		return err
	}
	free := 0
	devices, err := c.ClaimDevices(ctx)
	if err != nil {
		return err
	}
	for i := range devices {
		if !devices[i].HasTaint(dra.UnhealthyTaint) {
			free++
		}
	}
	c.Checks.Equal("devices that further claims get", free, 0)
	for name, amount := range map[corev1.ResourceName]int64{GPU: 0, profile("3g.20gb"): 0, IXMemory: 64, GCUMemory: 0} {
		if _, err := c.Offer(ctx, name, amount); err != nil {
			return err
		}
	}
	if err := c.inspect(ctx, "/two-chips ", "unhealthy=lost"); err != nil {
		return err
	}
	if err := c.undisturbed(ctx); err != nil {
		return err
	}
	if err := c.end(ctx, slices.Collect(maps.Keys(c.pods))...); err != nil {
		return err
	}
	kinds := "resourceclaims,resourceclaimtemplates"
	if _, err := c.Run(ctx, "delete", "--namespace", c.Pods.Namespace, kinds, "--all", "--wait"); err != nil {
		return err
	}
	for name, amount := range map[corev1.ResourceName]int64{GPU: 2, profile("3g.20gb"): 1, IXMemory: 128, GCUMemory: 32} {
		if _, err := c.Offer(ctx, name, amount); err != nil {
			return err
		}
	}
	return nil
}

func (c *claims) lookBack(ctx context.Context) error {
	c.Title("One daemon, from the first minute to now")
	life, err := c.Divvy.DaemonLife(ctx)
	if err != nil {
		return err
	}
	c.Checks.Equal("the daemon", life, c.life)
	return nil
}

// choose makes the node use a configuration, "" for that of all nodes.
func (c *claims) choose(ctx context.Context, name string) error {
	label := testenv.ConfigLabel + "=" + name
	if name == "" {
		label = testenv.ConfigLabel + "-"
	}
	_, err := c.Run(ctx, "label", "node", layout.NodeName, label, "--overwrite")
	return err
}

// claim creates a claim, and a pod of the same name that uses it.
func (c *claims) claim(ctx context.Context, name string, request resourceapi.ExactDeviceRequest) error {
	if err := c.Pods.Claim(ctx, name, request); err != nil {
		return err
	}
	if _, err := c.Pods.Create(ctx, c.Pods.Claiming(name, name)); err != nil {
		return err
	}
	what := "a device"
	if request.Capacity != nil {
		amount := request.Capacity.Requests[wire.MemoryCapacity]
		what = amount.String()
	}
	fmt.Fprintf(c.out, "pod %s claims %s of class %s\n", name, what, request.DeviceClassName)
	return nil
}

// waits checks that no device is free for the claim of a pod, and that why says what the claim lacks.
func (c *claims) waits(ctx context.Context, name, why string) error {
	pod, err := c.Pods.API.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	const text = "cannot allocate all claims"
	message, err := c.Pods.WaitEvent(ctx, podTimeout, pod, text)
	if err != nil {
		return err
	}
	c.Checks.Contains("the event of "+name, message, text)
	e, _, err := c.CLI.Explain(ctx, c.Pods.Namespace, name)
	if err != nil {
		return err
	}
	var said []string
	for _, cause := range e.Causes {
		said = append(said, cause.Detail)
	}
	c.Checks.Contains("kubectl divvy why "+name, strings.Join(said, "; "), why)
	return nil
}

// published checks how many devices of each "vendor type" are published, which it waits for.
func (c *claims) published(ctx context.Context, want map[string]int) error {
	var got map[string]int
	_ = poll.Until(ctx, configTimeout, "the devices for claims", func(ctx context.Context) error { // a difference, not the end
		got = map[string]int{}
		devices, err := c.ClaimDevices(ctx)
		for i := range devices {
			vendor, _, _ := strings.Cut(devices[i].Driver, wire.Driver(""))
			got[vendor+" "+ptr.Deref(devices[i].Attributes[wire.DeviceType].StringValue, "")]++
		}
		if err == nil && !reflect.DeepEqual(got, want) {
			err = fmt.Errorf("they are %v", got)
		}
		return err
	})
	if err := ctx.Err(); err != nil {
		return err
	}
	c.Checks.Equal("devices for claims", got, want)
	return nil
}

// tainted checks how many GCUs have a taint, which it waits for.
func (c *claims) tainted(ctx context.Context, key string, want int) error {
	var got int
	_ = poll.Until(ctx, configTimeout, "the taint "+key, func(ctx context.Context) error { // a difference, not the end
		got = 0
		devices, err := c.ClaimDevices(ctx)
		for i := range devices {
			if devices[i].Driver == wire.Driver(vendorsim.Enflame) && devices[i].HasTaint(key) {
				got++
			}
		}
		if err == nil && got != want {
			err = fmt.Errorf("%d have it", got)
		}
		return err
	})
	if err := ctx.Err(); err != nil {
		return err
	}
	c.Checks.Equal("GCUs with the taint "+key, got, want)
	return nil
}

// has checks the one GCU in a container.
func (c *claims) has(ctx context.Context, pod, node string) error {
	sight, err := c.Pods.See(ctx, pod)
	if err != nil {
		return err
	}
	c.Checks.Equal("devices in /dev of "+pod, sight.Nodes, []string{node})
	c.Checks.Equal("ENFLAME_VISIBLE_DEVICES in "+pod, "gcu"+sight.Env["ENFLAME_VISIBLE_DEVICES"], node)
	return nil
}

// minorOf is the number in the name of a GPU's device file, "" if there is no such GPU.
func (c *claims) minorOf(uuid string) string {
	for i := range c.hardware.Cards {
		if card := &c.hardware.Cards[i]; card.UUID == uuid && card.Minor != nil {
			return fmt.Sprint(*card.Minor)
		}
	}
	return ""
}

// inspect prints who has what, and checks that it names all of these.
func (c *claims) inspect(ctx context.Context, want ...string) error {
	table, err := c.Run(ctx, "divvy", "inspect")
	if err != nil {
		return err
	}
	for _, text := range want {
		c.Checks.Contains("kubectl divvy inspect", table, text)
	}
	return c.remember(ctx)
}

// states are the pods that run.
func (c *claims) states(ctx context.Context) (map[string]podState, error) {
	list, err := c.Pods.API.List(ctx, metav1.ListOptions{FieldSelector: "status.phase=Running"})
	if err != nil {
		return nil, err
	}
	now := map[string]podState{}
	for i := range list.Items {
		pod := &list.Items[i]
		sight, err := c.Pods.See(ctx, pod.Name)
		if err != nil {
			return nil, err
		}
		status := pod.Status.ContainerStatuses[0]
		life := fmt.Sprintf("%s, started again %d times", status.ContainerID, status.RestartCount)
		now[pod.Name] = podState{Container: life, Sight: sight}
	}
	return now, nil
}

// remember notes the pods that run beside those that are known.
func (c *claims) remember(ctx context.Context) error {
	now, err := c.states(ctx)
	if err != nil {
		return err
	}
	for name, state := range now {
		if _, known := c.pods[name]; !known {
			c.pods[name] = state
		}
	}
	return nil
}

// undisturbed checks that the pods that are known run as they did, with what they had.
func (c *claims) undisturbed(ctx context.Context) error {
	if err := c.remember(ctx); err != nil {
		return err
	}
	now, err := c.states(ctx)
	if err != nil {
		return err
	}
	for name, before := range c.pods {
		if !reflect.DeepEqual(now[name], before) {
			c.Checks.Equal("pod "+name, now[name], before)
		}
	}
	c.Checks.Equal("pods that run undisturbed", len(now), len(c.pods))
	return nil
}

// end ends pods.
func (c *claims) end(ctx context.Context, names ...string) error {
	slices.Sort(names)
	fmt.Fprintf(c.out, "pods %s end\n", strings.Join(names, ", "))
	for _, name := range names {
		delete(c.pods, name)
	}
	return c.Pods.Delete(ctx, names...)
}
