//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const (
	podTimeout = testenv.PodTimeout
	// agreeTimeout is how long the books may take to agree once everything is
	// up and the pods run: a promise of the product.
	agreeTimeout = 5 * time.Second
	// settingTimeout is how long the node may take to offer other cards.
	settingTimeout = 3 * time.Minute

	gcuCount corev1.ResourceName = "enflame.com/gcu-count"
)

// interrupted is set when the run is to end.
var interrupted atomic.Bool

// setting is how Divvy is installed and on what.
type setting struct {
	topology, unit string
	injection      audit.Injection
	// values is a file of lab/values, "" for none.
	values string
	// units and cards are what the node is to offer then.
	units, cards int64
}

var guide = setting{topology: testenv.Guide, unit: "1", injection: audit.DeviceNodes, units: 128, cards: 8}

// current is the setting in force.
var current = guide

// begin starts a test under a setting, changing what differs, and makes sure
// that no pod is left after it.
func begin(t *testing.T, want setting) context.Context {
	t.Helper()
	if interrupted.Load() {
		t.Skip("interrupted")
	}
	ctx := t.Context()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		if t.Failed() {
			t.Log(situation(ctx))
		}
		if err := errors.Join(lab.Pods.DeleteAll(ctx), emptied(ctx)); err != nil {
			t.Errorf("after the test: %v", err)
		}
	})
	beginWith(t, ctx, want)
	return ctx
}

// beginWith brings a setting about, changing what differs.
func beginWith(t *testing.T, ctx context.Context, want setting) {
	t.Helper()
	if current != want {
		must(t, change(ctx, want))
	}
	must(t, offered(ctx, want))
}

// change brings a setting about, with no pod around.
func change(ctx context.Context, want setting) error {
	if current.topology != want.topology {
		topology, err := lab.Topology(want.topology)
		if err != nil {
			return err
		}
		if err := lab.SetCards(ctx, topology); err != nil {
			return err
		}
	}
	if current.values == want.values {
		if err := lab.Divvy.Upgrade(ctx, want.settings()...); err != nil {
			return err
		}
	} else if err := reconfigure(ctx, want); err != nil {
		return err
	}
	if current.topology != want.topology {
		// A daemon that goes on would show the former cards as lost ones.
		if err := lab.Divvy.DeletePods(ctx, testenv.NodeDaemon); err != nil {
			return err
		}
	}
	current = want
	return lab.Divvy.Wait(ctx, settingTimeout)
}

// settings are the chart's values besides those of the file.
func (s setting) settings() []string {
	return []string{"memoryUnit=" + s.unit, "node.injection=" + string(s.injection)}
}

// reconfigure gives the release the values of a setting, and more arguments of helm.
func reconfigure(ctx context.Context, want setting, more ...string) error {
	var files, args []string
	if want.values != "" {
		// The node has the label that the guide asks for.
		files, args = []string{want.values}, []string{"--set", "node.nodeSelector=null"}
	}
	for _, s := range want.settings() {
		args = append(args, "--set-string", s)
	}
	return lab.Divvy.Reconfigure(ctx, files, append(args, more...)...)
}

// offered waits until the node offers what the setting says.
func offered(ctx context.Context, want setting) error {
	return poll.Until(ctx, settingTimeout, "the node to offer its cards", func(ctx context.Context) error {
		if err := lab.Divvy.Answers(ctx); err != nil {
			return err
		}
		units, cards, err := allocatable(ctx)
		if err == nil && (units != want.units || cards != want.cards) {
			err = fmt.Errorf("it offers %d units on %d cards, want %d on %d", units, cards, want.units, want.cards)
		}
		return err
	})
}

func allocatable(ctx context.Context) (units, cards int64, err error) {
	node, err := lab.Client.CoreV1().Nodes().Get(ctx, layout.NodeName, metav1.GetOptions{})
	if err != nil {
		return 0, 0, err
	}
	u, c := node.Status.Allocatable[product.Resource], node.Status.Allocatable[gcuCount]
	return u.Value(), c.Value(), nil
}

// emptied waits until the books are empty.
func emptied(ctx context.Context) error {
	// Deleted by force, so that what they held counts until their node says otherwise.
	return poll.Until(ctx, 6*agreeTimeout, "inspect to show no pod", func(ctx context.Context) error {
		node, err := auditor.Inspect(ctx)
		if err == nil && node.Used != 0 {
			err = fmt.Errorf("it shows %s", uses(node))
		}
		return err
	})
}

