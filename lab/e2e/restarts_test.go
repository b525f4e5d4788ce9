//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// TestRestarts restarts every part under running pods: they keep their card and
// are not started again, the books agree within five seconds of everything
// being up, and new pods are served.
func TestRestarts(t *testing.T) {
	for _, restart := range lab.Restarts() {
		t.Run(strings.ReplaceAll(restart.Name, " ", "-"), func(t *testing.T) {
			ctx := begin(t, guide)
			shared := lab.Pods.New("shared", testenv.Container("a", 3), testenv.Container("b", 2))
			shared.Spec.InitContainers = []corev1.Container{testenv.Sidecar("side", 1)}
			if !strings.HasPrefix(restart.Name, string(cluster.Kubelet)) {
				// A kubelet that starts rejects a pod with a completed init container if no
				// plugin has registered by then: TestKubeletRestartWithCompletedInitContainers
				// is about the time that the daemon needs.
				shared.Spec.InitContainers = append(shared.Spec.InitContainers, testenv.Container("init", 7, "true"))
			}
			start(t, one("first", 8), shared, one("third", 12))
			on := cards(agree(t))
			alive := lives(t)

			must(t, restart.Do(ctx))
			up := time.Now()
			wantCards(t, on)
			t.Logf("the books agree %v after everything was up", time.Since(up).Round(10*time.Millisecond))
			undisturbed(t, alive)
			start(t, one("after", 2))
			agree(t)
			undisturbed(t, alive)
		})
	}
}

// TestChangesWhileAPartIsAway changes pods while a part cannot see it.
func TestChangesWhileAPartIsAway(t *testing.T) {
	t.Run("kubelet", func(t *testing.T) {
		ctx := begin(t, guide)
		start(t, one("stays", 4), one("goes", 8))
		must(t, lab.Cluster.Kill(ctx, cluster.Kubelet))
		must(t, lab.Client.CoreV1().Pods(namespace).Delete(ctx, "goes", metav1.DeleteOptions{}))
		comes := one("comes", 6)
		create(t, comes)
		must(t, lab.Cluster.Start(ctx, cluster.Kubelet))
		must(t, lab.Pods.WaitGone(ctx, "goes"))
		runningAfterBoot(t, comes)
		agree(t)
	})
	t.Run("extender", func(t *testing.T) {
		ctx := begin(t, guide)
		start(t, one("stays", 4), one("goes", 8))
		scaleExtender(t, ctx, 0)
		must(t, lab.Client.CoreV1().Pods(namespace).Delete(ctx, "goes", metav1.DeleteOptions{}))
		must(t, lab.Pods.WaitGone(ctx, "goes"))
		byHand := one("by-hand", 6)
		byHand.Spec.NodeName = layout.NodeName
		start(t, byHand)
		waits := create(t, one("waits", 2))[0]

		// A person still sees who holds what.
		// The containers of the one that goes end a moment after it is gone.
		must(t, poll.Until(ctx, agreeTimeout, "inspect to show what is held", func(ctx context.Context) error {
			text, err := lab.CLI.Kubectl(ctx, "divvy", "inspect", "--output", "json")
			if err != nil {
				return err
			}
			if node, err := audit.ParseReport([]byte(text)); err != nil || node.Used != 10 || node.Total != 128 {
				return fmt.Errorf("without the extender, inspect's JSON is wrong (%w):\n%s", err, text)
			}
			return nil
		}))
		table, err := lab.CLI.Kubectl(ctx, "divvy", "inspect")
		must(t, err)
		for _, want := range []string{layout.NodeName, "stays", "by-hand", "10", "128"} {
			if !strings.Contains(table, want) {
				t.Errorf("without the extender, kubectl divvy inspect does not show %q:\n%s", want, table)
			}
		}
		_, err = lab.Pods.WaitEvent(ctx, podTimeout, waits, "gcushare-scheduler/filter")
		must(t, err)

		scaleExtender(t, ctx, 1)
		running(t, "waits")
		wantCards(t, map[string]int{"stays": 0, "by-hand": 0, "waits": 0})
	})
	t.Run("divvy-node", func(t *testing.T) {
		ctx := begin(t, guide)
		start(t, one("stays", 4), one("goes", 8))
		alive := lives(t)
		stopDaemon(t, ctx)
		must(t, lab.Client.CoreV1().Pods(namespace).Delete(ctx, "goes", metav1.DeleteOptions{}))
		must(t, lab.Pods.WaitGone(ctx, "goes"))
		must(t, emptiedBut(ctx, 4))
		startDaemon(t, ctx)
		delete(alive, "goes/app")
		wantCards(t, map[string]int{"stays": 0})
		undisturbed(t, alive)
		must(t, offered(ctx, guide))
		start(t, one("comes", 8))
		wantCards(t, map[string]int{"stays": 0, "comes": 0})
	})
}

// runningAfterBoot waits until a pod runs that kubelet first sees when it starts. Kubelet
// rejects it if no plugin has registered by then; as its controller would, this creates
// another one.
func runningAfterBoot(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	must(t, poll.Until(t.Context(), podTimeout, "pod "+pod.Name+" to run", func(ctx context.Context) error {
		now, err := lab.Pods.API.Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil || now.Status.Phase == corev1.PodRunning {
			return err
		}
		if strings.Contains(now.Status.Message, "no healthy devices present") {
			if err := lab.Pods.Delete(ctx, pod.Name); err != nil {
				return err
			}
			if _, err := lab.Pods.Create(ctx, pod); err != nil {
				return err
			}
		}
		return errors.New(testenv.Describe(now))
	}))
}

