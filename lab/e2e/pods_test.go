//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// fill makes a pod of a whole card for each card.
func fill(t *testing.T) []*corev1.Pod {
	t.Helper()
	var pods []*corev1.Pod
	for i := range 8 {
		pods = append(pods, one(fmt.Sprint("whole-", i), 16))
	}
	createAtOnce(t, pods)
	running(t, namesOf(pods)...)
	return pods
}

func TestPodsThatEndGiveTheirMemoryBack(t *testing.T) {
	ctx := begin(t, guide)
	create(t, one("good", 10, "true"), one("bad", 10, "false"))
	must(t, lab.Pods.WaitPhase(ctx, podTimeout, corev1.PodSucceeded, "good"))
	must(t, lab.Pods.WaitPhase(ctx, podTimeout, corev1.PodFailed, "bad"))
	wantCards(t, map[string]int{}) // the objects are still there
	fill(t)
	free := cards(agree(t))["whole-3"]

	// A pod that waits for room gets it when another ends by itself.
	must(t, lab.Pods.Delete(ctx, "whole-3"))
	start(t, one("short", 16, "sleep", "4"))
	waits := create(t, one("waits", 16))[0]
	pending(t, waits, "Insufficient enflame.com/gcu-memory")
	running(t, "waits")
	if got := cards(agree(t))["waits"]; got != free {
		t.Errorf("the pod that waited got card %d, want %d, the only one that was free", got, free)
	}
}

func TestDeletedWhilePending(t *testing.T) {
	ctx := begin(t, guide)
	fill(t)
	must(t, lab.Pods.Delete(ctx, "whole-2", "whole-4", "whole-6"))
	// 7 units are free on each of three cards: more than 16, but not on one.
	start(t, one("part-2", 9), one("part-4", 9), one("part-6", 9))
	pending(t, create(t, one("waits", 16))[0], noRoom)
	before := cards(agree(t))
	must(t, lab.Pods.Delete(ctx, "waits"))
	wantCards(t, before)
	must(t, lab.Pods.Delete(ctx, "part-4"))
	start(t, one("after", 16))
	if got, want := cards(agree(t))["after"], before["part-4"]; got != want {
		t.Errorf("the next pod got card %d, want %d, the only one that was free", got, want)
	}
}

// TestDeletedAtOnce deletes pods right after they were made, wherever they are
// on their way then.
func TestDeletedAtOnce(t *testing.T) {
	ctx := begin(t, guide)
	var names []string
	for i := range 16 {
		pod := one(fmt.Sprint("brief-", i), 8)
		names = append(names, pod.Name)
		create(t, pod)
		if i%2 == 1 {
			must(t, lab.Client.CoreV1().Pods(namespace).Delete(ctx, names[i-1], metav1.DeleteOptions{}))
		}
	}
	for _, name := range names {
		err := lab.Client.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
	}
	must(t, lab.Pods.WaitGone(ctx, names...))
	must(t, emptied(ctx))
	fill(t)
	agree(t)
}

// TestEndingPodKeepsItsMemory: a pod that is being deleted still runs.
func TestEndingPodKeepsItsMemory(t *testing.T) {
	ctx := begin(t, guide)
	slow := one("slow", 16, "sleep", "infinity") // as process 1, it does not end on SIGTERM
	slow.Spec.TerminationGracePeriodSeconds = ptr.To[int64](10)
	start(t, slow)
	must(t, lab.Client.CoreV1().Pods(namespace).Delete(ctx, "slow", metav1.DeleteOptions{}))
	start(t, one("other", 16))
	wantCards(t, map[string]int{"slow": 0, "other": 1})
	must(t, lab.Pods.WaitGone(ctx, "slow"))
	wantCards(t, map[string]int{"other": 1})
}

