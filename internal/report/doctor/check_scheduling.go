package doctor

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

func checkExtender(s *Snapshot, f *findings) {
	r := s.Release()
	object := "Service " + r.Namespace + "/" + nameExtender
	if lookup(s.Objects.Services, r.Namespace, nameExtender) == nil {
		remedy, commands := s.restore(nameExtender)
		f.add(Error, object, "it is missing, so clients cannot find the extender", remedy, commands...)
		return
	}
	if s.readyEndpoints(r.Namespace, nameExtender) == 0 {
		f.add(Error, object, "it has no ready extender, so pods that request memory stay Pending",
			"Fix the problem reported for Deployment "+s.extenderWorkload()+
				"; the extender is ready once it has read all nodes and pods.").Transient = true
		return
	}
	for _, route := range []string{"healthz", "readyz", "version"} {
		answer, asked := s.Objects.Extender[route]
		if !asked || answer.OK {
			continue
		}
		f.add(Error, object, fmt.Sprintf("/%s does not respond through the API server: %s", route, cmp.Or(answer.Text, "no message")),
			fmt.Sprintf("See its log: kubectl logs deployment/%s -n %s. With hostNetwork, a firewall between the API server and the "+
				"extender's node must allow port %d.",
				s.extenderWorkload(), r.Namespace, portExtender)).Transient = true
		return
	}
}

// extenderWorkload is the Deployment that the extender is in.
func (s *Snapshot) extenderWorkload() string {
	if program(s.Release(), s.Deployments, nameExtender) == nil {
		return nameScheduler
	}
	return nameExtender
}

func checkScheduler(s *Snapshot, f *findings) {
	var schedulers []*corev1.Pod
	for i := range s.Pods {
		if p := &s.Pods[i]; isScheduler(p) && !ended(p) && p.DeletionTimestamp == nil {
			schedulers = append(schedulers, p)
		}
	}
	for _, p := range schedulers {
		if !kube.PodReady(p) && !beingStarted(p, s.Taken) {
			f.add(Error, "Pod "+p.Namespace+"/"+p.Name,
				"kube-scheduler is not ready, so no pod is scheduled unless another kube-scheduler is ready",
				fmt.Sprintf("See its log: kubectl logs %s -n %s", p.Name, p.Namespace)).Transient = true
		}
	}
	switch {
	case program(s.Release(), s.DaemonSets, nameSchedconf) != nil:
		checkWired(s, f, schedulers)
	case program(s.Release(), s.Deployments, nameScheduler) != nil:
		checkDedicated(s, f, schedulers)
	default:
		checkWiredByHand(f, schedulers)
	}
}

// controlPlane reports whether a node is one by its labels.
func controlPlane(n *corev1.Node) bool {
	_, now := n.Labels["node-role.kubernetes.io/control-plane"]
	_, before := n.Labels["node-role.kubernetes.io/master"]
	return now || before
}

// beingStarted reports whether kubelet has not had the time to ask a program that was
// started whether it is up: the manifest of kubeadm has kubelet wait for 10 s before it
// asks kube-scheduler, and between two times. divvy-schedconf asks by itself, so a
// kube-scheduler that was wired a moment ago works before its pod is ready.
func beingStarted(p *corev1.Pod, now time.Time) bool {
	since, patience := p.CreationTimestamp.Time, time.Duration(0)
	for _, c := range p.Status.ContainerStatuses {
		if ptr.Deref(c.Started, false) || c.State.Terminated != nil || c.State.Waiting != nil && c.RestartCount > 0 {
			return false
		}
		if c.State.Running != nil {
			since = c.State.Running.StartedAt.Time
		}
	}
	for _, c := range p.Spec.Containers {
		if probe := c.StartupProbe; probe != nil {
			// The first time comes within a period, and the answer is told after a while.
			patience = max(patience, time.Duration(probe.InitialDelaySeconds+2*probe.PeriodSeconds)*time.Second)
		}
	}
	return now.Sub(since) < patience
}

