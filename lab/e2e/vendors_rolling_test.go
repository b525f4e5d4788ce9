//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const (
	// podInterval is the pause between two pods of the load.
	podInterval = 500 * time.Millisecond
	// podLife is how long a pod of the load runs.
	podLife = 2 * time.Second
	// maxLoad is how many pods of the load there are at once. A machine that cannot remove
	// pods as fast as they are created would collect more and more of them.
	maxLoad = 24
	// calm is the pause between two replacements of the daemon.
	calm = 3 * time.Second
)

// rollingTime is how long the daemon is replaced under load; `make rolling` sets three
// minutes.
func rollingTime(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("ROLLING_SECONDS")
	if text == "" {
		return 30 * time.Second
	}
	seconds, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("ROLLING_SECONDS: %v", err)
	}
	return time.Duration(seconds) * time.Second
}

// load creates pods of memory, whole devices and time slices at a steady rate, as long as
// the node keeps up, and deletes each once it has run for a while.
type load struct {
	created int

	mu sync.Mutex // guards what follows
	// left is how many pods there were when they were listed last.
	left int
	// ran is when a pod was first seen running, rejected what kubelet said of one.
	ran      map[types.UID]time.Time
	rejected map[types.UID]string
	// containers are the first containers that pods were seen with.
	containers map[types.UID]string
	restarted  map[types.UID]string
	stop       func()
}

// startLoad starts the load, until stop is called, which waits until each pod has
// run, or was rejected, and is gone.
func startLoad(t *testing.T) *load {
	t.Helper()
	l := &load{
		ran: map[types.UID]time.Time{}, rejected: map[types.UID]string{},
		containers: map[types.UID]string{}, restarted: map[types.UID]string{},
	}
	ctx := t.Context()
	enough, over := make(chan struct{}), make(chan struct{})
	var creating, watching sync.WaitGroup
	creating.Go(func() {
		tick := time.NewTicker(podInterval)
		defer tick.Stop()
		for {
			select {
			case <-enough:
				return
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if l.full() {
				continue
			}
			if _, err := lab.Pods.Create(ctx, l.pod()); err != nil {
				t.Errorf("create a pod: %v", err)
			}
		}
	})
	watching.Go(func() {
		for {
			select {
			case <-over:
				return
			case <-ctx.Done():
				return
			case <-time.After(podInterval / 2):
			}
			if _, err := l.observe(ctx); err != nil {
				t.Errorf("observe the pods: %v", err)
			}
		}
	})
	l.stop = func() {
		close(enough)
		creating.Wait()
		err := poll.Until(ctx, 2*podTimeout, "all pods of the load to be gone", func(ctx context.Context) error {
			left, err := l.observe(ctx)
			if err == nil && left > 0 {
				err = fmt.Errorf("%d are there", left)
			}
			return err
		})
		close(over)
		watching.Wait()
		must(t, err)
	}
	return l
}

// pod returns the next pod: of ten, one has a whole device, four have a time slice
// and five have memory.
func (l *load) pod() *corev1.Pod {
	i := l.created
	l.created++
	name := fmt.Sprintf("load-%04d", i)
	switch {
	case i%10 == 0:
		return asking(name, demos.IX, 1)
	case i%5 < 3 && i%2 == 0 || i%10 == 3:
		return asking(name, demos.GPU, 1)
	}
	pod := asking(name, demos.GCUMemory, int64(1+i%3))
	if i%4 == 1 {
		pod.Spec.InitContainers = []corev1.Container{testenv.Asking("init", demos.GCUMemory, 2, "true")}
	}
	return pod
}

// observe notes how the pods fare, deletes those that have run for a while or were
// rejected, and returns how many are left.
func (l *load) observe(ctx context.Context) (left int, err error) {
	pods := lab.Client.CoreV1().Pods(namespace)
	list, err := pods.List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	defer func() { l.left = left }()
	for i := range list.Items {
		pod := &list.Items[i]
		if !strings.HasPrefix(pod.Name, "load-") {
			continue
		}
		left++
		if l.ran[pod.UID].IsZero() && pod.Status.Phase == corev1.PodRunning {
			l.ran[pod.UID] = time.Now()
		}
		for _, c := range pod.Status.ContainerStatuses {
			if l.containers[pod.UID] == "" {
				l.containers[pod.UID] = c.ContainerID
			}
			if c.RestartCount > 0 || c.ContainerID != "" && c.ContainerID != l.containers[pod.UID] {
				l.restarted[pod.UID] = testenv.Describe(pod)
			}
		}
		failed := pod.Status.Phase == corev1.PodFailed && pod.DeletionTimestamp == nil
		if failed && l.rejected[pod.UID] == "" {
			l.rejected[pod.UID] = testenv.Describe(pod)
		}
		if ran := l.ran[pod.UID]; !failed && (ran.IsZero() || time.Since(ran) < podLife) || pod.DeletionTimestamp != nil {
			continue
		}
		if err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return left, err
		}
	}
	return left, nil
}

