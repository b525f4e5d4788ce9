package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// settled is how long a pod may wait, or lack what the node writes, before it is
// told.
const settled = 20 * time.Second

func podObject(p *corev1.Pod) string { return "Pod " + p.Namespace + "/" + p.Name }

// checkWaiting tells the pods that wait for what Divvy shares.
func checkWaiting(s *Snapshot, f *findings) {
	offered := s.offered()
	there := map[string]bool{}
	for i := range s.Nodes {
		for name, q := range s.Nodes[i].Status.Allocatable {
			if !q.IsZero() {
				there[string(name)] = true
			}
		}
	}
	for i := range s.Pods {
		p := &s.Pods[i]
		wants := asks(p, offered)
		if p.Status.Phase != corev1.PodPending || p.DeletionTimestamp != nil || len(wants) == 0 || p.Labels[labelPartOf] == partOf {
			continue
		}
		waits := s.Taken.Sub(p.CreationTimestamp.Time)
		c := condition(p, corev1.PodScheduled)
		switch {
		case p.Spec.NodeName != "":
			checkStarting(f, p, waits)
		case len(p.Spec.SchedulingGates) > 0:
			f.add(Warning, podObject(p), "its scheduling gate "+p.Spec.SchedulingGates[0].Name+" prevents scheduling",
				"The controller that set the gate must remove it.")
		case c == nil || c.Message == "":
			if waits > settled {
				f.add(Warning, podObject(p), fmt.Sprintf("no scheduler has processed it; its schedulerName is %q", p.Spec.SchedulerName),
					"Check whether that scheduler runs: kubectl get pods -n kube-system; kubectl get leases -n kube-system")
			}
		default:
			why, remedy := explain(c.Message, wants, there)
			f.add(Warning, podObject(p), why, remedy)
		}
	}
}

// explain says what a message of kube-scheduler means for a pod that wants these
// resources, of which some are there.
func explain(message string, wants []string, there map[string]bool) (why, remedy string) {
	why = "it is pending: " + message
	for _, name := range wants {
		if !there[name] {
			return fmt.Sprintf("it is pending: no node offers %s (%s)", name, message),
				"Label a node that has such devices, or add the resource to the value sharedResources; see the node checks."
		}
	}
	switch {
	case strings.Contains(message, "gcushare-scheduler/") || strings.Contains(message, "connection refused") ||
		strings.Contains(message, "context deadline exceeded"):
		return why, "kube-scheduler cannot reach the extender; see the checks extender and scheduler."
	case strings.Contains(message, "in one "):
		return why, "No single device has that much free memory; see kubectl divvy inspect. A request is never split across devices."
	case strings.Contains(message, "Insufficient "):
		return why, "All units are allocated; see kubectl divvy inspect. The pod starts when other pods end."
	case strings.Contains(message, "untolerated taint"), strings.Contains(message, "node affinity"),
		strings.Contains(message, "node selector"):
		return why, "Add the toleration or the node selector that the nodes with devices require."
	}
	return why, "Fix the problem that the message describes."
}

// startupLimit is how long a container may be about to start.
const startupLimit = 2 * time.Minute

// checkStarting tells what keeps a pod on its node from starting.
func checkStarting(f *findings, p *corev1.Pod, waits time.Duration) {
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		w := c.State.Waiting
		if w == nil || w.Reason == "PodInitializing" || w.Reason == "ContainerCreating" && waits < startupLimit {
			continue
		}
		f.add(Warning, podObject(p), fmt.Sprintf("container %s does not start: %s", c.Name, cmp.Or(w.Message, w.Reason)),
			fmt.Sprintf("See its events: kubectl describe pod %s -n %s", p.Name, p.Namespace))
		return
	}
}

func checkFailed(s *Snapshot, f *findings) {
	offered := s.offered()
	for i := range s.Pods {
		p := &s.Pods[i]
		if p.Status.Phase != corev1.PodFailed || len(asks(p, offered)) == 0 {
			continue
		}
		reason := p.Status.Reason
		if reason != "UnexpectedAdmissionError" && !strings.HasPrefix(reason, "OutOf") {
			continue
		}
		f.add(Warning, podObject(p), "node "+p.Spec.NodeName+" rejected it ("+reason+"): "+p.Status.Message,
			"The message gives the free capacity of the node; docs/troubleshooting.md lists the causes. A controller has already "+
				"replaced the pod; this command removes it.",
			"kubectl delete pod "+p.Name+" -n "+p.Namespace)
	}
}