// TestForcedDeletion: a pod that is deleted by force is gone at once, its containers
// are not. Nobody gets its card before they are, also with a daemon that starts anew
// meanwhile; then somebody does.
func TestForcedDeletion(t *testing.T) {
	ctx := begin(t, guide)
	var whole []*corev1.Pod
	for i := range 7 {
		whole = append(whole, one(fmt.Sprint("whole-", i), 16))
	}
	createAtOnce(t, whole)
	running(t, namesOf(whole)...)
	// Its name among the arguments tells its processes from others of this machine.
	const mark = "divvy-e2e-forced"
	slow := one("slow", 16, "sh", "-c", "trap 'sleep 20; exit 0' TERM; while :; do sleep 0.2; done", mark)
	slow.Spec.TerminationGracePeriodSeconds = ptr.To[int64](30)
	slow = create(t, slow)[0]
	running(t, "slow")
	card := cards(agree(t))["slow"]
	if n := processes(t, mark); n == 0 {
		t.Fatal("the container's process is not found")
	}
	// It is pending before the deletion: kubelet stops the containers within a few seconds,
	// and the daemon's restart may take longer.
	next := create(t, one("next", 16))[0]
	pending(t, next, "Insufficient enflame.com/gcu-memory")

	must(t, lab.Client.CoreV1().Pods(namespace).Delete(ctx, "slow", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	must(t, lab.Pods.WaitGone(ctx, "slow"))
	must(t, poll.Until(ctx, podTimeout, "the node to list the pod", func(ctx context.Context) error {
		if list, err := endingPods(ctx); err != nil || !strings.Contains(list, string(slow.UID)) {
			return errors.Join(err, fmt.Errorf("it lists %q", list))
		}
		return nil
	}))
	must(t, lab.Divvy.DeletePods(ctx, testenv.NodeDaemon))
	must(t, poll.Until(ctx, podTimeout, "the card to be given to the other pod", func(ctx context.Context) error {
		left := processes(t, mark) // before it is looked whether the other pod has the card
		pod, err := lab.Pods.API.Get(ctx, next.Name, metav1.GetOptions{})
		if err == nil && pod.Spec.NodeName == "" {
			return fmt.Errorf("%d processes run; %s", left, testenv.Describe(pod))
		}
		if err == nil && processes(t, mark) > 0 {
			t.Fatalf("%s has a card while %d processes of the pod before run", next.Name, left)
		}
		return err
	}))
	running(t, next.Name)
	if got := cards(agree(t))[next.Name]; got != card {
		t.Errorf("it got card %d, want %d, the only one that was free", got, card)
	}
	list, err := endingPods(ctx)
	must(t, err)
	if list != "" {
		t.Errorf("the node still lists %s", list)
	}
}

// endingPods is what the node lists as gone before its containers.
func endingPods(ctx context.Context) (string, error) {
	node, err := lab.Client.CoreV1().Nodes().Get(ctx, layout.NodeName, metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("read the node: %w", err)
	}
	return node.Annotations["divvy.dev/ending"], nil
}

// processes counts those of this machine that have the text as an argument.
func processes(t *testing.T, argument string) int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(t, err)
	n := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err == nil && slices.Contains(strings.Split(string(text), "\x00"), argument) { // a process may be gone by now
			n++
		}
	}
	return n
}

func TestStatefulSetPodComesBack(t *testing.T) {
	ctx := begin(t, guide)
	labels := map[string]string{"app": "stateful"}
	template := one("", 4)
	template.Spec.RestartPolicy = corev1.RestartPolicyAlways
	template.Labels = labels
	sets := lab.Client.AppsV1().StatefulSets(namespace)
	_, err := sets.Create(ctx, &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "stateful"},
		Spec: appsv1.StatefulSetSpec{
			Replicas: ptr.To[int32](2),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: template.Spec},
		},
	}, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() {
		if err := sets.Delete(context.WithoutCancel(ctx), "stateful", metav1.DeleteOptions{}); err != nil {
			t.Errorf("remove the StatefulSet: %v", err)
		}
	})
	running(t, "stateful-0", "stateful-1")
	wantCards(t, map[string]int{"stateful-0": 0, "stateful-1": 0})
	for range 3 {
		before, err := lab.Pods.API.Get(ctx, "stateful-0", metav1.GetOptions{})
		must(t, err)
		must(t, lab.Client.CoreV1().Pods(namespace).Delete(ctx, "stateful-0", metav1.DeleteOptions{}))
		must(t, poll.Until(ctx, podTimeout, "another stateful-0", func(ctx context.Context) error {
			pod, err := lab.Pods.API.Get(ctx, "stateful-0", metav1.GetOptions{})
			if err == nil && pod.UID == before.UID {
				err = errors.New("it is still the one before")
			}
			return err
		}))
		running(t, "stateful-0")
		wantCards(t, map[string]int{"stateful-0": 0, "stateful-1": 0})
	}
}

// TestStaticPod: kubelet starts it without the API server having been asked.
func TestStaticPod(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("beside", 4))
	pod := one("static", 8)
	pod.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	pod.Spec.RestartPolicy = corev1.RestartPolicyAlways
	manifest, err := yaml.Marshal(pod)
	must(t, err)
	path := filepath.Join(layout.ManifestDir, "divvy-e2e-static.yaml")
	must(t, os.WriteFile(path, manifest, 0o600))
	mirror := "static-" + layout.NodeName
	gone := func() error {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return lab.Pods.WaitGone(context.WithoutCancel(ctx), mirror)
	}
	t.Cleanup(func() {
		if err := gone(); err != nil {
			t.Errorf("remove the static pod: %v", err)
		}
	})
	running(t, mirror)
	books := agree(t)
	if got := cards(books); len(got) != 2 {
		t.Errorf("inspect shows %v, want the static pod and the one beside it", got)
	}
	must(t, gone())
	wantCards(t, map[string]int{"beside": 0})
}

// TestManyGenerations makes and ends more pods, one after the other, than there
// are units: nothing may be lost on the way.
func TestManyGenerations(t *testing.T) {
	ctx := begin(t, guide)
	started := time.Now()
	for i := range 6 {
		pods := []*corev1.Pod{one(fmt.Sprint("a-", i), 16), one(fmt.Sprint("b-", i), 9), one(fmt.Sprint("c-", i), 7),
			one(fmt.Sprint("d-", i), 1)}
		createAtOnce(t, pods)
		running(t, namesOf(pods)...)
		must(t, lab.Pods.Delete(ctx, namesOf(pods)...))
	}
	t.Logf("6 generations of 4 pods in %v", time.Since(started).Round(time.Second))
	must(t, emptied(ctx))
	fill(t)
	agree(t)
}