// full reports whether there are as many pods as there may be at once.
func (l *load) full() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.left >= maxLoad
}

// unwell returns what was rejected and restarted.
func (l *load) unwell() (rejected, restarted []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Values(l.rejected)), slices.Collect(maps.Values(l.restarted))
}

// stays are pods that hold something of each kind from the beginning to the end.
func stays(t *testing.T) (check func()) {
	t.Helper()
	pods := []*corev1.Pod{
		asking("stays-slice", demos.GPU, 1), asking("stays-whole", demos.IX, 1), asking("stays-memory", demos.GCUMemory, 3),
	}
	start(t, pods...)
	names := namesOf(pods)
	before, alive := sights(t, names...), lives(t)
	return func() {
		t.Helper()
		if after := sights(t, names...); !reflect.DeepEqual(after, before) {
			t.Errorf("pods see %v, saw %v", after, before)
		}
		undisturbed(t, alive)
	}
}

// published is the inventory on the node's object.
func published(ctx context.Context) (string, error) {
	node, err := lab.Node.Get(ctx)
	if err != nil {
		return "", err
	}
	return node.Annotations[wire.InventoryAnnotation], nil
}

// waited is what the daemon logs of how long kubelet had to wait for it.
var waited = regexp.MustCompile(`kubeletWaited="?([0-9.]+[a-zµ]+)"?`)

// TestRollingUpdate replaces the daemon again and again, and changes its
// configuration in between, while two pods a second arrive. Kubelet rejects none, no
// container is restarted, and the node offers the same as before.
func TestRollingUpdate(t *testing.T) {
	ctx := beginMixed(t)
	choose(t, "nvidia")
	offers(t, demos.GPU, 8)
	check := stays(t)
	before, err := published(ctx)
	must(t, err)
	length := rollingTime(t)

	l := startLoad(t)
	var updates, reloads, restarts int
	var longest time.Duration
	config := "nvidia"
	for begun := time.Now(); time.Since(begun) < length; {
		must(t, lab.Divvy.Roll(ctx, settingTimeout))
		updates++
		pod, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
		must(t, err)
		for _, c := range pod.Status.ContainerStatuses {
			restarts += int(c.RestartCount)
		}
		text, err := lab.CLI.Kubectl(ctx, "logs", "--namespace", product.Namespace, pod.Name)
		must(t, err)
		match := waited.FindStringSubmatch(text)
		if match == nil {
			t.Errorf("the new daemon did not take over:\n%s", text)
			break
		}
		d, err := time.ParseDuration(match[1])
		must(t, err)
		longest = max(longest, d)
		pause(ctx)
		if updates%2 == 0 {
			config = map[string]string{"nvidia": "reloaded", "reloaded": "nvidia"}[config]
			choose(t, config)
			must(t, poll.Until(ctx, settingTimeout, "the configuration to be in use", func(ctx context.Context) error {
				text, err := lab.CLI.Kubectl(ctx, "logs", "--namespace", product.Namespace, pod.Name)
				if err == nil && strings.Count(text, "The new configuration is in use") == 0 {
					err = errors.New("it is not")
				}
				return err
			}))
			reloads++
			pause(ctx)
		}
	}
	if config != "nvidia" {
		choose(t, "nvidia")
	}
	l.stop()
	rejected, restarted := l.unwell()
	t.Logf("rolling update under 2 pods a second for %v: %d updates, %d changes of the configuration, %d pods created, %d rejected, %d "+
		"restarted; kubelet waited %v at most",
		length, updates, reloads, l.created, len(rejected), len(restarted)+restarts, longest)
	for _, what := range slices.Concat(rejected, restarted) {
		t.Error(what)
	}
	if updates == 0 || l.created == 0 || restarts > 0 {
		t.Errorf("%d updates, %d pods, %d restarts of the daemon", updates, l.created, restarts)
	}
	check()
	must(t, poll.Until(ctx, settingTimeout, "the inventory to be as before", func(ctx context.Context) error {
		after, err := published(ctx)
		if err == nil && after != before {
			err = fmt.Errorf("it was\n%s\nand is\n%s", before, after)
		}
		return err
	}))
}