// memoryInventories returns the inventories of memory by node and resource.
func memoryInventories(s *Snapshot) map[string]map[accel.Resource]accel.Inventory {
	memory := map[string]map[accel.Resource]accel.Inventory{}
	for i := range s.Nodes {
		all, err := inventory(&s.Nodes[i])
		if err != nil {
			continue // the check of inventories reports it
		}
		for _, in := range all {
			if in.Unit == "" {
				continue
			}
			if memory[s.Nodes[i].Name] == nil {
				memory[s.Nodes[i].Name] = map[accel.Resource]accel.Inventory{}
			}
			memory[s.Nodes[i].Name][in.Resource] = in
		}
	}
	return memory
}

// checkGrants compares the grants on pods with one another, with the nodes that
// they are on, and with what devices hold. Whether a grant is signed rightly the
// extender and the nodes decide.
func checkGrants(s *Snapshot, f *findings) {
	type device struct {
		node     string
		resource accel.Resource
		id       accel.DeviceID
	}
	granted := map[device]int64{}
	holders := map[device][]string{}
	memory := memoryInventories(s)
	for i := range s.Pods {
		p := &s.Pods[i]
		resources := memory[p.Spec.NodeName]
		if p.Spec.NodeName == "" || ended(p) || resources == nil {
			continue
		}
		requests, _ := kube.RequestsOf(p, slices.Sorted(maps.Keys(resources))) // mistakes have events of their own
		if len(requests) == 0 {
			continue
		}
		old := s.Taken.Sub(p.CreationTimestamp.Time) > settled && p.Status.Phase == corev1.PodRunning
		text, there := p.Annotations[wire.GrantAnnotation]
		grant, err := wire.DecodeGrantUnverified(text)
		switch {
		case !there && old:
			f.add(Warning, podObject(p), "it runs on node "+p.Spec.NodeName+", but the node has not reported its device",
				"See the log of divvy-node there: its signing key may differ from that of the extender.").Transient = true
			continue
		case !there:
			continue
		case err != nil:
			f.add(Warning, podObject(p), "its planned allocation cannot be parsed: "+err.Error(),
				"Another client wrote it; divvy-node replaces it when the pod holds units.").Transient = true
			continue
		case grant.Node != p.Spec.NodeName:
			f.add(Warning, podObject(p), fmt.Sprintf("its planned allocation is for node %s, but it runs on %s", grant.Node,
				p.Spec.NodeName),
				"Another client wrote it; divvy-node replaces it when the pod holds units.").Transient = true
			continue
		case !grant.Confirmed && old:
			f.add(Warning, podObject(p), "it runs, but divvy-node has not confirmed its allocation",
				"See the log of divvy-node on node "+p.Spec.NodeName+".").Transient = true
		}
		in, ok := resources[grant.Resource]
		if !ok {
			continue
		}
		if !slices.ContainsFunc(in.Shares, func(share accel.Share) bool { return share.ID == grant.Device }) {
			f.add(Warning, podObject(p), fmt.Sprintf("it holds device %s of node %s, which the node no longer has", grant.Device,
				grant.Node),
				"Its device is lost; see docs/health.md for what happens to its pods.")
			continue
		}
		k := device{grant.Node, grant.Resource, grant.Device}
		granted[k] += int64(min(grant.Units, accel.MaxUnits))
		holders[k] = append(holders[k], p.Namespace+"/"+p.Name)
	}
	for k, units := range granted {
		for _, share := range memory[k.node][k.resource].Shares {
			if share.ID == k.id && units > int64(share.Units) {
				f.add(Error, fmt.Sprintf("Node %s, device %s (%s)", k.node, accel.IndexText(share.Index), k.id),
					fmt.Sprintf("pods hold %d of %s on it, but it has only %d: %s", units, k.resource, share.Units, list(holders[k])),
					"Delete one of the pods. This happens if pods bypass the scheduler, because kubelet then allocates any free units.")
			}
		}
	}
}