// checkWired looks at what divvy-schedconf has done.
func checkWired(s *Snapshot, f *findings, schedulers []*corev1.Pod) {
	d := program(s.Release(), s.DaemonSets, nameSchedconf)
	restart := fmt.Sprintf("kubectl rollout restart daemonset/%s -n %s", d.Name, d.Namespace)
	if len(schedulers) == 0 {
		f.add(Error, "control plane", "no kube-scheduler runs as a pod in "+kubeSystem+", so divvy-schedconf cannot configure it",
			"If the control plane is managed by your provider, set scheduler.mode=dedicated.")
		return
	}
	mark, problem := annotationWired, "this kube-scheduler does not call the extender"
	if _, replaces := argument(&d.Spec.Template.Spec, "replace-image"); replaces {
		mark, problem = annotationReplaced, "divvy-scheduler does not run in place of this kube-scheduler"
	}
	for _, p := range schedulers {
		if p.Annotations[mark] != "" {
			continue
		}
		if last := s.wiring(p.Spec.NodeName); last != nil && last.Reason == events.SchedulerRolledBack.Reason {
			f.add(Error, podObject(p), problem+": it was not healthy with the changed "+
				"configuration, which was rolled back: "+last.Message,
				"Fix the problem that the message describes; divvy-schedconf retries automatically, and immediately after a restart.",
				restart)
			continue
		}
		f.add(Error, podObject(p), problem+": its manifest lacks "+mark+
			", so divvy-schedconf has not configured it, has rolled it back, or the manifest was restored",
			fmt.Sprintf("Restart divvy-schedconf, which configures it. If the change is rolled back again, see the log: kubectl logs "+
				"daemonset/%s -n %s", d.Name, d.Namespace),
			restart).Transient = true
	}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if !controlPlane(n) ||
			slices.ContainsFunc(s.podsOf(d.Namespace, d.Spec.Selector), func(p *corev1.Pod) bool { return p.Spec.NodeName == n.Name }) {
			continue
		}
		f.add(Error, "Node "+n.Name, "it is a control-plane node, but divvy-schedconf does not run there to configure its kube-scheduler",
			"Change the values schedconf.nodeSelector and schedconf.tolerations so that they select it.").Transient = true
	}
}

// wiring is the last that divvy-schedconf said about the scheduler of a node.
func (s *Snapshot) wiring(node string) *corev1.Event {
	var last *corev1.Event
	for i := range s.Wiring {
		if e := &s.Wiring[i]; e.InvolvedObject.Name == node && (last == nil || last.LastTimestamp.Before(&e.LastTimestamp)) {
			last = e
		}
	}
	return last
}

// checkDedicated looks at the scheduler that Divvy brings along.
func checkDedicated(s *Snapshot, f *findings, schedulers []*corev1.Pod) {
	if !slices.ContainsFunc(s.webhooks(), func(w webhook) bool { return w.configuration == nameScheduler }) {
		remedy, commands := s.restore(nameScheduler)
		f.add(Error, "MutatingWebhookConfiguration "+nameScheduler, "it is missing, so pods that request memory go to the cluster's own "+
			"scheduler, which does not know the devices", remedy, commands...)
	}
	checkSkew(s, f)
	for _, p := range schedulers {
		if p.Annotations[annotationWired] != "" {
			f.add(Warning, "Pod "+p.Namespace+"/"+p.Name,
				"the cluster's own kube-scheduler still calls the extender, because of a previous scheduler.mode",
				"Run on its node: divvy-control schedconf uninstall")
		}
	}
}

// schedulerMinor finds the minor of Kubernetes in the image of a dedicated scheduler, of either
// form.
var schedulerMinor = regexp.MustCompile(`/divvy-scheduler-(1\.\d+)[:@]|/kube-scheduler:v?(1\.\d+)\.`)

// checkSkew compares the version of the dedicated scheduler with that of the API server, of which
// it may be one minor behind.
func checkSkew(s *Snapshot, f *findings) {
	d := program(s.Release(), s.Deployments, nameScheduler)
	server, err := version.ParseGeneric(s.Kubernetes)
	if err != nil {
		return // the check of the API server says so
	}
	for _, c := range d.Spec.Template.Spec.Containers {
		m := schedulerMinor.FindStringSubmatch(c.Image)
		if m == nil {
			continue
		}
		own, err := version.ParseGeneric(cmp.Or(m[1], m[2]))
		if err != nil || own.Minor() == server.Minor() || own.Minor()+1 == server.Minor() {
			continue
		}
		object := "Deployment " + d.Namespace + "/" + d.Name
		f.add(Error, object, fmt.Sprintf("its scheduler is of Kubernetes %s and the API server is of %d.%d; "+
			"Kubernetes supports a scheduler of the same minor or of the one before", own, server.Major(), server.Minor()),
			"Run helm upgrade, which selects the version, or change scheduler.minor or scheduler.image.tag if it is set. If no "+
				"divvy-scheduler exists for this version, upgrade Divvy or set scheduler.form=extender.")
	}
}

// checkWiredByHand looks for what can be seen of a configuration that an
// administrator has written.
func checkWiredByHand(f *findings, schedulers []*corev1.Pod) {
	if len(schedulers) == 0 {
		f.add(Unknown, "control plane", "no kube-scheduler runs as a pod in "+kubeSystem+", so its configuration cannot be checked",
			"If its configuration cannot be changed, set scheduler.mode=dedicated.")
		return
	}
	for _, p := range schedulers {
		_, config := argument(&p.Spec, "config")
		if !config && p.Annotations[annotationWired] == "" {
			f.add(Error, "Pod "+p.Namespace+"/"+p.Name,
				"this kube-scheduler has no configuration file (--config), so it does not call the extender",
				"Run on its node: divvy-control schedconf install; or set scheduler.mode=extender, which does so on every control-plane "+
					"node.")
		}
	}
}
