package why

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/cause"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// bound explains a pod that has, or had, a node.
type bound struct {
	snapshot *Snapshot
	world    *world
	a        *ask
	e        *Explanation
}

// explainFailed explains a pod that has failed.
func (b *bound) explainFailed() {
	p, e := b.a.pod, b.e
	e.State = StateFailed
	c := Cause{Code: Unknown, Object: podText(p), Detail: "the pod failed", Evidence: evidence(p.Status.Reason, p.Status.Message)}
	switch reason := p.Status.Reason; {
	case reason == "TopologyAffinityError":
		c.Code = Topology
		c.Detail = fmt.Sprintf("kubelet on node %s rejected the pod, because its topology manager found no aligned resources",
			p.Spec.NodeName)
	case reason == "UnexpectedAdmissionError" || strings.HasPrefix(reason, "OutOf"):
		c.Code = RejectedByKubelet
		c.Detail = fmt.Sprintf("kubelet on node %s rejected the pod (%s)", p.Spec.NodeName, reason)
		b.explainBypass(&c)
	}
	if p.Spec.NodeName != "" {
		c.Nodes = []string{p.Spec.NodeName}
	}
	e.Causes = append(e.Causes, c)
	e.Waiting.Why = "a pod that failed does not start again"
	if c.Code == Unknown {
		return
	}
	if e.Owner != "" {
		e.Waiting.Why += "; " + e.Owner + " recreates it"
		return
	}
	r := remake{pod: p}
	e.Changes = []Change{{Kind: ChangeRequest, Text: "delete the pod, then create it again", Commands: r.replace(afresh(p))}}
}

// explainBypass says if a pod that kubelet rejected was not placed by the extender, or has the
// planned allocation of another pod.
func (b *bound) explainBypass(c *Cause) {
	p, a := b.a.pod, b.a
	if a.shared.Resource == "" {
		return
	}
	text := p.Annotations[wire.GrantAnnotation]
	g, err := wire.DecodeGrantUnverified(text)
	switch {
	case text == "":
		c.Code = ForeignBound
		c.Detail = fmt.Sprintf("the pod was bound to node %s without Divvy, which had no device with %d units free (%s)", p.Spec.NodeName,
			a.shared.Peak(), p.Status.Reason)
		c.Evidence = append([]string{"spec.schedulerName: " + p.Spec.SchedulerName, "no annotation " + wire.GrantAnnotation}, c.Evidence...)
		b.explainStorm(c)
		explainWiring(b.e, b.snapshot)
	case err != nil:
		c.Code, c.Detail = GrantInvalid, "the planned allocation of the pod cannot be read, and kubelet rejected the pod"
		c.Evidence = append(c.Evidence, err.Error())
	case g.Node != p.Spec.NodeName || g.Resource != a.shared.Resource || b.snapshot.eventOf(events.GrantInvalid.Reason, p) != "":
		c.Code = GrantInvalid
		c.Detail = fmt.Sprintf("the planned allocation of the pod is for %s on node %s, and not for this pod on node %s: it was copied or "+
			"edited, or signed with another key", g.Resource, g.Node, p.Spec.NodeName)
		c.Evidence = append(c.Evidence, evidence(b.snapshot.eventOf(events.GrantInvalid.Reason, p))...)
	}
}

// explainStorm counts the pods of the same controller that failed in the same way. Each is made
// again at once.
func (b *bound) explainStorm(c *Cause) {
	p := b.a.pod
	kind, name := controllerOf(p)
	if kind == "" {
		return
	}
	o := Owner{Kind: kind, Namespace: p.Namespace, Name: name}
	n := 0
	for _, other := range b.snapshot.podsOf(&o) {
		if other.Status.Phase == v1.PodFailed && other.Status.Reason == p.Status.Reason {
			n++
		}
	}
	if n < 2 {
		return
	}
	c.Detail += fmt.Sprintf("; %d pods of %s/%s failed so", n, kind, name)
	if slices.Contains([]string{kindDeployment, kindReplicaSet, kindStatefulSet}, kind) && named(p.Namespace, name) {
		stop := Change{Kind: ChangeRequest, Text: "stop it: scale " + kind + "/" + name + " to 0, and set the scheduler that serves Divvy",
			Commands: []string{kubectl("scale", "-n", p.Namespace, kind+"/"+name, "--replicas=0")}}
		stop.patches(kind, p.Namespace, name, patchMerge, nested(0, "spec", "replicas"))
		b.e.Changes = append(b.e.Changes, stop)
	}
}

