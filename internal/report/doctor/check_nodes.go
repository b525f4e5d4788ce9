package doctor

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/version"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// enabledLabel chooses nodes, whatever vendor their devices are of.
const enabledLabel = "divvy.dev/enabled"

// chosen reports whether a DaemonSet's pods may run on a node, by its labels.
func chosen(d *appsv1.DaemonSet, n *corev1.Node) bool {
	template := &corev1.Pod{Spec: d.Spec.Template.Spec}
	match, err := nodeaffinity.GetRequiredNodeAffinity(template).Match(n)
	return err == nil && match
}

// wantedLabels are the keys of labels that a DaemonSet asks for.
func wantedLabels(d *appsv1.DaemonSet) []string {
	keys := map[string]bool{}
	for key := range d.Spec.Template.Spec.NodeSelector {
		keys[key] = true
	}
	if a := d.Spec.Template.Spec.Affinity; len(keys) == 0 && a != nil && a.NodeAffinity != nil &&
		a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		for _, term := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
			for _, e := range term.MatchExpressions {
				if e.Operator == corev1.NodeSelectorOpIn {
					keys[e.Key] = true
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(keys))
}

func checkNodeLabels(s *Snapshot, f *findings) {
	d := program(s.Release(), s.DaemonSets, nameNode)
	wanted := wantedLabels(d)
	some := false
	for i := range s.Nodes {
		n := &s.Nodes[i]
		object := "Node " + n.Name
		_, published := n.Annotations[wire.InventoryAnnotation]
		value, enabled := n.Labels[enabledLabel]
		if enabled && value != "true" && value != "false" {
			f.add(Warning, object, fmt.Sprintf("its label %s has the invalid value %q", enabledLabel, value), "Set it to true or false.",
				"kubectl label node "+n.Name+" "+enabledLabel+"=true --overwrite")
		}
		if chosen(d, n) {
			some = true
			if s.daemonOn(n.Name) != nil {
				continue
			}
			if taint, untolerated := corev1helpers.FindMatchingUntoleratedTaint(logr.Discard(), n.Spec.Taints,
				d.Spec.Template.Spec.Tolerations,
				func(t *corev1.Taint) bool {
					// Those that Kubernetes sets itself pods of a DaemonSet tolerate.
					return t.Effect != corev1.TaintEffectPreferNoSchedule && !strings.HasPrefix(t.Key, "node.kubernetes.io/")
				}, true); untolerated {
				f.add(Error, object, fmt.Sprintf("it is labelled, but divvy-node does not tolerate its taint %s", taint.ToString()),
					"Add a toleration to the value node.tolerations, or remove the taint.")
				continue
			}
			f.add(Error, object, "it is labelled, but divvy-node does not run on it",
				fmt.Sprintf("Find out why no pod is created: kubectl describe daemonset %s -n %s", d.Name, d.Namespace)).Transient = true
			continue
		}
		switch {
		case value == "false" && published && s.used(n):
			f.add(Warning, object, "its label "+enabledLabel+"=false excludes it from divvy-node, but its devices are or were recently "+
				"in use",
				"This command includes it again. To keep it excluded, drain the pods that use its devices; kubelet drops the resources "+
					"after 5 minutes.",
				"kubectl label node "+n.Name+" "+enabledLabel+"=true --overwrite")
		case value == "false": // said on purpose, and nothing uses it
		case published:
			f.add(Error, object, "it has annotations of divvy-node, but no label that selects it for divvy-node ("+strings.Join(wanted,
				", ")+")",
				"This command includes it again. To keep it excluded, set the label "+enabledLabel+"=false.",
				"kubectl label node "+n.Name+" "+choosing(wanted)+"=true --overwrite")
		case value == "true":
			f.add(Warning, object, fmt.Sprintf("its label %s=true has no effect: the value node.nodeSelector or node.affinity requires "+
				"other labels (%s)", enabledLabel, strings.Join(wanted, ", ")),
				"Set the required labels, or change the values.")
		}
	}
	if !some {
		f.add(Error, "DaemonSet "+d.Namespace+"/"+d.Name, "no node is selected to share its devices",
			"Label the nodes that have devices: kubectl label node NODE "+choosing(wanted)+"=true")
	}
}

// used reports whether pods on a node use what it published, or kubelet still
// counts it.
func (s *Snapshot) used(n *corev1.Node) bool {
	all, err := inventory(n)
	if err != nil {
		return false
	}
	names := map[string]bool{}
	for _, in := range all {
		names[string(in.Resource)] = true
		if amount(n.Status.Capacity, string(in.Resource)) > 0 {
			return true
		}
	}
	return slices.ContainsFunc(s.Pods, func(p corev1.Pod) bool {
		return p.Spec.NodeName == n.Name && !ended(&p) && len(asks(&p, names)) > 0
	})
}

// choosing is the label to give to a node.
func choosing(wanted []string) string {
	if len(wanted) == 0 || slices.Contains(wanted, enabledLabel) {
		return enabledLabel
	}
	return wanted[0]
}

func checkNodeReady(s *Snapshot, f *findings) {
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if s.daemonOn(n.Name) == nil {
			continue
		}
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
				f.add(Error, "Node "+n.Name, "it is not ready: "+c.Message, "Fix the node; see the log of its kubelet.")
			}
		}
	}
}

