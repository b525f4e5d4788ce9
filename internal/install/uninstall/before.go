package uninstall

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/pool/secrets"
)

// before ends the programs and takes away what they left. The order is that in
// which nobody asks for what is not there any more.
func (u *uninstaller) before(ctx context.Context) error {
	if err := u.unwire(ctx); err != nil {
		return err
	}
	// A webhook without its server may refuse pods.
	u.remove(ctx, mutating, validating)
	u.end(ctx, daemonSet)
	stopped := time.Now()
	u.end(ctx, deployment)
	// Before the labels go by which these pods may have found their node.
	u.awaitHosts(ctx)
	u.cleanNodes(ctx)
	u.remove(ctx, lease, secret, configMap)
	if u.options.TokenCopies {
		u.removeCopies(ctx)
	}
	u.hold(ctx, stopped)
	return nil
}

// unwire waits until kube-scheduler asks nobody. Its error is that of a node that
// answers and where it still does: without the extender, pods that ask for shares
// would wait there for ever, so nothing else is taken away.
func (u *uninstaller) unwire(ctx context.Context) error {
	if u.options.SchedulerHook == "" {
		return nil
	}
	if name := u.options.SchedulerDaemon; name != "" {
		// It would wire kube-scheduler again.
		u.endAll(ctx, []object{{daemonSet, u.options.Namespace, name}})
	}
	u.out.say("kube-scheduler: removing the extender from its configuration")
	hook := u.options.SchedulerHook
	last, pending := u.awaitHook(ctx, hook, schedulerLimit)
	for _, node := range last.unreachable {
		u.out.remain(fmt.Sprintf("kube-scheduler on node %s, which does not respond: once it is back, it calls the extender for pods that "+
			"request memory", node),
			"on that node, run divvy-control schedconf uninstall, or copy /etc/kubernetes/kube-scheduler.back.yaml back to "+
				"/etc/kubernetes/manifests/kube-scheduler.yaml")
	}
	if pending != "" {
		return fmt.Errorf("kube-scheduler still calls the extender, so Divvy was not uninstalled: %s; see \"kubectl logs -n %s "+
			"daemonset/%s\", fix the problem and uninstall again; "+
			"\"helm uninstall --no-hooks\" uninstalls anyway", pending, u.options.Namespace, hook)
	}
	u.out.say("kube-scheduler: done on %d nodes", last.ready)
	return nil
}

// awaitHook waits until the pods of a hook's DaemonSet are done, for no longer than
// limit. It returns how far they are, and what is pending, "" for nothing.
func (u *uninstaller) awaitHook(ctx context.Context, hook string, limit time.Duration) (last hookState, pending string) {
	pending = u.out.wait(ctx, limit, func(ctx context.Context) (string, error) {
		var err error
		last, err = u.hookState(ctx, hook)
		if err != nil || last.done() {
			return "", err
		}
		return "pods of " + hook + ": " + last.String(), nil
	})
	return last, pending
}

type hookState struct {
	observed       bool
	desired, ready int
	// waiting are pods that are not ready, with the reason, on nodes that answer;
	// unreachable are nodes that do not and whose pod is not ready.
	waiting, unreachable []string
}

func (s hookState) done() bool {
	return s.observed && s.ready+len(s.unreachable) >= s.desired && len(s.waiting) == 0
}

func (s hookState) String() string {
	if !s.observed || s.desired > s.ready+len(s.unreachable)+len(s.waiting) {
		return "some do not exist yet"
	}
	return fmt.Sprintf("%d of %d are ready; %s", s.ready, s.desired, join(s.waiting))
}

// hookState looks at a DaemonSet of the chart's hooks. One that is not there is an
// error.
func (u *uninstaller) hookState(ctx context.Context, name string) (s hookState, err error) {
	var set *appsv1.DaemonSet
	var pods *corev1.PodList
	err = call(ctx, func(ctx context.Context) (err error) {
		if set, err = u.client.AppsV1().DaemonSets(u.options.Namespace).Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		pods, err = u.client.CoreV1().Pods(u.options.Namespace).List(ctx,
			metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(set.Spec.Selector)})
		return err
	})
	if err != nil {
		return s, fmt.Errorf("get daemonset %s/%s: %w", u.options.Namespace, name, err)
	}
	answering, err := u.answering(ctx)
	if err != nil {
		return s, err
	}
	s.observed = set.Status.ObservedGeneration >= set.Generation
	s.desired = int(set.Status.DesiredNumberScheduled)
	for i := range pods.Items {
		p := &pods.Items[i]
		node := nodeOf(p)
		switch {
		case p.DeletionTimestamp != nil:
		case !metav1.IsControlledBy(p, set): // of a run before this one, and about to go
		case node != "" && !answering[node]:
			s.unreachable = append(s.unreachable, node)
		case podReady(p):
			s.ready++
		default:
			s.waiting = append(s.waiting, fmt.Sprintf("%s on node %s (%s)", p.Name, node, podState(p)))
		}
	}
	return s, nil
}