// pause gives the load some time without a replacement.
func pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(calm):
	}
}

// TestEarlierRelease goes back to a release that does not hand over, with its way to
// update, and forward again. The new pod then waits, ready, until the old one is gone.
func TestEarlierRelease(t *testing.T) {
	ctx := beginMixed(t)
	check := stays(t)
	set := func(ctx context.Context, surge, unavailable int, uid string) error {
		patch := fmt.Appendf(nil, `{"spec":{"updateStrategy":{"rollingUpdate":{"maxSurge":%d,"maxUnavailable":%d}},`+
			`"template":{"spec":{"containers":[{"name":%q,"env":[{"name":"POD_UID",%s}]}]}}}}`, surge, unavailable, testenv.NodeDaemon, uid)
		_, err := lab.Client.AppsV1().DaemonSets(product.Namespace).Patch(ctx, testenv.NodeDaemon, types.StrategicMergePatchType, patch,
			metav1.PatchOptions{})
		return errors.Join(err, lab.Divvy.Wait(ctx, settingTimeout))
	}
	const own = `"value":null,"valueFrom":{"fieldRef":{"apiVersion":"v1","fieldPath":"metadata.uid"}}`
	t.Cleanup(func() {
		if err := set(context.WithoutCancel(ctx), 1, 0, own); err != nil {
			t.Error(err)
		}
	})
	// A daemon without an identity does not listen, as one of the earlier release.
	must(t, set(ctx, 0, 1, `"value":"","valueFrom":null`))
	before, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
	must(t, err)
	start(t, asking("earlier", demos.GPU, 1))
	must(t, set(ctx, 1, 0, own))
	after, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
	must(t, err)
	if after.UID == before.UID {
		t.Error("the pod was not replaced")
	}
	check()
	start(t, asking("after", demos.GCUMemory, 2))
}

// TestDaemonCrash kills the daemon under the same load and shows what that costs.
func TestDaemonCrash(t *testing.T) {
	ctx := beginMixed(t)
	choose(t, "nvidia")
	offers(t, demos.GPU, 8)
	check := stays(t)
	l := startLoad(t)
	pause(ctx)
	killed := time.Now()
	must(t, lab.Divvy.Kill(ctx, testenv.NodeDaemon))
	must(t, lab.Divvy.Wait(ctx, settingTimeout))
	ready := time.Since(killed)
	pod, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
	must(t, err)
	begun, registered, err := registration(ctx, pod.Name)
	must(t, err)
	pause(ctx)
	l.stop()
	rejected, restarted := l.unwell()
	t.Logf("crash of the daemon under 2 pods a second: the process runs again after %v, has registered every resource %v later, and is "+
		"ready after %v; %d pods created, %d rejected, %d restarted",
		begun.Sub(killed).Round(10*time.Millisecond), registered.Sub(begun).Round(time.Millisecond), ready.Round(10*time.Millisecond),
		l.created, len(rejected), len(restarted))
	for _, what := range rejected {
		if !strings.Contains(what, "UnexpectedAdmissionError") {
			t.Errorf("a pod failed otherwise than by kubelet's rejection: %s", what)
		}
	}
	for _, what := range restarted {
		t.Error(what)
	}
	check()
	start(t, asking("after", demos.GCUMemory, 2))
}

// registration returns when the daemon's process was started, and when it had
// registered the last of its resources.
func registration(ctx context.Context, pod string) (begun, registered time.Time, err error) {
	text, err := lab.CLI.Kubectl(ctx, "logs", "--timestamps", "--namespace", product.Namespace, pod)
	if err != nil {
		return begun, registered, err
	}
	for line := range strings.Lines(text) {
		stamp, rest, _ := strings.Cut(line, " ")
		at, err := time.Parse(time.RFC3339Nano, stamp)
		if err != nil {
			continue
		}
		if begun.IsZero() {
			begun = at
		}
		if strings.Contains(rest, "Registered with kubelet") {
			registered = at
		}
	}
	if registered.IsZero() {
		return begun, registered, fmt.Errorf("it does not say that it has registered:\n%s", text)
	}
	return begun, registered, nil
}