// explainLost says if a pod that runs has lost a device.
func (b *bound) explainLost() {
	p := b.a.pod
	g, err := wire.DecodeGrantUnverified(p.Annotations[wire.GrantAnnotation])
	n := b.world.node(p.Spec.NodeName)
	if b.a.shared.Resource == "" || p.Status.Phase != v1.PodRunning || err != nil || n == nil || g.Node != n.Name {
		return
	}
	in := n.inventory(g.Resource)
	if in == nil {
		return // what is wrong with the node is no cause of the pod's
	}
	var lost []string
	for _, id := range g.Devices() {
		i := slices.IndexFunc(in.Shares, func(s accel.Share) bool { return s.ID == id })
		switch {
		case i < 0:
			lost = append(lost, fmt.Sprintf("device %s is gone", id))
		case in.Shares[i].Health.Unhealthy && !strings.HasPrefix(in.Shares[i].Health.Reason, accel.ReasonGivenOut):
			text := fmt.Sprintf("device %s is unhealthy", accel.IndexText(in.Shares[i].Index))
			if reason := in.Shares[i].Health.Reason; reason != "" {
				text += ": " + reason
			}
			lost = append(lost, text)
		}
	}
	if len(lost) == 0 {
		return
	}
	b.e.Causes = []Cause{{Code: DeviceLost, Object: podText(p), Nodes: []string{n.Name}, Detail: listed(lost, 3) + " on node " + n.Name,
		Evidence: evidence(b.snapshot.eventOf(events.DeviceUnhealthy.Reason, p))}}
	b.e.Changes = []Change{b.elsewhere()}
}

// elsewhere is the change that creates a pod again on another node. It is verified if the pod
// fits somewhere while it still holds what it has.
func (b *bound) elsewhere() Change {
	p := b.a.pod
	fresh := p.DeepCopy()
	fresh.Spec.NodeName, fresh.UID = "", ""
	again := b.world.newAsk(fresh)
	c := Change{Kind: ChangeRequest, Text: "create the pod again elsewhere"}
	if e := ownerText(p); e != "" {
		c.Text = "delete the pod; " + e + " creates it again"
		c.Commands = ofPod(p, "delete", "pod", "-n", p.Namespace, p.Name)
	} else {
		r := remake{pod: p}
		c.Commands = r.replace(afresh(p))
	}
	n, ok := b.world.admits(again, b.world.unhindered(again))
	if !ok {
		c.Text += ", once there is capacity"
		return c
	}
	c = b.world.placed(c, again, n, nil)
	c.Verified = c.Verified && len(b.world.unjudged(p)) == 0 && cause.ForeignScheduler(p.Spec.SchedulerName) == ""
	return c
}

// afresh are the operations that make a pod one that no scheduler has seen.
func afresh(p *v1.Pod) []operation {
	ops := []operation{{Op: "remove", Path: "/spec/nodeName"}}
	for _, key := range []string{wire.GrantAnnotation, wire.HeldAnnotation} {
		if _, has := p.Annotations[key]; has {
			ops = append(ops, operation{Op: "remove", Path: "/metadata/annotations/" + pointer(key)})
		}
	}
	return ops
}

// explainStarting explains a pod on its node that has not started.
func (b *bound) explainStarting() {
	p, e := b.a.pod, b.e
	e.State = StateStarting
	c := Cause{Code: StartingUp, Object: podText(p), Nodes: []string{p.Spec.NodeName},
		Detail: "it is on node " + p.Spec.NodeName + ", where kubelet starts it"}
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil && w.Reason != "PodInitializing" && w.Reason != "ContainerCreating" {
			c.Detail = fmt.Sprintf("it is on node %s, where container %s does not run yet: %s", p.Spec.NodeName, s.Name, w.Reason)
			c.Evidence = evidence(w.Reason, w.Message)
			break
		}
	}
	if message := b.snapshot.eventOf(events.ClaimNotPrepared.Reason, p); message != "" {
		c.Code, c.Detail = Claim, fmt.Sprintf("it is on node %s, where %s", p.Spec.NodeName, message)
	}
	for i := range b.snapshot.Events {
		if ev := &b.snapshot.Events[i]; ev.Type == v1.EventTypeWarning && isAbout(ev, p) {
			c.Evidence = append(c.Evidence, "event "+ev.Reason+": "+ev.Message)
		}
	}
	b.explainPoolStart(&c)
	e.Causes = []Cause{c}
	e.Waiting = Waiting{Helps: len(c.Evidence) == 0, Why: "the pod has its node; what kubelet reports must be fixed"}
	if e.Waiting.Helps {
		e.Waiting.Why = "kubelet is starting the pod"
	}
}