// situation describes the cluster, for a test that failed.
func situation(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	var b strings.Builder
	show := func(args ...string) {
		text, err := lab.CLI.Kubectl(ctx, args...)
		fmt.Fprintf(&b, "$ kubectl %s\n%s\n", strings.Join(args, " "), text)
		if err != nil {
			fmt.Fprintf(&b, "%v\n", err)
		}
	}
	show("get", "pods", "--all-namespaces", "--output", "wide")
	show("divvy", "inspect")
	show("get", "events", "--namespace", namespace, "--sort-by", ".lastTimestamp")
	show("logs", "--namespace", product.Namespace, "daemonset/"+testenv.NodeDaemon, "--tail", "40")
	show("logs", "--namespace", product.Namespace, "deployment/"+testenv.Extender, "--tail", "40")
	return b.String()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// one returns a pod of one container.
func one(name string, units int64, command ...string) *corev1.Pod {
	return lab.Pods.New(name, testenv.Container("app", units, command...))
}

func namesOf(pods []*corev1.Pod) []string {
	var names []string
	for _, pod := range pods {
		names = append(names, pod.Name)
	}
	return names
}

// create makes pods and returns them as the API server has them.
func create(t *testing.T, pods ...*corev1.Pod) []*corev1.Pod {
	t.Helper()
	made, err := lab.Pods.Create(t.Context(), pods...)
	must(t, err)
	return made
}

// start makes pods one after the other, each once the one before runs.
func start(t *testing.T, pods ...*corev1.Pod) {
	t.Helper()
	for _, pod := range pods {
		create(t, pod)
		running(t, pod.Name)
	}
}

// createAtOnce makes pods at the same time.
func createAtOnce(t *testing.T, pods []*corev1.Pod) {
	t.Helper()
	group, ctx := errgroup.WithContext(t.Context())
	for _, pod := range pods {
		group.Go(func() error {
			_, err := lab.Pods.Create(ctx, pod)
			return err
		})
	}
	must(t, group.Wait())
}

// running waits until pods run.
func running(t *testing.T, names ...string) {
	t.Helper()
	must(t, lab.Pods.WaitPhase(t.Context(), podTimeout, corev1.PodRunning, names...))
}

// agree checks that all records agree within the promised time, and returns them.
func agree(t *testing.T) audit.Books {
	t.Helper()
	var books audit.Books
	must(t, poll.Until(t.Context(), agreeTimeout, "all records to agree", func(ctx context.Context) (err error) {
		books, err = auditor.Check(ctx, current.injection)
		return err
	}))
	return books
}

// cards returns the card of each pod of the tests, as inspect shows it.
func cards(books audit.Books) map[string]int {
	on := map[string]int{}
	for _, device := range books.Inspect.Devices {
		for _, occupant := range device.Pods {
			if occupant.Namespace == namespace {
				on[occupant.Name] = device.ID
			}
		}
	}
	return on
}

// wantCards checks that the books agree and that the pods are on these cards.
func wantCards(t *testing.T, want map[string]int) {
	t.Helper()
	if got := cards(agree(t)); !maps.Equal(got, want) {
		t.Fatalf("pods are on the cards %v, want %v", got, want)
	}
}

// uses says what inspect shows, in short.
func uses(node audit.Node) string {
	var parts []string
	for _, device := range node.Devices {
		if device.Used == 0 {
			continue
		}
		var pods []string
		for _, occupant := range device.Pods {
			pods = append(pods, fmt.Sprintf("%s %d", occupant.Name, occupant.Used))
		}
		parts = append(parts, fmt.Sprintf("card %d: %d of %d (%s)", device.ID, device.Used, device.Total, strings.Join(pods, ", ")))
	}
	for _, occupant := range node.Unplaced {
		parts = append(parts, fmt.Sprintf("no card: %s %d", occupant.Name, occupant.Used))
	}
	return strings.Join(parts, "; ")
}

// pending waits until the scheduler has said that no card fits the pod, and
// checks that it is not bound.
func pending(t *testing.T, pod *corev1.Pod, text string) {
	t.Helper()
	_, err := lab.Pods.WaitEvent(t.Context(), podTimeout, pod, text)
	must(t, err)
	now, err := lab.Pods.API.Get(t.Context(), pod.Name, metav1.GetOptions{})
	must(t, err)
	if now.Status.Phase != corev1.PodPending || now.Spec.NodeName != "" {
		t.Fatalf("%s, on node %q; want it Pending on none", testenv.Describe(now), now.Spec.NodeName)
	}
}

// noRoom is what the guide documents.
const noRoom = "0/1 nodes are available: 1 insufficient GCU Memory in one gcu device"

// lives are the containers of all pods of the tests, and how often each was
// started again.
func lives(t *testing.T) map[string]string {
	t.Helper()
	list, err := lab.Client.CoreV1().Pods(namespace).List(t.Context(), metav1.ListOptions{})
	must(t, err)
	found := map[string]string{}
	for _, pod := range list.Items {
		for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			state := "running"
			if status.State.Running == nil {
				state = "not running"
			}
			found[pod.Name+"/"+status.Name] = fmt.Sprintf("%s, %s, started again %d times", state, status.ContainerID, status.RestartCount)
		}
	}
	return found
}

// undisturbed checks that no container was touched since lives returned before.
func undisturbed(t *testing.T, before map[string]string) {
	t.Helper()
	after := lives(t)
	for name, was := range before {
		if is := after[name]; is != was {
			t.Errorf("container %s was %q, and is %q", name, was, is)
		}
	}
}
