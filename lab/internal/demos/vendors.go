package demos

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// The resources of MixedValues.
const (
	GPU       corev1.ResourceName = "nvidia.com/gpu"
	GPUMemory corev1.ResourceName = "nvidia.com/gpu-memory"
	IX        corev1.ResourceName = "iluvatar.com/gpu"
	IXMemory  corev1.ResourceName = "iluvatar.com/gpu-memory"
	GCU       corev1.ResourceName = "enflame.com/gcu"
	GCUMemory corev1.ResourceName = "enflame.com/gcu-memory"
)

// vendors plays the demo of three vendors.
type vendors struct {
	*Demo

	hardware vendorsim.Topology
	// life is the one of the daemon that nothing here may end.
	life string
}

// Vendors shows cards of three vendors behind one daemon. The daemon does not run
// yet: the node lacks the label Present.
func (s *Demo) Vendors(ctx context.Context) (err error) {
	v := &vendors{Demo: s}
	if v.hardware, err = v.Cards(Mixed); err != nil {
		return err
	}
	// The second board is plugged in later.
	if err := v.SetHardware(ctx, withoutBoard(v.hardware, "second")); err != nil {
		return err
	}
	return v.play(ctx, v.article, v.boards, v.wholeOrShared, v.labels, v.memory, v.lookBack)
}

// VendorsAtWork is the part of Vendors for a daemon that runs already.
func (s *Demo) VendorsAtWork(ctx context.Context) (err error) {
	v := &vendors{Demo: s}
	if v.hardware, err = v.Cards(Mixed); err != nil {
		return err
	}
	if v.life, err = v.Divvy.DaemonLife(ctx); err != nil {
		return err
	}
	return v.play(ctx, v.wholeOrShared, v.labels, v.memory, v.lookBack)
}

func (v *vendors) play(ctx context.Context, parts ...func(context.Context) error) error {
	for _, part := range parts {
		if err := part(ctx); err != nil {
			return err
		}
		if err := v.Pods.DeleteAll(ctx); err != nil {
			return err
		}
	}
	return nil
}

// withoutBoard returns the topology without the cards of a board.
func withoutBoard(t vendorsim.Topology, board string) vendorsim.Topology {
	t = t.Clone()
	t.Cards = slices.DeleteFunc(t.Cards, func(c vendorsim.Card) bool { return c.Board == board })
	return t
}

// article follows the steps of the article on NVIDIA's device plugin.
func (v *vendors) article(ctx context.Context) error {
	node := layout.NodeName
	v.Title("NVIDIA, step by step as in the article")
	v.Say(`The DaemonSet runs on nodes with the label nvidia.com/gpu.present=true, as the
GPU operator's does. This node has not got it yet, so nothing runs there.`)
	if _, err := v.Run(ctx, "get", "nodes", "-L", Present); err != nil {
		return err
	}
	desired, err := v.Run(ctx, "get", "daemonset", "divvy-node", "--namespace", product.Namespace,
		"--output", "custom-columns=NAME:.metadata.name,DESIRED:.status.desiredNumberScheduled,READY:.status.numberReady", "--no-headers")
	if err != nil {
		return err
	}
	v.Checks.Equal("pods of the DaemonSet", strings.Fields(desired), []string{"divvy-node", "0", "0"})
	if _, err := v.Run(ctx, "label", "node", node, Present+"=true"); err != nil {
		return err
	}
	if err := v.Divvy.Wait(ctx, configTimeout); err != nil {
		return err
	}
	if _, err := v.Run(ctx, "get", "nodes", "-L", Present); err != nil {
		return err
	}
	if _, err := v.Run(ctx, "get", "po", "--namespace", product.Namespace, "-l", "app.kubernetes.io/name=divvy-node"); err != nil {
		return err
	}
	if v.life, err = v.Divvy.DaemonLife(ctx); err != nil {
		return err
	}
	if _, err := v.Offer(ctx, GPU, 2); err != nil {
		return err
	}
	logs, err := v.Run(ctx, "logs", "daemonset/divvy-node", "--namespace", product.Namespace, "--tail", "20")
	if err != nil {
		return err
	}
	v.Checks.Contains("the daemon's log", logs, "nvidia.com/gpu")

	pod := v.Pods.New("test-gpu", testenv.Asking("training", GPU, 1, "sh", "-c",
		"echo NVIDIA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES; ls /dev | grep nvidia; sleep infinity"))
	pod.Labels = map[string]string{"test-gpu": "true"}
	if err := v.Start(ctx, pod); err != nil {
		return err
	}
	if _, err := v.Run(ctx, "get", "po", "-l", "test-gpu=true", "--namespace", v.Pods.Namespace); err != nil {
		return err
	}
	if _, err := v.Run(ctx, "logs", "test-gpu", "--tail", "10", "--namespace", v.Pods.Namespace); err != nil {
		return err
	}
	return v.sees(ctx, "test-gpu", vendorsim.NVIDIA, "NVIDIA_VISIBLE_DEVICES")
}

