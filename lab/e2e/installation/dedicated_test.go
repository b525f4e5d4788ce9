//go:build e2e

package installation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// takeOverTimeout is how long another replica may take to lead: the Lease of 5 s
// has to run out.
const takeOverTimeout = 90 * time.Second

// TestDedicatedScheduler installs a scheduler beside the cluster's own: the guide's
// pods behave as ever, the control plane is not touched, a change of memoryUnit under
// pods is rejected, one replica goes on where another ended, and without any only pods
// that ask for memory have to wait.
func TestDedicatedScheduler(t *testing.T) {
	ctx := t.Context()
	host := controlPlane(t)
	install(t, "scheduler.mode=dedicated", "node.configs.another.logLevel=debug")
	untouched := func(t *testing.T) {
		t.Helper()
		if now := controlPlane(t); !maps.EqualFunc(host, now, bytes.Equal) {
			t.Errorf("files of the control plane changed: there were %v, there are %v", slices.Sorted(maps.Keys(host)),
				slices.Sorted(maps.Keys(now)))
		}
	}
	untouched(t)

	t.Run("the guide's pods", func(t *testing.T) {
		for _, p := range []struct {
			name  string
			units int64
			card  string
		}{{"gcushare-pod-1", 4, "gcu0"}, {"gcushare-pod-2", 8, "gcu0"}, {"gcushare-pod-3", 12, "gcu1"}} {
			runPod(t, lab.Pods.New(p.name, testenv.Container("app", p.units)))
			wantScheduler(t, p.name, testenv.Scheduler)
			devices, err := lab.Pods.Exec(ctx, p.name, "app", "ls", "/dev")
			if err != nil {
				t.Fatal(err)
			}
			cards := slices.DeleteFunc(strings.Fields(devices), func(file string) bool { return !strings.HasPrefix(file, "gcu") })
			if !slices.Equal(cards, []string{p.card}) {
				t.Errorf("%s sees %v, want %s", p.name, cards, p.card)
			}
		}
		waiting, err := lab.Pods.Create(ctx, lab.Pods.New("gcushare-pod-4", testenv.Container("app", 20)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := lab.Pods.WaitEvent(ctx, podTimeout, waiting[0],
			"0/1 nodes are available: 1 insufficient GCU Memory in one gcu device"); err != nil {
			t.Error(err)
		}
	})

	t.Run("the configuration changes under pods", func(t *testing.T) {
		text, err := lab.CLI.Helm(ctx, lab.Divvy.UpgradeArgs("memoryUnit=0.1")...)
		if err == nil || !strings.Contains(err.Error(), `cannot change from "1" to "0.1"`) {
			t.Errorf("another memoryUnit under a pod: %v: %s", err, text)
		}
		if text, err := lab.CLI.Helm(ctx, lab.Divvy.UpgradeArgs("node.configs.another.logLevel=info")...); err != nil {
			t.Errorf("another level of the log under a pod: %v: %s", err, text)
		}
	})

	t.Run("other pods", func(t *testing.T) {
		runPod(t, lab.Pods.New("plain", testenv.Container("app", 0)))
		wantScheduler(t, "plain", corev1.DefaultSchedulerName)
		// Who asks for it by its name gets it, also for what has no devices.
		chosen := lab.Pods.New("chosen", testenv.Container("app", 0))
		chosen.Spec.SchedulerName = testenv.Scheduler
		runPod(t, chosen)
		initially := lab.Pods.New("initially", testenv.Container("app", 0))
		initially.Spec.InitContainers = []corev1.Container{testenv.Container("first", 2)}
		initially.Spec.InitContainers[0].Command = []string{"true"}
		runPod(t, initially)
		wantScheduler(t, "initially", testenv.Scheduler)
		// Who chose another is left alone; nobody of that name is there.
		other := lab.Pods.New("other", testenv.Container("app", 1))
		other.Spec.SchedulerName = "somebody-else"
		if _, err := lab.Pods.Create(ctx, other); err != nil {
			t.Fatal(err)
		}
		wantScheduler(t, "other", "somebody-else")
	})

	t.Run("the leader ends", func(t *testing.T) {
		leader, err := leadingPod(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := lab.Client.CoreV1().Pods(product.Namespace).Delete(ctx, leader,
			metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
			t.Fatal(err)
		}
		// The API server may still hold connections to the pod that was killed. The controllers
		// that create pods try again.
		runs := func(name string, units int64) {
			t.Helper()
			if err := poll.Until(ctx, podTimeout, "a pod to be created", func(ctx context.Context) error {
				_, err := lab.Pods.Create(ctx, lab.Pods.New(name, testenv.Container("app", units)))
				return err
			}); err != nil {
				t.Fatal(err)
			}
			if err := lab.Pods.WaitPhase(ctx, takeOverTimeout, corev1.PodRunning, name); err != nil {
				t.Fatal(err)
			}
		}
		runs("after-the-leader", 4)
		// The one that was killed may have placed that pod in its last moments.
		if err := poll.Until(ctx, takeOverTimeout, "another replica to lead", func(ctx context.Context) error {
			now, err := leadingPod(ctx)
			if err == nil && now == leader {
				err = fmt.Errorf("%s leads still", now)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		runs("of-the-next-leader", 2)
	})

	t.Run("nobody is there", func(t *testing.T) {
		scale(t, 0)
		if err := poll.Until(ctx, podTimeout, "a pod that asks for memory to be refused", func(ctx context.Context) error {
			_, err := lab.Pods.Create(ctx, lab.Pods.New("refused", testenv.Container("app", 1)))
			if err == nil {
				return errors.Join(errors.New("it was taken"), lab.Pods.Delete(ctx, "refused"))
			}
			if text := err.Error(); !strings.Contains(text, "scheduler.divvy.dev") || !strings.Contains(text, "divvy-extender") {
				return fmt.Errorf("the message does not say who is away: %w", err)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		runPod(t, lab.Pods.New("not-concerned", testenv.Container("app", 0)))
		scale(t, 2)
		if err := lab.Divvy.Wait(ctx, takeOverTimeout); err != nil {
			t.Fatal(err)
		}
		// The node's rules for the Service follow a little later.
		if err := poll.Until(ctx, takeOverTimeout, "a pod that asks for memory to be taken", func(ctx context.Context) error {
			_, err := lab.Pods.Create(ctx, lab.Pods.New("afterwards", testenv.Container("app", 1)))
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if err := lab.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "afterwards"); err != nil {
			t.Fatal(err)
		}
	})
	untouched(t)
}

// controlPlane is what is in the folder of the control plane's configuration.
func controlPlane(t *testing.T) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	err := filepath.WalkDir(layout.KubernetesDir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		files[path], err = os.ReadFile(path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files[schedulerManifest]) == 0 {
		t.Fatalf("%s is not there", schedulerManifest)
	}
	return files
}

func wantScheduler(t *testing.T, pod, want string) {
	t.Helper()
	found, err := lab.Pods.API.Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if found.Spec.SchedulerName != want {
		t.Errorf("pod %s is for scheduler %q, want %q", pod, found.Spec.SchedulerName, want)
	}
}

// leadingPod is the pod that holds the Lease of divvy-scheduler, which is the extender's. One
// that ends gives it up, and for a moment no replica has it.
func leadingPod(ctx context.Context) (string, error) {
	lease, err := lab.Client.CoordinationV1().Leases(product.Namespace).Get(ctx, testenv.Extender, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	pod, _, _ := strings.Cut(ptr.Deref(lease.Spec.HolderIdentity, ""), "_")
	if pod == "" {
		return "", errors.New("nobody leads")
	}
	return pod, nil
}

// scale sets the number of replicas.
func scale(t *testing.T, replicas int) {
	t.Helper()
	_, err := lab.Client.AppsV1().Deployments(product.Namespace).Patch(t.Context(), testenv.Scheduler, types.MergePatchType,
		fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas), metav1.PatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
}
