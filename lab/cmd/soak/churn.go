package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const (
	// churnInterval is the pause between two turns of the churn.
	churnInterval = 200 * time.Millisecond
	// maxWaiting is how many pods may wait for room: some must, or the cards
	// would not fill.
	maxWaiting = 6
	// refusalPause is how long no pod is made after kubelet refused one.
	refusalPause = time.Second
	// burstEvery is about how often many pods go at once.
	burstEvery = 25 * time.Second
)

// churn makes and deletes pods at random.
type churn struct {
	lab      *testenv.Env
	rng      *rand.Rand
	capacity int64
	kind     kind

	mu      sync.Mutex // guards what follows
	created int
	// ran are the pods that were seen running, by UID.
	ran map[types.UID]bool
	// refused are the pods that kubelet did not admit or could not start, with
	// its words.
	refused map[types.UID]string
	// paused is until when no pod is made, because one was refused.
	paused time.Time
	// died are pods that ran and ended though nothing asked them to.
	died map[types.UID]string
}

// kind is what a churn makes.
type kind struct {
	make  func(s *testenv.Env, rng *rand.Rand, name string) *corev1.Pod
	units func(*corev1.Pod) int64 // what a pod takes of the capacity
	// before makes what a pod needs, and tidy removes what no living pod needs. Both may be nil.
	before func(ctx context.Context, s *testenv.Env, pod *corev1.Pod) error
	tidy   func(ctx context.Context, s *testenv.Env, living []*corev1.Pod)
}

func newChurn(s *testenv.Env, rng *rand.Rand, capacity int64, k kind) *churn {
	return &churn{
		lab: s, rng: rng, capacity: capacity, kind: k,
		ran: map[types.UID]bool{}, refused: map[types.UID]string{}, died: map[types.UID]string{},
	}
}

// run churns until ctx ends. Calls that fail because the API server is being
// restarted are made again at the next turn.
func (c *churn) run(ctx context.Context) {
	ticker := time.NewTicker(churnInterval)
	defer ticker.Stop()
	burst := time.Now().Add(burstEvery)
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		living, waiting, err := c.observe(ctx)
		if err != nil {
			continue
		}
		if c.kind.tidy != nil {
			c.kind.tidy(ctx, c.lab, living)
		}
		var demand int64
		for _, pod := range living {
			demand += c.kind.units(pod)
		}
		// Ask for a little more than there is, but wait after a refusal, as a
		// controller does.
		if demand < c.capacity*106/100 && waiting < maxWaiting && time.Now().After(c.pauseUntil()) {
			c.create(ctx)
		}
		switch {
		case time.Now().After(burst):
			burst = time.Now().Add(burstEvery)
			for _, pod := range living {
				if c.rng.IntN(2) == 0 {
					c.delete(ctx, pod)
				}
			}
		case len(living) > 0 && c.rng.IntN(4) == 0:
			c.delete(ctx, living[c.rng.IntN(len(living))])
		}
	}
}

// observe notes what became of the pods and clears away those that ended. It
// returns the others that are not being deleted, and how many of those wait for
// a node.
func (c *churn) observe(ctx context.Context) (living []*corev1.Pod, waiting int, err error) {
	asking, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	list, err := c.lab.Client.CoreV1().Pods(c.lab.Pods.Namespace).List(asking, metav1.ListOptions{})
	if err != nil {
		return nil, 0, err
	}
	for i := range list.Items {
		pod := &list.Items[i]
		c.note(pod)
		switch {
		case testenv.Ended(pod):
			c.delete(ctx, pod)
		case pod.DeletionTimestamp == nil:
			living = append(living, pod)
			if pod.Spec.NodeName == "" {
				waiting++
			}
		}
	}
	return living, waiting, nil
}

func (c *churn) note(pod *corev1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case pod.Status.Phase == corev1.PodRunning, pod.Status.Phase == corev1.PodSucceeded:
		c.ran[pod.UID] = true
	case pod.Status.Phase == corev1.PodFailed && pod.DeletionTimestamp == nil:
		if c.ran[pod.UID] {
			c.died[pod.UID] = testenv.Describe(pod)
			return
		}
		_, words, _ := strings.Cut(testenv.Describe(pod), "; ")
		c.refused[pod.UID] = words
		c.paused = time.Now().Add(refusalPause)
	}
}

func (c *churn) pauseUntil() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.paused
}

func (c *churn) create(ctx context.Context) {
	c.mu.Lock()
	c.created++
	pod := c.kind.make(c.lab, c.rng, fmt.Sprintf("soak-%04d", c.created))
	c.mu.Unlock()
	if c.kind.before != nil && c.kind.before(ctx, c.lab, pod) != nil {
		return
	}
	// What was not made is made under another name.
	_, _ = c.lab.Pods.Create(ctx, pod)
}

func (c *churn) delete(ctx context.Context, pod *corev1.Pod) {
	// What was not deleted may be chosen again at the next turn.
	_ = c.lab.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
		Preconditions: metav1.NewUIDPreconditions(string(pod.UID)),
	})
}

// fill asks for more until the cards are as full as chance lets them be, for a
// comparison at the end that has many pods in it.
func (c *churn) fill(ctx context.Context, until time.Time) {
	for time.Now().Before(until) && ctx.Err() == nil {
		living, waiting, err := c.observe(ctx)
		if err == nil && waiting >= maxWaiting && len(living) > waiting {
			return
		}
		if err == nil {
			c.create(ctx)
		}
		select {
		case <-ctx.Done():
		case <-time.After(churnInterval):
		}
	}
}

// settle deletes the pods that wait for room and those that end by themselves,
// and waits until every other pod runs.
func (c *churn) settle(ctx context.Context) error {
	return poll.Until(ctx, 2*time.Minute, "all pods to run or be gone", func(ctx context.Context) error {
		list, err := c.lab.Client.CoreV1().Pods(c.lab.Pods.Namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for i := range list.Items {
			pod := &list.Items[i]
			c.note(pod)
			if pod.DeletionTimestamp == nil && (testenv.Ended(pod) || pod.Spec.NodeName == "" || endsByItself(pod)) {
				c.delete(ctx, pod)
				err = fmt.Errorf("%s, and is being deleted", testenv.Describe(pod))
			} else if pod.DeletionTimestamp != nil || pod.Status.Phase != corev1.PodRunning {
				err = fmt.Errorf("%s", testenv.Describe(pod))
			}
		}
		return err
	})
}

// endsByItself reports whether a container of the pod runs for a while only.
func endsByItself(pod *corev1.Pod) bool {
	for _, container := range pod.Spec.Containers {
		if len(container.Command) == 2 && container.Command[1] != "infinity" {
			return true
		}
	}
	return false
}