// sees checks that a pod sees one card of the vendor: the uuid or number in the
// variable and the node in /dev are of the same card.
func (v *vendors) sees(ctx context.Context, pod, vendor, variable string) error {
	sight, err := v.Pods.See(ctx, pod)
	if err != nil {
		return err
	}
	var want []string
	number := 0
	for _, c := range v.hardware.Cards {
		if c.Vendor != vendor {
			continue
		}
		if value := sight.Env[variable]; value == c.UUID || value == fmt.Sprint(number) {
			want = nodes(c)
		}
		number++
	}
	v.Checks.True(variable+" in "+pod+" names a card", want != nil, sight.Env[variable])
	v.Checks.Equal("cards in /dev of "+pod, sight.Nodes, want)
	return nil
}

// nodes are the device nodes of a container that has a card.
func nodes(c vendorsim.Card) []string {
	var minor int
	if c.Minor != nil {
		minor = *c.Minor
	}
	switch c.Vendor {
	case vendorsim.NVIDIA:
		return []string{"nvidia-uvm", "nvidia-uvm-tools", fmt.Sprint("nvidia", minor), "nvidiactl"}
	case vendorsim.Iluvatar:
		return []string{fmt.Sprint("iluvatar", minor), "itrctl"}
	default:
		return []string{fmt.Sprint("gcu", minor)}
	}
}

// boards shows the numbers of the README of Iluvatar's device plugin.
func (v *vendors) boards(ctx context.Context) error {
	choose := func(config string, want int64) error {
		if _, err := v.Run(ctx, "label", "node", layout.NodeName, testenv.ConfigLabel+"="+config, "--overwrite"); err != nil {
			return err
		}
		took, err := v.Offer(ctx, IX, want)
		if err != nil {
			return err
		}
		v.Tell("offered %.1f s after the label changed", took.Seconds())
		capacity, _, err := v.Node.Offered(ctx, IX)
		if err != nil {
			return err
		}
		v.Checks.Equal("Capacity, iluvatar.com/gpu", capacity, want)
		return nil
	}
	v.Title("Iluvatar: a board of two chips is one GPU")
	v.Say(`The node's label divvy.dev/config chooses a configuration: the files of the
README, as they are. They say what is offered of Iluvatar's cards; the daemon
reads them without being restarted.`)
	if err := choose("board", 1); err != nil {
		return err
	}
	if err := v.Start(ctx, v.One("corex-example", IX, 1)); err != nil {
		return err
	}
	sight, err := v.Pods.See(ctx, "corex-example")
	if err != nil {
		return err
	}
	v.Checks.Equal("cards in /dev of corex-example: both chips", sight.Nodes, []string{"iluvatar0", "iluvatar1", "itrctl"})
	v.Checks.Equal("both families of variables name the same", sight.Env["IX_VISIBLE_DEVICES"], sight.Env["ILUVATAR_COREX_VISIBLE_DEVICES"])
	v.Checks.Equal("chips that they name", len(strings.Split(sight.Env["IX_VISIBLE_DEVICES"], ",")), 2)
	if err := v.Pods.Delete(ctx, "corex-example"); err != nil {
		return err
	}

	v.Title("Iluvatar: the board split into its chips, splitboard: true")
	if err := choose("chips", 2); err != nil {
		return err
	}
	if err := v.Start(ctx, v.One("one-chip", IX, 1)); err != nil {
		return err
	}
	if err := v.sees(ctx, "one-chip", vendorsim.Iluvatar, "IX_VISIBLE_DEVICES"); err != nil {
		return err
	}
	if err := v.Pods.Delete(ctx, "one-chip"); err != nil {
		return err
	}

	v.Title("Iluvatar: a second board is plugged in")
	if err := v.SetHardware(ctx, v.hardware); err != nil {
		return err
	}
	took, err := v.Offer(ctx, IX, 4)
	if err != nil {
		return err
	}
	v.Tell("offered %.1f s after it was plugged in", took.Seconds())

	v.Title("Iluvatar: two boards with four replicas each")
	if err := choose("replicas", 8); err != nil {
		return err
	}
	if err := v.describe(ctx, "iluvatar.com/"); err != nil {
		return err
	}
	v.Title("Iluvatar: back to what the chart's values say")
	if _, err := v.Run(ctx, "label", "node", layout.NodeName, testenv.ConfigLabel+"-"); err != nil {
		return err
	}
	if _, err := v.Offer(ctx, IX, 2); err != nil {
		return err
	}
	life, err := v.Divvy.DaemonLife(ctx)
	if err != nil {
		return err
	}
	v.Checks.Equal("the daemon through all this", life, v.life)
	return nil
}

