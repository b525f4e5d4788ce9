package demos

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// MIG is the topology of a whole GPU and two that are cut, and MIGValues the values that
// offer them by strategy mixed.
const (
	MIG       = "nvidia-mig.ini"
	MIGValues = "mig.yaml"
)

func profile(name string) corev1.ResourceName {
	return corev1.ResourceName("nvidia.com/mig-" + strings.ReplaceAll(name, "+", "."))
}

// mig plays the demo of MIG devices.
type mig struct {
	*Demo

	hardware vendorsim.Topology
	life     string // of the daemon, which nothing here may end
}

// MIG shows GPUs that are whole and cut on one node.
func (s *Demo) MIG(ctx context.Context) (err error) {
	m := &mig{Demo: s}
	if m.hardware, err = m.Cards(MIG); err != nil {
		return err
	}
	if m.life, err = m.Divvy.DaemonLife(ctx); err != nil {
		return err
	}
	for _, part := range []func(context.Context) error{m.offered, m.labels, m.pods, m.recut, m.xid, m.lookBack} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return m.Pods.DeleteAll(ctx)
}

// offered compares with the table of resources of NVIDIA's plugin for strategy mixed.
func (m *mig) offered(ctx context.Context) error {
	m.Title("What NVIDIA's plugin offers with mixed, and Divvy")
	m.Say(`GPU 0 is whole, GPU 1 is cut into seven MIG devices of 1g.5gb, GPU 2 into 3g.20gb,
2g.10gb and 1g.5gb.`)
	for _, want := range []struct {
		name   corev1.ResourceName
		amount int64
	}{{GPU, 1}, {profile("1g.5gb"), 8}, {profile("2g.10gb"), 1}, {profile("3g.20gb"), 1}} {
		if _, err := m.Offer(ctx, want.name, want.amount); err != nil {
			return err
		}
	}
	node, err := m.Node.Get(ctx)
	if err != nil {
		return err
	}
	var names []string
	for name, amount := range node.Status.Capacity {
		// Kubelet keeps a resource that is offered no more, with none of it.
		if strings.HasPrefix(string(name), "nvidia.com/") && !amount.IsZero() {
			names = append(names, string(name))
		}
	}
	slices.Sort(names)
	m.Checks.Equal("resources of NVIDIA's", names,
		[]string{"nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.10gb", "nvidia.com/mig-3g.20gb"})
	_, err = m.Run(ctx, "divvy", "inspect")
	return err
}

// labels compares with the labels of NVIDIA's GPU feature discovery.
func (m *mig) labels(ctx context.Context) error {
	m.Title("Labels, as GPU feature discovery writes them")
	const product = "NVIDIA-A100-SXM4-40GB"
	wanted := map[string]string{
		"nvidia.com/mig.capable": "true", "nvidia.com/mig.strategy": "mixed", "nvidia.com/gpu.product": product,
		"nvidia.com/mig-1g.5gb.count": "8", "nvidia.com/mig-1g.5gb.product": product + "-MIG-1g.5gb",
		"nvidia.com/mig-1g.5gb.slices.gi": "1", "nvidia.com/mig-1g.5gb.slices.ci": "1", "nvidia.com/mig-1g.5gb.replicas": "1",
		"nvidia.com/mig-2g.10gb.count": "1", "nvidia.com/mig-2g.10gb.slices.gi": "2",
		"nvidia.com/mig-3g.20gb.count": "1", "nvidia.com/mig-3g.20gb.slices.gi": "3", "nvidia.com/mig-3g.20gb.sharing-strategy": "none",
	}
	return m.Labelled(ctx, wanted)
}

// pods shows what containers get of each kind of device.
func (m *mig) pods(ctx context.Context) error {
	m.Title("Pods of each kind")
	if err := m.Start(ctx, m.One("whole", GPU, 1), m.One("seventh", profile("1g.5gb"), 1), m.One("large", profile("3g.20gb"),
		1)); err != nil {
		return err
	}
	whole, err := m.Pods.See(ctx, "whole")
	if err != nil {
		return err
	}
	m.Checks.Equal("NVIDIA_VISIBLE_DEVICES in whole", whole.Env["NVIDIA_VISIBLE_DEVICES"], m.hardware.Cards[0].UUID)
	m.Checks.Equal("cards in /dev of whole", whole.Nodes, []string{"nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidiactl"})
	for name, profile := range map[string]string{"seventh": "1g.5gb", "large": "3g.20gb"} {
		if err := m.seesOne(ctx, name, profile); err != nil {
			return err
		}
	}
	return m.Pending(ctx, m.One("second-large", profile("3g.20gb"), 1), "Insufficient nvidia.com/mig-3g.20gb")
}