// healthyUnits are those of the devices that take pods.
func healthyUnits(in accel.Inventory) int64 {
	var n int64
	for _, share := range in.Shares {
		if !share.Health.Unhealthy {
			n += int64(share.Units)
		}
	}
	return n
}

func checkInventory(s *Snapshot, f *findings) {
	for i := range s.Nodes {
		n := &s.Nodes[i]
		daemon := s.daemonOn(n.Name)
		if daemon == nil || !kube.PodReady(daemon) {
			continue // told by the checks of labels and workloads
		}
		object := "Node " + n.Name
		again := "kubectl delete pod " + daemon.Name + " -n " + daemon.Namespace
		all, err := inventory(n)
		switch {
		case errors.Is(err, errNoInventory):
			f.add(Error, object, "its divvy-node is ready but has not published an inventory",
				"Restart divvy-node, which publishes the inventory.", again).Transient = true
			continue
		case err != nil:
			f.add(Error, object, "its annotation "+wire.InventoryAnnotation+" cannot be parsed: "+err.Error(),
				"Restart divvy-node, which publishes the inventory.", again).Transient = true
			continue
		}
		for _, in := range all {
			name := string(in.Resource)
			_, known := n.Status.Allocatable[corev1.ResourceName(name)]
			want, have := healthyUnits(in), amount(n.Status.Allocatable, name)
			switch {
			case !known && len(in.Shares) > 0:
				f.add(Error, object, "kubelet does not offer "+name+": the device plugin is not registered with it",
					"Restart divvy-node, which registers with kubelet again.", again).Transient = true
			case have < want:
				f.add(Error, object, fmt.Sprintf("kubelet offers %d of %s but divvy-node has %d: kubelet has lost the device plugin, or "+
					"has not reported yet", have, name, want),
					"Restart divvy-node, which registers with kubelet again.", again).Transient = true
			case have > want:
				f.add(Warning, object, fmt.Sprintf("kubelet offers %d of %s but divvy-node has published %d", have, name, want),
					"Restart divvy-node, which updates both.", again).Transient = true
			}
		}
	}
}

func checkDevices(s *Snapshot, f *findings) {
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if s.daemonOn(n.Name) == nil {
			continue
		}
		all, err := inventory(n)
		if err != nil {
			continue // told by the check of inventories
		}
		checkQuarantine(n, all, f)
		for _, in := range all {
			for _, share := range in.Shares {
				object := fmt.Sprintf("Node %s, device %s (%s)", n.Name, accel.IndexText(share.Index), share.ID)
				if share.Withheld > 0 {
					f.add(Warning, object, fmt.Sprintf("%d of its %d units of %s are withheld from new pods, because containers use more "+
						"of its memory than their allocations", share.Withheld, share.Units, in.Resource),
						"This command shows which (docs/usage.md). Raise their requests, or delete the pods.",
						"kubectl divvy inspect --usage "+n.Name)
				}
				if !share.Health.Unhealthy || !share.Health.Quarantined.IsZero() ||
					strings.HasPrefix(share.Health.Reason, accel.ReasonGivenOut) {
					continue
				}
				f.add(Warning, object,
					"no new pods are placed on it: "+share.Health.Reason,
					"See docs/health.md for the causes and how a device recovers.")
			}
		}
	}
}