// wholeOrShared shows that a GCU is given out whole or by memory, never both.
func (v *vendors) wholeOrShared(ctx context.Context) error {
	v.Title("Enflame: a GCU whole, another by memory")
	v.Say(`Both resources are made of the same two cards of 16 GB. What one gives away is
withdrawn from the other.`)
	if _, err := v.Offer(ctx, GCUMemory, 32); err != nil {
		return err
	}
	if err := v.Start(ctx, v.One("whole", GCU, 1)); err != nil {
		return err
	}
	if err := v.sees(ctx, "whole", vendorsim.Enflame, "ENFLAME_VISIBLE_DEVICES"); err != nil {
		return err
	}
	if _, err := v.Offer(ctx, GCUMemory, 16); err != nil {
		return err
	}
	if err := v.Start(ctx, v.One("share", GCUMemory, 4)); err != nil {
		return err
	}
	if err := v.sees(ctx, "share", vendorsim.Enflame, "ENFLAME_VISIBLE_DEVICES"); err != nil {
		return err
	}
	if _, err := v.Offer(ctx, GCU, 1); err != nil {
		return err
	}
	if err := v.Pending(ctx, v.One("no-card-left", GCU, 1), "Insufficient enflame.com/gcu"); err != nil {
		return err
	}
	whole, err := v.Pods.See(ctx, "whole")
	if err != nil {
		return err
	}
	share, err := v.Pods.See(ctx, "share")
	if err != nil {
		return err
	}
	v.Checks.True("the two pods are on different cards", !slices.Equal(whole.Nodes, share.Nodes), fmt.Sprint(whole.Nodes, share.Nodes))
	if err := v.Pods.Delete(ctx, "no-card-left", "whole"); err != nil {
		return err
	}
	if _, err := v.Offer(ctx, GCUMemory, 32); err != nil {
		return err
	}
	if err := v.Pods.Delete(ctx, "share"); err != nil {
		return err
	}
	_, err = v.Offer(ctx, GCU, 2)
	return err
}

func (v *vendors) labels(ctx context.Context) error {
	v.Title("Labels of the node")
	wanted := map[string]string{
		"nvidia.com/gpu.present": "true", "nvidia.com/gpu.count": "2", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB",
		"nvidia.com/gpu.memory": "40960", "nvidia.com/cuda.driver-version.full": "550.54.15",
		"nvidia.com/cuda.runtime-version.full": "12.4",
		"iluvatar.com/gpu.present":             "true", "iluvatar.com/gpu.product": "BI-V150", "iluvatar.com/gpu.memory": "32768",
		"iluvatar.com/ix.driver-version.full": "4.2.0",
		"divvy.dev/nvidia.present":            "true", "divvy.dev/nvidia.count": "2",
		"divvy.dev/iluvatar.present": "true", "divvy.dev/iluvatar.count": "4", "divvy.dev/iluvatar.memory": "32768",
		"divvy.dev/enflame.present": "true", "divvy.dev/enflame.count": "2", "divvy.dev/enflame.model": "S60",
	}
	return v.Labelled(ctx, wanted)
}

