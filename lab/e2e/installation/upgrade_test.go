//go:build e2e

package installation

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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

// TestUpgrade upgrades to another version under forty pods that share eight cards, and
// under pods that arrive meanwhile, and rolls back. Each time, no container of the forty
// is started again, the books are those of before, and every pod that arrives gets a
// card. The other version is this checkout with another name. With UPGRADE_FROM, a
// commit, the upgrade is from that commit, its chart included, to this checkout.
func TestUpgrade(t *testing.T) {
	ctx := t.Context()
	install(t)
	var chart, tag, version string // to upgrade to
	if commit := os.Getenv("UPGRADE_FROM"); commit == "" {
		chart, tag, version = lab.CLI.Repository, loadVersion(t, lab.CLI.Repository, nextVersion), nextVersion
	} else {
		chart, tag = lab.CLI.Repository, tagOf(t, testenv.NodeDaemon)
		former := checkOut(t, commit)
		helmUpgrade(t, former, loadVersion(t, former, "v0.0.0-former"))
	}
	first := tagOf(t, testenv.NodeDaemon)
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
	for _, step := range []struct {
		name, tag, version string
		change             func()
	}{
		{"upgrade", tag, version, func() { helmUpgrade(t, chart, tag) }},
		{"rollback", first, "", func() { helm(t, "rollback", product.Release, "--namespace", product.Namespace) }},
	} {
		t.Run(step.name, func(t *testing.T) {
			whilePodsArrive(t, step.change)
			for part, program := range map[string]string{testenv.NodeDaemon: "divvy-node", testenv.Extender: "divvy-control"} {
				pod, err := lab.Divvy.Pod(t.Context(), part)
				if err != nil {
					t.Fatal(err)
				}
				container := pod.Spec.Containers[0]
				if !strings.HasSuffix(container.Image, ":"+step.tag) {
					t.Errorf("%s runs image %s, want tag %s", part, container.Image, step.tag)
				}
				text, err := lab.In(product.Namespace).Pods.Exec(t.Context(), pod.Name, container.Name, "/usr/bin/"+program, "--version")
				if err != nil || !strings.Contains(text, step.version) {
					t.Errorf("%s says %q, %v; want %s", part, text, err, step.version)
				}
			}
			if diff := cmp.Diff(alive, only(lives(t), "shared-")); diff != "" {
				t.Errorf("containers (-before +after):\n%s", diff)
			}
			err := poll.Until(t.Context(), podTimeout, "the books to be as before", func(ctx context.Context) error {
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
		})
	}
}

// whilePodsArrive makes a change while pods arrive, and checks that all of them ran.
func whilePodsArrive(t *testing.T, change func()) {
	t.Helper()
	arrivals, stop := arrive(t)
	began := time.Now()
	change()
	took := time.Since(began)
	stop()
	var slowest time.Duration
	arrived, refused := 0, 0
	for a := range arrivals {
		switch {
		case a.err != nil:
			t.Errorf("a pod that arrived meanwhile: %v", a.err)
		case a.refused:
			refused++
		default:
			arrived, slowest = arrived+1, max(slowest, a.took)
		}
	}
	t.Logf("it took %v; meanwhile %d pods arrived, the slowest ran after %v; kubelet rejected %d",
		took.Round(time.Second), arrived, slowest.Round(100*time.Millisecond), refused)
	if arrived == 0 || refused > 0 {
		t.Errorf("%d pods arrived meanwhile, kubelet rejected %d", arrived, refused)
	}
}

// checkOut puts the tree of a commit into a folder.
func checkOut(t *testing.T, commit string) string {
	t.Helper()
	folder := t.TempDir()
	script := `git -C "$1" archive --format=tar "$2" | tar -x -C "$3"`
	_, err := lab.CLI.Command(t.Context(), "", "bash", "-o", "pipefail", "-c", script, "bash", lab.CLI.Repository, commit, folder)
	if err != nil {
		t.Fatalf("check out commit %s of UPGRADE_FROM: %v", commit, err)
	}
	return folder
}

// loadVersion loads images of a checkout and returns their tag.
func loadVersion(t *testing.T, repository, version string) string {
	t.Helper()
	tag, err := product.LoadVersion(t.Context(), lab.Cluster, repository, version)
	if err != nil {
		t.Fatal(err)
	}
	return tag
}

// helmUpgrade upgrades to the chart of a checkout with images of a tag.
func helmUpgrade(t *testing.T, repository, tag string) {
	t.Helper()
	helm(t, "upgrade", product.Release, filepath.Join(repository, "charts", "divvy"), "--namespace", product.Namespace,
		"--reset-then-reuse-values", "--set-string", "image.tag="+tag)
}

// helm runs a command that changes the release, and waits until Divvy is ready.
func helm(t *testing.T, args ...string) {
	t.Helper()
	if _, err := lab.CLI.Helm(t.Context(), append(args, "--wait", "--timeout", "4m")...); err != nil {
		t.Fatal(err)
	}
	if err := lab.Divvy.Wait(t.Context(), 2*podTimeout); err != nil {
		t.Fatal(err)
	}
}

// tagOf returns the tag of the image that a part runs.
func tagOf(t *testing.T, part string) string {
	t.Helper()
	pod, err := lab.Divvy.Pod(t.Context(), part)
	if err != nil {
		t.Fatal(err)
	}
	image := pod.Spec.Containers[0].Image
	return image[strings.LastIndexByte(image, ':')+1:]
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
