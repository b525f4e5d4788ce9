package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/wire"
	"github.com/divvy-gpu/divvy/internal/kube"
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
			f.add(Warning, podObject(p), "its scheduling gate "+p.Spec.SchedulingGates[0].Name+" holds it back", "Whoever set the gate takes it away.")
		case c == nil || c.Message == "":
			if waits > settled {
				f.add(Warning, podObject(p), fmt.Sprintf("no scheduler has looked at it; it names %q", p.Spec.SchedulerName),
					"See whether that scheduler runs: kubectl get pods -n kube-system; kubectl get leases -n kube-system")
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
	why = "it waits: " + message
	for _, name := range wants {
		if !there[name] {
			return fmt.Sprintf("it waits: no node offers %s (%s)", name, message),
				"Label a node that has such devices, or add the resource to the value sharedResources; see the checks of nodes."
		}
	}
	switch {
	case strings.Contains(message, "gcushare-scheduler/") || strings.Contains(message, "connection refused") || strings.Contains(message, "context deadline exceeded"):
		return why, "kube-scheduler does not reach the extender: see the checks extender and scheduler."
	case strings.Contains(message, "in one "):
		return why, "No single device has so much free, though all together may: kubectl divvy inspect shows what each has. A request is never split over devices."
	case strings.Contains(message, "Insufficient "):
		return why, "All units are given out: kubectl divvy inspect shows to whom. It starts when pods end."
	case strings.Contains(message, "untolerated taint"), strings.Contains(message, "node affinity"), strings.Contains(message, "node selector"):
		return why, "Give the pod the toleration, or the node selector, that the nodes with devices ask for."
	}
	return why, "Do what the message says."
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
		f.add(Warning, podObject(p), "node "+p.Spec.NodeName+" refused it ("+reason+"): "+p.Status.Message,
			"Its message says what the node had; docs/troubleshooting.md lists the causes. A controller has made another in its place; this removes it.",
			"kubectl delete pod "+p.Name+" -n "+p.Namespace)
	}
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
	memory := map[string]map[accel.Resource]accel.Inventory{}
	for i := range s.Nodes {
		all, err := inventory(&s.Nodes[i])
		if err != nil {
			continue // told by the check of inventories
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
			f.add(Warning, podObject(p), "it runs on node "+p.Spec.NodeName+", and the node has not said which device it holds",
				"See the log of divvy-node there: its key of the grants may be another one than the extender's.").Transient = true
			continue
		case !there:
			continue
		case err != nil:
			f.add(Warning, podObject(p), "its grant cannot be read: "+err.Error(), "Somebody else has written it; divvy-node writes it anew when the pod holds units.").Transient = true
			continue
		case grant.Node != p.Spec.NodeName:
			f.add(Warning, podObject(p), fmt.Sprintf("its grant is for node %s, and it runs on %s", grant.Node, p.Spec.NodeName),
				"Somebody else has written it; divvy-node writes it anew when the pod holds units.").Transient = true
			continue
		case !grant.Confirmed && old:
			f.add(Warning, podObject(p), "it runs, and divvy-node has not confirmed its grant", "See the log of divvy-node on node "+p.Spec.NodeName+".").Transient = true
		}
		in, ok := resources[grant.Resource]
		if !ok {
			continue
		}
		if !slices.ContainsFunc(in.Shares, func(share accel.Share) bool { return share.ID == grant.Device }) {
			f.add(Warning, podObject(p), fmt.Sprintf("it holds device %s of node %s, which the node does not have any more", grant.Device, grant.Node),
				"Its device is lost: docs/health.md says what happens to pods then.")
			continue
		}
		k := device{grant.Node, grant.Resource, grant.Device}
		granted[k] += int64(min(grant.Units, accel.MaxUnits))
		holders[k] = append(holders[k], p.Namespace+"/"+p.Name)
	}
	for k, units := range granted {
		for _, share := range memory[k.node][k.resource].Shares {
			if share.ID == k.id && units > int64(share.Units) {
				f.add(Error, fmt.Sprintf("Node %s, device %d (%s)", k.node, share.Index, k.id),
					fmt.Sprintf("pods hold %d of %s on it, and it has %d: %s", units, k.resource, share.Units, list(holders[k])),
					"Delete one of the pods. It happens where pods bypass the scheduler; kubelet gave each what it had free.")
			}
		}
	}
}