// nodeOf is the node that a pod of a DaemonSet is on or meant for.
func nodeOf(p *corev1.Pod) string {
	if p.Spec.NodeName != "" || p.Spec.Affinity == nil || p.Spec.Affinity.NodeAffinity == nil ||
		p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return p.Spec.NodeName
	}
	for _, term := range p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, f := range term.MatchFields {
			if f.Key == metav1.ObjectNameField && len(f.Values) == 1 {
				return f.Values[0]
			}
		}
	}
	return ""
}

func podReady(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

func podState(p *corev1.Pod) string {
	for _, c := range p.Status.ContainerStatuses {
		switch {
		case c.State.Waiting != nil && c.State.Waiting.Reason != "":
			return c.State.Waiting.Reason
		case c.State.Running != nil:
			return "running, not completed"
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue && c.Message != "" {
			return c.Message
		}
	}
	return string(p.Status.Phase)
}

func (u *uninstaller) answering(ctx context.Context) (map[string]bool, error) {
	nodes, err := u.nodes(ctx)
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	for i := range nodes {
		out[nodes[i].Name] = nodeReady(&nodes[i])
	}
	return out, nil
}

func nodeReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// end deletes the objects of a kind and waits until their pods have ended.
func (u *uninstaller) end(ctx context.Context, kind string) {
	u.endAll(ctx, slices.DeleteFunc(slices.Clone(u.objects), func(o object) bool { return o.kind != kind }))
}

func (u *uninstaller) endAll(ctx context.Context, objects []object) {
	left := slices.Clone(objects)
	began := time.Now()
	stuck := map[object]string{} // on nodes that do not answer
	pending := u.out.wait(ctx, spared(ctx, workloadLimit), func(ctx context.Context) (string, error) {
		answering, err := u.answering(ctx)
		if err != nil {
			return "", err
		}
		var pending []string
		left = slices.DeleteFunc(left, func(o object) bool {
			state, err := u.endOne(ctx, o, answering)
			switch {
			case err != nil:
				pending = append(pending, err.Error())
			case state.gone:
				u.out.say("removed %s", o)
				return true
			case len(state.pods) == 0 && len(state.away) > 0 && time.Since(began) >= unreachableAfter:
				stuck[o] = join(state.away)
				return true
			default:
				pending = append(pending, fmt.Sprintf("%s: %s", o, state))
			}
			return false
		})
		return strings.Join(pending, "; "), nil
	})
	for o, pods := range stuck {
		u.out.remain(fmt.Sprintf("%s until nodes that do not respond are back or deleted: %s", o, pods), "")
	}
	for _, o := range left {
		u.out.remain(fmt.Sprintf("%s (%s)", o, pending), o.command())
	}
}

type endState struct {
	gone bool
	// pods are those that have not ended, on nodes that answer, and away those on
	// nodes that do not.
	pods, away []string
}

func (s endState) String() string {
	return "its pods are terminating: " + join(append(slices.Clone(s.pods), s.away...))
}

// endOne sees to it that a workload is being deleted, and looks for its pods. The
// object outlives them, so that they can be found by its selector.
func (u *uninstaller) endOne(ctx context.Context, o object, answering map[string]bool) (s endState, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var selector *metav1.LabelSelector
	var deleting bool
	remove := func(context.Context, string, metav1.DeleteOptions) error { return nil }
	if o.kind == daemonSet {
		api := u.client.AppsV1().DaemonSets(o.namespace)
		set, getErr := api.Get(ctx, o.name, metav1.GetOptions{})
		if err = getErr; err == nil {
			selector, deleting, remove = set.Spec.Selector, set.DeletionTimestamp != nil, api.Delete
		}
	} else {
		api := u.client.AppsV1().Deployments(o.namespace)
		set, getErr := api.Get(ctx, o.name, metav1.GetOptions{})
		if err = getErr; err == nil {
			selector, deleting, remove = set.Spec.Selector, set.DeletionTimestamp != nil, api.Delete
		}
	}
	if gone(err) {
		return endState{gone: true}, nil
	}
	if err == nil && !deleting {
		err = remove(ctx, o.name, metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationForeground)})
		if gone(err) {
			return endState{gone: true}, nil
		}
	}
	if err != nil {
		return s, fmt.Errorf("delete %s: %w", o, err)
	}
	pods, err := u.client.CoreV1().Pods(o.namespace).List(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(selector)})
	if err != nil {
		return s, fmt.Errorf("list pods of %s: %w", o, err)
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		name := fmt.Sprintf("%s on node %s", p.Name, nodeOf(p))
		if node := nodeOf(p); node != "" && !answering[node] {
			s.away = append(s.away, name)
		} else {
			s.pods = append(s.pods, name)
		}
	}
	return s, nil
}

