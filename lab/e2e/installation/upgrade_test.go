//go:build e2e

package installation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// sharing is how many pods share the cards while Divvy is upgraded.
const sharing = 40

// nextVersion is what the programs call themselves after the upgrade.
const nextVersion = "v99.0.0-next"

// TestUpgrade upgrades to images of another version under forty pods that share
// eight cards, and under pods that arrive meanwhile. No container of the forty is
// started again, the books are those of before, and every pod that arrives gets a card.
func TestUpgrade(t *testing.T) {
	ctx := t.Context()
	install(t)
	auditor := audit.New(lab)
	var pods []*corev1.Pod
	for i := range sharing {
		pods = append(pods, lab.Pods.New(fmt.Sprintf("shared-%02d", i), testenv.Container("app", 3)))
	}
	runPods(t, pods...)
	before, err := auditor.Check(ctx, audit.DeviceNodes)
	if err != nil {
		t.Fatal(err)
	}
	if len(before.Pods) != sharing {
		t.Fatalf("%d pods share the cards, want %d", len(before.Pods), sharing)
	}
	alive := lives(t)
	tag, err := product.LoadVersion(ctx, lab.Cluster, lab.CLI.Repository, nextVersion)
	if err != nil {
		t.Fatal(err)
	}

	arrivals, stop := arrive(t)
	began := time.Now()
	if _, err := lab.CLI.Helm(ctx, append(lab.Divvy.UpgradeArgs("image.tag="+tag), "--wait", "--timeout", "4m")...); err != nil {
		t.Fatal(err)
	}
	if err := lab.Divvy.Wait(ctx, 2*podTimeout); err != nil {
		t.Fatal(err)
	}
	upgraded := time.Since(began)
	stop()
	var slowest time.Duration
	arrived, refused := 0, 0
	for a := range arrivals {
		switch {
		case a.err != nil:
			t.Errorf("a pod that arrived during the upgrade: %v", a.err)
		case a.refused:
			refused++
		default:
			arrived, slowest = arrived+1, max(slowest, a.took)
		}
	}
	t.Logf("upgraded in %v; meanwhile %d pods arrived, the slowest ran after %v; kubelet rejected %d",
		upgraded.Round(time.Second), arrived, slowest.Round(100*time.Millisecond), refused)
	if arrived == 0 || refused > 0 {
		t.Errorf("%d pods arrived during the upgrade, kubelet rejected %d", arrived, refused)
	}

	for _, part := range []string{testenv.NodeDaemon, testenv.Extender} {
		pod, err := lab.Divvy.Pod(ctx, part)
		if err != nil {
			t.Fatal(err)
		}
		if image := pod.Spec.Containers[0].Image; !strings.HasSuffix(image, ":"+tag) {
			t.Errorf("%s runs image %s, want tag %s", part, image, tag)
		}
		if text, err := lab.In(product.Namespace).Pods.Exec(ctx, pod.Name, pod.Spec.Containers[0].Name,
			"/usr/bin/"+map[string]string{testenv.NodeDaemon: "divvy-node", testenv.Extender: "divvy-control"}[part],
			"--version"); err != nil || !strings.Contains(text, nextVersion) {
			t.Errorf("%s says %q, %v; want %s", part, text, err, nextVersion)
		}
	}
	if diff := cmp.Diff(alive, only(lives(t), "shared-")); diff != "" {
		t.Errorf("containers (-before +after):\n%s", diff)
	}
	err = poll.Until(ctx, podTimeout, "the books to be as before", func(ctx context.Context) error {
		after, err := auditor.Check(ctx, audit.DeviceNodes)
		if err != nil {
			return err
		}
		if diff := cmp.Diff(sorted(before), sorted(after)); diff != "" {
			return fmt.Errorf("books (-before +after):\n%s", diff)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// only keeps what begins with a prefix.
func only(all map[string]string, prefix string) map[string]string {
	kept := map[string]string{}
	for name, life := range all {
		if strings.HasPrefix(name, prefix) {
			kept[name] = life
		}
	}
	return kept
}

// sorted puts the lists of the books in order.
func sorted(b audit.Books) audit.Books {
	slices.SortFunc(b.Pods, func(x, y audit.Pod) int { return strings.Compare(x.Name, y.Name) })
	slices.SortFunc(b.Given, func(x, y audit.Given) int { return strings.Compare(x.Pod+x.Container, y.Pod+y.Container) })
	for i := range b.Given {
		slices.Sort(b.Given[i].Units)
	}
	return b
}

// arrival is how it went with a pod: it ran after some time, or kubelet refused it,
// as it does what is bound to a node while the daemon there is away.
type arrival struct {
	took    time.Duration
	refused bool
	err     error
}

// arrive makes a pod of one unit after the other until it is told to stop, each once
// the one before ran and is gone. The channel has all of them then, and is closed.
func arrive(t *testing.T) (arrivals <-chan arrival, stop func()) {
	t.Helper()
	ctx := t.Context()
	results := make(chan arrival, 10_000)
	over := make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() {
		defer close(results)
		for i := 0; ; i++ {
			select {
			case <-over:
				return
			default:
			}
			pod := lab.Pods.New(fmt.Sprintf("arriving-%03d", i), testenv.Container("app", 1))
			began := time.Now()
			_, err := lab.Pods.Create(ctx, pod)
			if err == nil {
				err = lab.Pods.WaitPhase(ctx, 2*podTimeout, corev1.PodRunning, pod.Name)
			}
			a := arrival{took: time.Since(began)}
			if err != nil {
				now, getErr := lab.Pods.API.Get(ctx, pod.Name, metav1.GetOptions{})
				if a.refused = getErr == nil && now.Status.Reason == "UnexpectedAdmissionError"; a.refused {
					err = nil
				}
			}
			a.err = errors.Join(err, lab.Pods.Delete(context.WithoutCancel(ctx), pod.Name))
			results <- a
			if a.err != nil {
				return
			}
		}
	})
	return results, func() { close(over); work.Wait() }
}
