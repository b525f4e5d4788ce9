// Package demos contains the demos on the lab and what they have in common: commands as a person
// types them with what they print, and checks below them.
package demos

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/checks"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/progress"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// Waits of a demo. A machine of two cores needs a tenth of them.
const (
	podTimeout    = testenv.PodTimeout
	offerTimeout  = 2 * time.Minute
	configTimeout = 2 * time.Minute
)

// Mixed is the topology of cards of three vendors, MixedValues the values that
// offer them, and Present the label by which the daemon is put on a node.
const (
	Mixed       = "mixed.ini"
	MixedValues = "mixed.yaml"
	Present     = "nvidia.com/gpu.present"
)

// Demo prints what it does in the lab and checks what it finds.
type Demo struct {
	*testenv.Env
	Checks checks.Checks

	name    string
	out     io.Writer
	started time.Time
}

// New returns a demo that prints to out.
func New(name string, s *testenv.Env, out io.Writer) *Demo {
	return &Demo{Env: s, Checks: checks.Checks{Out: out}, name: name, out: out, started: time.Now()}
}

// Title begins a part of the demo.
func (s *Demo) Title(text string) {
	fmt.Fprintf(s.out, "\n=== %s %s\n", text, strings.Repeat("=", max(0, 74-len(text))))
}

// Say prints a text.
func (s *Demo) Say(text string) { fmt.Fprintf(s.out, "%s\n\n", text) }

// Tell prints a line beside the checks.
func (s *Demo) Tell(format string, args ...any) { fmt.Fprintf(s.out, "      "+format+"\n", args...) }

// Run prints a command of kubectl as a person types it, runs it and prints its
// output.
func (s *Demo) Run(ctx context.Context, args ...string) (string, error) {
	shown := make([]string, len(args))
	for i, arg := range args {
		if shown[i] = arg; strings.ContainsAny(arg, " ;$|'") {
			shown[i] = "'" + arg + "'"
		}
	}
	fmt.Fprintf(s.out, "$ kubectl %s\n", strings.Join(shown, " "))
	text, err := s.CLI.Kubectl(ctx, args...)
	if text != "" {
		fmt.Fprintln(s.out, text)
	}
	return text, err
}

// Offer waits until pods may have so much of a resource, checks it and returns
// how long it took. Capacity is told beside it: kubelet counts what a card has
// that is gone, as long as it may come back.
func (s *Demo) Offer(ctx context.Context, name corev1.ResourceName, allocatable int64) (time.Duration, error) {
	took, _ := s.Node.WaitAllocatable(ctx, offerTimeout, name, allocatable) // a difference, not the end of the demo
	if err := ctx.Err(); err != nil {
		return took, err
	}
	capacity, got, err := s.Node.Offered(ctx, name)
	if err != nil {
		return took, err
	}
	s.Checks.Equal(fmt.Sprintf("%s, capacity %d, allocatable", name, capacity), got, allocatable)
	return took, nil
}

// Start makes pods and waits until they run.
func (s *Demo) Start(ctx context.Context, pods ...*corev1.Pod) error {
	var names []string
	for _, pod := range pods {
		if _, err := s.Pods.Create(ctx, pod); err != nil {
			return err
		}
		names = append(names, pod.Name)
		for name, amount := range pod.Spec.Containers[0].Resources.Limits {
			fmt.Fprintf(s.out, "pod %s asks for %s: %s\n", pod.Name, name, amount.String())
		}
	}
	return s.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, names...)
}

// One returns a pod of one container that asks for so much of a resource.
func (s *Demo) One(name string, what corev1.ResourceName, amount int64) *corev1.Pod {
	return s.Pods.New(name, testenv.Asking("app", what, amount))
}

// Pending checks that a pod stays Pending with an event that says the text.
func (s *Demo) Pending(ctx context.Context, pod *corev1.Pod, text string) error {
	made, err := s.Pods.Create(ctx, pod)
	if err != nil {
		return err
	}
	for name, amount := range pod.Spec.Containers[0].Resources.Limits {
		fmt.Fprintf(s.out, "pod %s asks for %s: %s\n", pod.Name, name, amount.String())
	}
	message, err := s.Pods.WaitEvent(ctx, podTimeout, made[0], text)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		message = err.Error()
	}
	s.Checks.Contains("the event of "+pod.Name, message, text)
	now, err := s.Pods.API.Get(ctx, pod.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	s.Checks.Equal("phase of "+pod.Name, now.Status.Phase, corev1.PodPending)
	return nil
}

// End says how the demo went; the error is nil only when nothing differed.
func (s *Demo) End() error {
	fmt.Fprintf(s.out, "\nThe cluster still runs, for you to play with; `make demo-down` takes it away without a trace.\n"+
		"  export KUBECONFIG=%s PATH=%s:%s:$PATH\n\n", layout.AdminKubeconfig, product.Programs(), s.Cluster.BinDir)
	verdict := "all are as they should be"
	if n := s.Checks.Failed(); n > 0 {
		verdict = fmt.Sprintf("%d DIFFER", n)
	}
	fmt.Fprintf(s.out, "%s: %d checks: %s (%s)\n", s.name, s.Checks.Made(), verdict, progress.Elapsed(time.Since(s.started)))
	return s.Checks.Err()
}

// Labelled checks labels of the node, which it waits for.
func (s *Demo) Labelled(ctx context.Context, wanted map[string]string) error {
	err := poll.Until(ctx, offerTimeout, "labels", func(ctx context.Context) error {
		node, err := s.Node.Get(ctx)
		if err != nil {
			return err
		}
		for key, want := range wanted {
			if node.Labels[key] != want {
				return fmt.Errorf("%s is %q", key, node.Labels[key])
			}
		}
		return nil
	})
	if ctx.Err() != nil {
		return err
	}
	node, err := s.Node.Get(ctx)
	if err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(wanted)) {
		s.Checks.Equal(key, node.Labels[key], wanted[key])
	}
	return nil
}