// emptiedBut waits until inspect shows so many units in use: while the daemon is
// away nobody says when the containers end of a pod that was deleted by force, so its
// units count for some seconds more than its grace period.
func emptiedBut(ctx context.Context, units int64) error {
	return poll.Until(ctx, 3*agreeTimeout, fmt.Sprintf("inspect to show %d units in use", units), func(ctx context.Context) error {
		node, err := auditor.Inspect(ctx)
		if err == nil && node.Used != units {
			err = errors.New("it shows " + uses(node))
		}
		return err
	})
}

// scaleExtender stops or starts the extender, and starts it again at the end.
func scaleExtender(t *testing.T, ctx context.Context, replicas int32) {
	t.Helper()
	scale := func(ctx context.Context, replicas int32) error {
		patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas)
		_, err := lab.Client.AppsV1().Deployments(product.Namespace).Patch(ctx, testenv.Extender, types.MergePatchType, patch,
			metav1.PatchOptions{})
		if err != nil {
			return err
		}
		if replicas > 0 {
			return lab.Divvy.Wait(ctx, settingTimeout)
		}
		return poll.Until(ctx, podTimeout, "the extender to be gone", func(ctx context.Context) error {
			pods, err := lab.Divvy.Pods(ctx, testenv.Extender)
			if err == nil && len(pods) > 0 {
				err = errors.New("it is still there")
			}
			if err == nil && lab.Divvy.Answers(ctx) == nil {
				err = errors.New("it still answers")
			}
			return err
		})
	}
	if replicas == 0 {
		t.Cleanup(func() {
			if err := scale(context.WithoutCancel(ctx), 1); err != nil {
				t.Errorf("start the extender again: %v", err)
			}
		})
	}
	must(t, scale(ctx, replicas))
}

// daemonSelector is what keeps the daemon away while it is set.
const daemonSelector = `{"spec":{"template":{"spec":{"nodeSelector":{"divvy-e2e/away":%s}}}}}`

// stopDaemon takes divvy-node off the node, and brings it back at the end.
func stopDaemon(t *testing.T, ctx context.Context) {
	t.Helper()
	t.Cleanup(func() { startDaemon(t, context.WithoutCancel(ctx)) })
	must(t, selectDaemon(ctx, `"true"`))
	must(t, poll.Until(ctx, podTimeout, "divvy-node to be gone", func(ctx context.Context) error {
		list, err := lab.Client.CoreV1().Pods(product.Namespace).List(ctx,
			metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=" + testenv.NodeDaemon})
		if err == nil && len(list.Items) > 0 {
			err = errors.New("it is still there")
		}
		return err
	}))
}

func startDaemon(t *testing.T, ctx context.Context) {
	t.Helper()
	if err := errors.Join(selectDaemon(ctx, "null"), lab.Divvy.Wait(ctx, settingTimeout)); err != nil {
		t.Fatal(err)
	}
}

func selectDaemon(ctx context.Context, value string) error {
	patch := fmt.Appendf(nil, daemonSelector, value)
	_, err := lab.Client.AppsV1().DaemonSets(product.Namespace).Patch(ctx, testenv.NodeDaemon, types.StrategicMergePatchType, patch,
		metav1.PatchOptions{})
	return err
}

// TestNodeLeavesAndReturns deletes the node's object under running pods.
func TestNodeLeavesAndReturns(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("first", 8), one("second", 12))
	on := cards(agree(t))
	alive := lives(t)
	name := layout.NodeName
	must(t, lab.Cluster.Stop(ctx, cluster.Kubelet))
	must(t, lab.Client.CoreV1().Nodes().Delete(ctx, name, metav1.DeleteOptions{}))
	must(t, poll.Until(ctx, agreeTimeout, "the extender to forget the node", func(ctx context.Context) error {
		if node, err := auditor.Inspect(ctx); err == nil {
			return fmt.Errorf("it still shows %s", uses(node))
		}
		return nil
	}))
	if result := filter(t, ctx, 1, name); len(result.FailedAndUnresolvableNodes) != 1 {
		t.Errorf("filter for a node that is gone: %+v, want it refused for good", result)
	}

	// Kubelet registers the node again, without the labels of before.
	must(t, lab.Cluster.Start(ctx, cluster.Kubelet))
	must(t, poll.Until(ctx, podTimeout, "the node to be back", func(ctx context.Context) error {
		return errors.Join(
			cluster.LabelNode(ctx, "node-role.kubernetes.io/control-plane", ""),
			cluster.LabelNode(ctx, product.NodeLabel, "true"))
	}))
	must(t, lab.Divvy.Wait(ctx, settingTimeout))
	must(t, offered(ctx, guide))
	wantCards(t, on)
	undisturbed(t, alive)
	start(t, one("third", 8))
	wantCards(t, map[string]int{"first": 0, "second": 1, "third": 0})
}