func (u *uninstaller) remove(ctx context.Context, kinds ...string) {
	for _, o := range u.objects {
		if !slices.Contains(kinds, o.kind) {
			continue
		}
		err := u.out.insist(ctx, func(ctx context.Context) error { return u.deleteObject(ctx, o) })
		switch {
		case gone(err):
		case err != nil:
			u.out.remain(fmt.Sprintf("%s: %v", o, err), o.command())
		default:
			u.out.say("removed %s", o)
		}
	}
}

func (u *uninstaller) deleteObject(ctx context.Context, o object) error {
	var none metav1.DeleteOptions
	switch o.kind {
	case mutating:
		return u.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Delete(ctx, o.name, none)
	case validating:
		return u.client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Delete(ctx, o.name, none)
	case lease:
		return u.client.CoordinationV1().Leases(o.namespace).Delete(ctx, o.name, none)
	case secret:
		return u.client.CoreV1().Secrets(o.namespace).Delete(ctx, o.name, none)
	case configMap:
		return u.client.CoreV1().ConfigMaps(o.namespace).Delete(ctx, o.name, none)
	}
	return fmt.Errorf("%s cannot be deleted this way", o.kind)
}

// removeCopies deletes the copies of the pool's token. The token itself is the
// administrator's.
func (u *uninstaller) removeCopies(ctx context.Context) {
	removed := 0
	for _, name := range []string{pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret} {
		err := u.out.insist(ctx, func(ctx context.Context) error {
			// By name as well: no other secret may be listed.
			list, err := u.client.CoreV1().Secrets(metav1.NamespaceAll).List(ctx, metav1.ListOptions{
				LabelSelector: secrets.ManagedByLabel + "=" + secrets.ManagedBy, FieldSelector: metav1.ObjectNameField + "=" + name,
			})
			if err != nil {
				return err
			}
			for i := range list.Items {
				s := &list.Items[i]
				err := u.client.CoreV1().Secrets(s.Namespace).Delete(ctx, s.Name,
					metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &s.UID}})
				if err != nil && !gone(err) {
					return fmt.Errorf("in namespace %s: %w", s.Namespace, err)
				}
				removed++
			}
			return nil
		})
		if err != nil {
			u.out.remain(fmt.Sprintf("copies of the pool's secret %s: %v", name, err),
				fmt.Sprintf("kubectl delete secret -A -l %s=%s", secrets.ManagedByLabel, secrets.ManagedBy))
		}
	}
	u.out.say("removed %d copies of the pool's token", removed)
}

func (u *uninstaller) awaitHosts(ctx context.Context) {
	hook := u.options.NodeHook
	if hook == "" {
		return
	}
	last, pending := u.awaitHook(ctx, hook, spared(ctx, hostLimit))
	for _, node := range last.unreachable {
		u.out.remain(fmt.Sprintf("files on the host of node %s, which does not respond", node), "on that node, run divvy-node uninstall")
	}
	if pending != "" {
		u.out.remain("files on hosts ("+pending+")",
			fmt.Sprintf("see kubectl logs -n %s daemonset/%s, and run divvy-node uninstall on those "+
				"nodes", u.options.Namespace, hook))
		return
	}
	u.out.say("hosts of %d nodes are clean", last.ready)
}

// hold waits until the daemons have been away for some time, as far as the run has
// time left.
func (u *uninstaller) hold(ctx context.Context, stopped time.Time) {
	until := stopped.Add(u.options.Hold)
	if deadline, ok := ctx.Deadline(); ok && until.After(deadline.Add(-MinTimeout)) {
		until = deadline.Add(-MinTimeout)
	}
	if rest := time.Until(until); rest > 0 {
		u.out.say("waiting %v: kubelet keeps resources without a device plugin for five minutes; the second step continues from there",
			rest.Round(time.Second))
		select {
		case <-ctx.Done():
		case <-time.After(rest):
		}
	}
}