// seesOne checks that a pod has one MIG device of the profile: its uuid, the node of its
// GPU, and those that give access to its two instances.
func (m *mig) seesOne(ctx context.Context, pod, profile string) error {
	sight, err := m.Pods.See(ctx, pod)
	if err != nil {
		return err
	}
	caps, err := m.Pods.Exec(ctx, pod, "app", "ls", "/dev/nvidia-caps")
	if err != nil {
		return err
	}
	uuid := sight.Env["NVIDIA_VISIBLE_DEVICES"]
	found := false
	for i, card := range m.hardware.Cards {
		for _, instance := range m.hardware.MIGInstances(i) {
			if instance.UUID != uuid {
				continue
			}
			found = true
			m.Checks.Equal("profile of the MIG device of "+pod, instance.Profile, profile)
			m.Checks.Equal("cards in /dev of "+pod, sight.Nodes,
				[]string{"nvidia-caps", "nvidia-uvm", "nvidia-uvm-tools", fmt.Sprint("nvidia", *card.Minor), "nvidiactl"})
			want := []string{fmt.Sprint("nvidia-cap", instance.Caps.GPUInstance), fmt.Sprint("nvidia-cap", instance.Caps.ComputeInstance)}
			slices.Sort(want)
			got := strings.Fields(caps)
			slices.Sort(got)
			m.Checks.Equal("/dev/nvidia-caps of "+pod, got, want)
		}
	}
	m.Checks.True("NVIDIA_VISIBLE_DEVICES in "+pod+" names a MIG device", found, uuid)
	return nil
}

// recut changes the MIG devices of a GPU while pods run on others.
func (m *mig) recut(ctx context.Context) error {
	m.Title("GPU 2 is cut otherwise while pods run")
	m.Say(`Its MIG devices of 2g.10gb and 1g.5gb are deleted and one of 4g.20gb is created; the
pod on 3g.20gb keeps its device.`)
	changed := m.hardware.Clone()
	devices := &changed.Cards[2].MIGDevices
	*devices = slices.DeleteFunc(*devices, func(d vendorsim.MIGDevice) bool { return d.Profile != "3g.20gb" })
	*devices = append(*devices, vendorsim.MIGDevice{Index: 1, Profile: "4g.20gb"})
	if err := m.SetHardware(ctx, changed); err != nil {
		return err
	}
	m.hardware = changed
	took, err := m.Offer(ctx, profile("4g.20gb"), 1)
	if err != nil {
		return err
	}
	m.Tell("offered %.1f s after it was created", took.Seconds())
	for name, amount := range map[corev1.ResourceName]int64{profile("1g.5gb"): 7, profile("2g.10gb"): 0, profile("3g.20gb"): 1, GPU: 1} {
		if _, err := m.Offer(ctx, name, amount); err != nil {
			return err
		}
	}
	if err := m.Start(ctx, m.One("new", profile("4g.20gb"), 1)); err != nil {
		return err
	}
	if err := m.seesOne(ctx, "new", "4g.20gb"); err != nil {
		return err
	}
	return m.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "whole", "seventh", "large")
}

// xid reports a critical error of one instance.
func (m *mig) xid(ctx context.Context) error {
	m.Title("An XID on one instance")
	m.Say("Only that MIG device is withdrawn; NVIDIA's plugin withdraws another one, or none.")
	changed := m.hardware.Clone()
	changed.Cards[1].MIGDevices[6].XID = vendorsim.XID{Code: 94, Number: 1}
	if err := m.SetHardware(ctx, changed); err != nil {
		return err
	}
	if _, err := m.Offer(ctx, profile("1g.5gb"), 6); err != nil {
		return err
	}
	if _, err := m.Offer(ctx, GPU, 1); err != nil {
		return err
	}
	if _, err := m.Run(ctx, "divvy", "inspect"); err != nil {
		return err
	}
	return m.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "whole", "seventh", "large", "new")
}

func (m *mig) lookBack(ctx context.Context) error {
	m.Title("One daemon, from the first minute to now")
	life, err := m.Divvy.DaemonLife(ctx)
	if err != nil {
		return err
	}
	m.Checks.Equal("the daemon", life, m.life)
	return nil
}