// checkQuarantine names the devices in quarantine: the chips, not the boards.
func checkQuarantine(n *corev1.Node, all []accel.Inventory, f *findings) {
	object := "Node " + n.Name
	q, err := wire.DecodeQuarantine(n.Annotations[wire.QuarantineAnnotation])
	if err != nil {
		f.add(Warning, object, "its annotation "+wire.QuarantineAnnotation+" cannot be parsed: "+err.Error(),
			"Remove it; divvy-node writes it again.", "kubectl annotate node "+n.Name+" "+wire.QuarantineAnnotation+"-")
		return
	}
	for _, d := range q.Devices {
		here := slices.ContainsFunc(all, func(in accel.Inventory) bool {
			return slices.ContainsFunc(in.Shares, func(s accel.Share) bool {
				return s.ID == d.Device || s.Parent == d.Device ||
					s.Chips > 1
			})
		})
		remedy := "Repair or replace it (docs/quarantine.md), then release it with this command."
		if !here {
			remedy = "It is not on the node now. If it was replaced, this command removes it from the list."
		}
		f.add(Warning, fmt.Sprintf("%s, device %s (%s)", object, accel.IndexText(d.Index), d.Device),
			fmt.Sprintf("it is in quarantine since %s: %s", d.Since.Format(time.RFC3339), d.Reason), remedy,
			"kubectl divvy device release "+n.Name+" "+string(d.Device))
	}
}

func checkOtherPlugins(s *Snapshot, f *findings) {
	d := program(s.Release(), s.DaemonSets, nameNode)
	told := map[string]bool{}
	for i := range s.Pods {
		p := &s.Pods[i]
		if p.Labels[labelPartOf] == partOf || ended(p) || p.DeletionTimestamp != nil || !mountsPlugins(&p.Spec) {
			continue
		}
		owner, o := s.ownerOf(p), (*original)(nil)
		if owner != nil {
			o = originalOf(owner.Name)
		}
		if o == nil {
			o = originalOf(p.Name)
		}
		if o == nil || !o.plugin {
			continue
		}
		n := lookup(s.Nodes, "", p.Spec.NodeName)
		if n == nil || s.daemonOn(n.Name) == nil || !serves(n, o.vendor) {
			continue
		}
		object, command := "Pod "+p.Namespace+"/"+p.Name, "kubectl delete pod "+p.Name+" -n "+p.Namespace
		if owner != nil {
			object, command = "DaemonSet "+owner.Namespace+"/"+owner.Name, remove("daemonset", &owner.ObjectMeta)
		}
		if told[object] {
			continue
		}
		told[object] = true
		f.add(Error, object, fmt.Sprintf("another device plugin runs on node %s beside divvy-node, and both allocate the same devices "+
			"independently", n.Name),
			"Remove it in the order of docs/migrating.md, or exclude its nodes from Divvy with the label "+enabledLabel+"=false.", command)
	}
	// What serves a socket without being a known program is told by the daemon.
	for key, answer := range s.Objects.Readiness {
		if namespace, name, _ := strings.Cut(key, "/"); namespace == d.Namespace && strings.Contains(answer.Text, "another device plugin") {
			f.add(Error, "Pod "+namespace+"/"+name, answer.Text, "Remove the other device plugin; divvy-node then continues.")
		}
	}
}