// memory shares memory of all three vendors through the extender.
func (v *vendors) memory(ctx context.Context) error {
	v.Title("Memory of all three vendors, through the extender")
	v.Say(`More than one card has is refused, with the reason of that resource; what fits
shares a card, the fullest that has room.`)
	for name, units := range map[corev1.ResourceName]int64{GPUMemory: 80, IXMemory: 128, GCUMemory: 32} {
		if _, err := v.Offer(ctx, name, units); err != nil {
			return err
		}
	}
	for _, refused := range []struct {
		pod    string
		what   corev1.ResourceName
		amount int64
		reason string
	}{
		{"nvidia-41", GPUMemory, 41, "insufficient GPU Memory in one nvidia device"},
		{"iluvatar-33", IXMemory, 33, "insufficient GPU Memory in one iluvatar device"},
		{"enflame-17", GCUMemory, 17, "insufficient GCU Memory in one gcu device"},
	} {
		if err := v.Pending(ctx, v.One(refused.pod, refused.what, refused.amount), refused.reason); err != nil {
			return err
		}
		if err := v.Pods.Delete(ctx, refused.pod); err != nil {
			return err
		}
	}
	err := v.Start(ctx,
		v.One("nvidia-10", GPUMemory, 10), v.One("nvidia-30", GPUMemory, 30),
		v.One("iluvatar-20", IXMemory, 20), v.One("iluvatar-12", IXMemory, 12),
		v.One("enflame-4", GCUMemory, 4), v.One("enflame-12", GCUMemory, 12))
	if err != nil {
		return err
	}
	for _, pair := range []struct {
		vendor, variable string
		pods             [2]string
	}{
		{vendorsim.NVIDIA, "NVIDIA_VISIBLE_DEVICES", [2]string{"nvidia-10", "nvidia-30"}},
		{vendorsim.Iluvatar, "IX_VISIBLE_DEVICES", [2]string{"iluvatar-20", "iluvatar-12"}},
		{vendorsim.Enflame, "ENFLAME_VISIBLE_DEVICES", [2]string{"enflame-4", "enflame-12"}},
	} {
		var on [2]string
		for i, pod := range pair.pods {
			if err := v.sees(ctx, pod, pair.vendor, pair.variable); err != nil {
				return err
			}
			sight, err := v.Pods.See(ctx, pod)
			if err != nil {
				return err
			}
			on[i] = sight.Env[pair.variable]
		}
		v.Checks.Equal(pair.pods[0]+" and "+pair.pods[1]+" fill one card together", on[0], on[1])
	}
	// The first card of each vendor is in use by memory.
	for name, want := range map[corev1.ResourceName]int64{GPU: 1, IX: 1, GCU: 1} {
		if _, err := v.Offer(ctx, name, want); err != nil {
			return err
		}
	}
	if err := v.describe(ctx, ""); err != nil {
		return err
	}
	table, err := v.Run(ctx, "divvy", "inspect")
	if err != nil {
		return err
	}
	for _, pod := range []string{"nvidia-30", "iluvatar-20", "enflame-12"} {
		v.Checks.Contains("kubectl divvy inspect", table, pod)
	}
	return nil
}

// lookBack checks that the daemon of the first minute is still there.
func (v *vendors) lookBack(ctx context.Context) error {
	v.Title("One daemon, from the first minute to now")
	if _, err := v.Run(ctx, "get", "po", "--namespace", product.Namespace); err != nil {
		return err
	}
	life, err := v.Divvy.DaemonLife(ctx)
	if err != nil {
		return err
	}
	v.Checks.Equal("the daemon", life, v.life)
	return nil
}

// describe prints what kubectl describe node says of labels and resources, or
// only the lines with a text.
func (v *vendors) describe(ctx context.Context, only string) error {
	text, err := v.CLI.Kubectl(ctx, "describe", "node", layout.NodeName)
	if err != nil {
		return err
	}
	v.Say("$ kubectl describe node " + layout.NodeName + "\n" + excerpt(text, only))
	return nil
}

// excerpt keeps the sections of labels and resources of what kubectl describes,
// and of them the lines with a text.
func excerpt(text, only string) string {
	wanted := []string{"Name", "Labels", "Capacity", "Allocatable"}
	var kept []string
	keep := false
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if head, _, ok := strings.Cut(line, ":"); ok && !strings.HasPrefix(line, " ") {
			if keep = slices.Contains(wanted, head); !keep && (len(kept) == 0 || kept[len(kept)-1] != "...") {
				kept = append(kept, "...")
			}
			if keep && (only == "" || !strings.HasPrefix(head, "Labels") && !strings.HasPrefix(head, "Name")) {
				kept = append(kept, line)
			}
			continue
		}
		if keep && strings.Contains(line, only) {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "\n")
}
