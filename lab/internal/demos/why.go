package demos

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/report/why"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// AdviceTimeout is how soon a pod must run after the command that admits it.
const AdviceTimeout = 30 * time.Second

// A reason is why a pod waits, and what admits it.
type reason struct {
	name string
	// say is what the demo says of it, prepare what it does before the pod is made, nil for
	// nothing, and undo what it does after.
	say           string
	prepare, undo func(context.Context) error
	// pod is the pod, or the one of a Deployment if deployed.
	pod      *corev1.Pod
	deployed bool
	code     why.Code
	kind     why.ChangeKind
}

// advice makes pods wait and carries out what Divvy prints for them.
type advice struct{ *Demo }

// Why shows ten pods that wait for ten reasons. Each is explained by why, fixed by the command
// that it prints, executed as it is printed, and runs within 30 s.
func (s *Demo) Why(ctx context.Context) error {
	a := &advice{s}
	for i, r := range a.reasons() {
		a.Title(fmt.Sprintf("%d. %s", i+1, r.name))
		if err := a.waits(ctx, r); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	a.Title("Capacity that is scattered")
	return a.defragment(ctx)
}

// reasons are ten, on one node with 8 cards of 16 GB.
func (a *advice) reasons() []reason {
	pod := func(units int64, change ...func(*corev1.Pod)) *corev1.Pod {
		p := a.One("train", product.Resource, units)
		for _, f := range change {
			f(p)
		}
		return p
	}
	annotated := func(key, value string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Annotations = map[string]string{key: value} }
	}
	kubectl := func(args ...string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := a.Run(ctx, args...)
			return err
		}
	}
	return []reason{
		{
			name: "Larger than any card", say: "20 GB fit on no card of 16 GB. They fit on two.",
			pod: pod(20), code: why.LargerThanDevice, kind: why.ChangeAnnotation,
		},
		{
			name: "Scattered capacity", say: "Each card has 7 GB free, together 56. The pod wants 16.",
			prepare: func(ctx context.Context) error { return a.fill(ctx, numCards, 9) },
			pod:     pod(16), code: why.NoDeviceFits, kind: why.ChangeEnd,
		},
		{
			name: "MiB instead of units", say: "A Deployment requests 12288 units and means MiB.",
			pod: pod(12288), deployed: true, code: why.UnitMismatch, kind: why.ChangeRequest,
		},
		{
			name: "A node that is cordoned", say: "An administrator has cordoned the node.",
			prepare: kubectl("cordon", layout.NodeName), undo: kubectl("uncordon", layout.NodeName),
			pod: pod(8), code: why.Cordoned, kind: why.ChangeNode,
		},
		{
			name: "A taint", say: "The node is for pods that tolerate its taint.",
			prepare: kubectl("taint", "node", layout.NodeName, "dedicated=infer:NoSchedule"),
			undo:    kubectl("taint", "node", layout.NodeName, "dedicated=infer:NoSchedule-"),
			pod:     pod(8), code: why.Taint, kind: why.ChangeAnnotation,
		},
		{
			name: "A label that no node has", say: "The node selector of the pod matches no node.",
			undo: kubectl("label", "node", layout.NodeName, "example.com/zone-"),
			pod:  pod(8, func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"example.com/zone": "b"} }),
			code: why.Selector, kind: why.ChangeNode,
		},
		{
			name: "No equal parts", say: "9 GB cannot be divided equally among 2 cards.",
			pod: pod(9, annotated(wire.CountAnnotation, "2")), code: why.NotDivisible, kind: why.ChangeAnnotation,
		},
		{
			name: "A tier that no card has", say: "The pod requires a limit in the driver, which GCUs have not.",
			pod: pod(8, annotated(wire.IsolationAnnotation, "driver")), code: why.IsolationNotStated, kind: why.ChangeAnnotation,
		},
		{
			name: "A policy that does not exist", say: "The pod requests a placement policy that does not exist.",
			pod: pod(8, annotated(wire.PolicyAnnotation, "tightest")), code: why.PolicyUnknown, kind: why.ChangeAnnotation,
		},
		{
			name: "A resource that is misspelt", say: "No node offers enflame.com/gcu-memroy.",
			pod:  a.One("train", "enflame.com/gcu-memroy", 8),
			code: why.Misspelt, kind: why.ChangeRequest,
		},
	}
}

// fill makes pods of so many units and waits until they run.
func (a *advice) fill(ctx context.Context, pods int, units int64) error {
	var all []*corev1.Pod
	for i := range pods {
		all = append(all, a.One("part-"+strconv.Itoa(i), product.Resource, units))
	}
	return a.Start(ctx, all...)
}

