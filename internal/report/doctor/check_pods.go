package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// settled is how long a pod may lack what the node writes, before that is a finding.
const settled = 20 * time.Second

func podObject(p *corev1.Pod) string { return "Pod " + p.Namespace + "/" + p.Name }

// Waits is why a pod waits, and what would admit it, as kubectl divvy why says it.
type Waits struct {
	Namespace, Name string
	// Code names the cause, and Problem describes it.
	Code, Problem string
	// Change is the cheapest change that admits the pod, and Commands carry it out; "" and none
	// where there is no such change.
	Change   string
	Commands []string
	// Passing is true where waiting helps.
	Passing bool
}

// codeIsolation is the code of pods that wait for an isolation that no node states.
const codeIsolation = "isolationNotStated"

// waiting are the pods that wait for what Divvy shares.
func (s *Snapshot) waiting() []*corev1.Pod {
	offered := s.offered()
	var out []*corev1.Pod
	for i := range s.Pods {
		p := &s.Pods[i]
		if p.Status.Phase == corev1.PodPending && p.DeletionTimestamp == nil && (len(asks(p, offered)) > 0 || s.Claims.usedBy(p)) &&
			p.Labels[labelPartOf] != partOf {
			out = append(out, p)
		}
	}
	return out
}

// checkWaiting reports the pods that wait for what Divvy shares.
func checkWaiting(s *Snapshot, f *findings) {
	for i := range s.Waiting {
		w := &s.Waiting[i]
		if w.Code == codeIsolation {
			continue // a check of its own
		}
		remedy, commands := "This command says more.", []string{"kubectl divvy why -n " + pool.Quote(w.Namespace) + " " +
			pool.Quote(w.Name)}
		if w.Change != "" {
			remedy, commands = "What would help: "+clean(w.Change)+".", w.Commands
		}
		f.add(Warning, "Pod "+w.Namespace+"/"+w.Name, "it waits: "+w.Problem, remedy, commands...).Transient = w.Passing
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