// ownerOf returns the DaemonSet that made a pod.
func (s *Snapshot) ownerOf(p *corev1.Pod) *appsv1.DaemonSet {
	for _, o := range p.OwnerReferences {
		for i := range s.DaemonSets {
			if d := &s.DaemonSets[i]; o.Kind == "DaemonSet" && d.Namespace == p.Namespace && d.Name == o.Name {
				return d
			}
		}
	}
	return nil
}

// serves reports whether the node's daemon offers devices of the vendor.
func serves(n *corev1.Node, vendor *accel.Vendor) bool {
	if vendor == nil || n.Labels["divvy.dev/"+vendor.Name+".present"] == "true" {
		return true
	}
	all, err := inventory(n)
	return err == nil && slices.ContainsFunc(all, func(in accel.Inventory) bool {
		return vendor.Owns(string(in.Resource))
	})
}

// maxList is what kubelet takes as the list of a plugin's devices, in bytes:
// gRPC's default. Each unit takes its id and 13 bytes more.
const (
	maxList       = 4 << 20
	bytesPerEntry = 13
)

// listBytes is the size of the list of so many units of memory: ids are numbers
// in base 64.
func listBytes(units int64) int64 {
	var total int64
	width, of := int64(1), int64(64)
	for left := units; left > 0; left, width, of = left-of, width+1, of*64 {
		total += min(left, of) * (bytesPerEntry + width)
	}
	return total
}

func checkKubelet(s *Snapshot, f *findings) {
	server, serverErr := version.ParseGeneric(s.Kubernetes)
	config, configured := s.nodeConfig()
	for i := range s.Nodes {
		n := &s.Nodes[i]
		object := "Node " + n.Name
		if s.daemonOn(n.Name) == nil {
			continue
		}
		if v, err := version.ParseGeneric(n.Status.NodeInfo.KubeletVersion); err == nil {
			switch {
			case v.LessThan(minKubernetes):
				f.add(Error, object, fmt.Sprintf("its kubelet has version %s; Divvy requires %s", v, minKubernetes), "Upgrade kubelet.")
			case serverErr == nil && v.Minor() > server.Minor() && v.Major() == server.Major():
				f.add(Warning, object, fmt.Sprintf("its kubelet has version %s, newer than the API server's %s, which Kubernetes does "+
					"not support", v, server), "Upgrade the control plane first.")
			case serverErr == nil && v.Minor()+3 < server.Minor() && v.Major() == server.Major():
				f.add(Warning, object, fmt.Sprintf("its kubelet has version %s, more than three minor versions behind the API server's %s",
					v, server), "Upgrade kubelet.")
			}
		}
		all, err := inventory(n)
		if err != nil || !configured {
			continue // told by other checks
		}
		checkUnits(f, object, config, all)
	}
}

// checkUnits compares what the configuration asks for with what kubelet takes.
func checkUnits(f *findings, object string, config v1alpha1.NodeConfig, all []accel.Inventory) {
	for _, r := range config.Resources {
		if r.Mode != v1alpha1.ModeMemory {
			continue
		}
		i := slices.IndexFunc(all, func(in accel.Inventory) bool { return string(in.Resource) == r.Name })
		if i < 0 {
			continue
		}
		size := func(unit string) (units, bytes int64) {
			u, err := sharing.ParseMemoryUnit(unit)
			if err != nil {
				return 0, 0
			}
			for _, share := range all[i].Shares {
				units += int64(u.Units(share.MemoryBytes))
			}
			return units, listBytes(units)
		}
		units, bytes := size(r.MemoryUnit)
		if bytes <= maxList {
			continue
		}
		better := "a larger one"
		for _, unit := range slices.Backward(v1alpha1.MemoryUnits) {
			if _, b := size(unit); b > 0 && b <= maxList && unit != v1alpha1.SixthOfDevice { // another kind of amount
				better = "\"" + unit + "\""
				break
			}
		}
		f.add(Error, object, fmt.Sprintf("memoryUnit %q of %s is too small: %d units make a list of %d bytes, but kubelet accepts at "+
			"most %d", r.MemoryUnit, r.Name, units, bytes, maxList),
			"Set memoryUnit to "+better+" while no pod uses the resource.")
	}
}