// waits shows one reason.
func (a *advice) waits(ctx context.Context, r reason) (err error) {
	a.Say(r.say)
	if r.prepare != nil {
		if err := r.prepare(ctx); err != nil {
			return err
		}
	}
	target := r.pod.Name
	if r.deployed {
		target = "deployment/" + r.pod.Name
		err = a.deploy(ctx, r.pod)
	} else {
		_, err = a.Pods.Create(ctx, r.pod)
	}
	if err != nil {
		return err
	}
	e, err := a.explained(ctx, target, r.code)
	if err != nil {
		return err
	}
	text, _ := a.Run(ctx, "divvy", "why", "--namespace", a.Pods.Namespace, target) // exit status 1: it waits
	a.Checks.Contains("why explains "+target, text, strings.TrimSuffix(e.Causes[0].Detail, "."))
	change, ok := testenv.Advised(&e, r.kind)
	found := fmt.Sprintf("%+v", e.Changes)
	if ok {
		found = change.Text
	}
	a.Checks.True(fmt.Sprintf("a verified change of kind %s has a command", r.kind), ok, found)
	if ok {
		a.Say("\nThe command as it is printed:")
		if err := a.CLI.CarryOut(ctx, a.out, change.Commands...); err != nil {
			return err
		}
		begun := time.Now()
		a.Checks.NoError(fmt.Sprintf("%s runs within %s", target, AdviceTimeout), a.run(ctx, r.pod.Name, r.deployed))
		a.Tell("after %.1f s", time.Since(begun).Seconds())
	}
	if r.deployed {
		if err := a.undeploy(ctx, r.pod.Name); err != nil {
			return err
		}
	}
	if r.undo != nil {
		_ = r.undo(ctx) // the command may have undone it
	}
	return a.Pods.DeleteAll(ctx)
}

// explained waits until why gives a cause, which it checks: kube-scheduler has to see the pod
// first.
func (a *advice) explained(ctx context.Context, target string, code why.Code) (why.Explanation, error) {
	var e why.Explanation
	err := poll.Until(ctx, podTimeout, target+" to wait because of "+string(code), func(ctx context.Context) error {
		var exit int
		var err error
		if e, exit, err = a.CLI.Explain(ctx, a.Pods.Namespace, target); err != nil {
			return err
		}
		if exit != 1 || e.State != why.StateWaits || len(e.Causes) == 0 || e.Causes[0].Code != code {
			return fmt.Errorf("exit status %d, state %s, causes %+v", exit, e.State, e.Causes)
		}
		return nil
	})
	return e, err
}

// run waits until the pod, or one of the Deployment, runs.
func (a *advice) run(ctx context.Context, name string, deployed bool) error {
	if !deployed {
		return a.Pods.WaitPhase(ctx, AdviceTimeout, corev1.PodRunning, name)
	}
	return poll.Until(ctx, AdviceTimeout, "deployment "+name+" to be available", func(ctx context.Context) error {
		d, err := a.Client.AppsV1().Deployments(a.Pods.Namespace).Get(ctx, name, metav1.GetOptions{})
		if err == nil && (d.Status.ObservedGeneration < d.Generation || d.Status.AvailableReplicas < 1 ||
			d.Status.UnavailableReplicas > 0) {
			err = fmt.Errorf("status %+v", d.Status)
		}
		return err
	})
}

// deploy makes a Deployment of one pod.
func (a *advice) deploy(ctx context.Context, pod *corev1.Pod) error {
	labels := map[string]string{"app": pod.Name}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: *pod.Spec.DeepCopy()}
	template.Spec.RestartPolicy = corev1.RestartPolicyAlways
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: pod.Name, Namespace: a.Pods.Namespace}, Spec: appsv1.DeploymentSpec{
		Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: template,
	}}
	_, err := a.Client.AppsV1().Deployments(d.Namespace).Create(ctx, d, metav1.CreateOptions{})
	return err
}

// undeploy deletes a Deployment and, before it, its pods.
func (a *advice) undeploy(ctx context.Context, name string) error {
	return a.Client.AppsV1().Deployments(a.Pods.Namespace).Delete(ctx, name, metav1.DeleteOptions{
		PropagationPolicy: ptr.To(metav1.DeletePropagationForeground)})
}

// Defragment shows a plan of moves for a pod that fits on no card though the sum is enough,
// executes its commands as they are printed, and the pod runs.
func (s *Demo) Defragment(ctx context.Context) error { return (&advice{s}).defragment(ctx) }

func (a *advice) defragment(ctx context.Context) error {
	a.Say("Seven cards are full but for 4 GB of card 0, and the last has a movable pod of 4 GB.")
	one := func(name string, units int64) *corev1.Pod { return a.One(name, product.Resource, units) }
	if err := a.Start(ctx, one("large", 12), one("gap", 4)); err != nil {
		return err
	}
	if err := a.fill(ctx, numCards-2, cardGB); err != nil {
		return err
	}
	if err := a.deploy(ctx, one("web", 4)); err != nil {
		return err
	}
	if err := a.run(ctx, "web", true); err != nil {
		return err
	}
	if err := a.Pods.Delete(ctx, "gap"); err != nil {
		return err
	}
	waiting := one("train", cardGB)
	if err := a.Pending(ctx, waiting, "in one "); err != nil {
		return err
	}
	plan, code, err := a.CLI.Defragment(ctx)
	if err != nil {
		return err
	}
	text, err := a.Run(ctx, "divvy", "simulate", "--defragment", "--from-cluster")
	if err != nil {
		return err
	}
	a.Checks.Contains("the plan", text, "1 move admits the waiting pod")
	a.Checks.True("the plan has one move and reaches its goal", code == 0 && plan.Reached && len(plan.Moves) == 1,
		fmt.Sprintf("exit status %d, %d moves", code, len(plan.Moves)))
	a.Say("\nThe commands as they are printed:")
	for _, move := range plan.Moves {
		if err := a.CLI.CarryOut(ctx, a.out, move.Commands...); err != nil {
			return err
		}
	}
	a.Checks.NoError(fmt.Sprintf("train runs within %s", AdviceTimeout), a.run(ctx, waiting.Name, false))
	a.Checks.NoError("web runs again", a.run(ctx, "web", true))
	if err := a.undeploy(ctx, "web"); err != nil {
		return err
	}
	return a.Pods.DeleteAll(ctx)
}
