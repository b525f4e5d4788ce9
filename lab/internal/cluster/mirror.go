package cluster

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/scheduler"
)

// mirrorName is the pod that kubelet shows of kube-scheduler.
const mirrorName = scheduler.PodName + "-" + layout.NodeName

// hashAnnotation names the static pod that a mirror pod shows (ConfigHashAnnotationKey of
// pkg/kubelet/types). It is the UID of the static pod.
const hashAnnotation = "kubernetes.io/config.hash"

// podCgroups are the control groups of kubelet's pods. That of a pod that has ended is removed last,
// and kubelet knows that it has ended some milliseconds later; afterCgroups is enough for that.
const (
	podCgroups   = "/sys/fs/cgroup/memory/kubepods"
	afterCgroups = 500 * time.Millisecond
)

// HastenScheduler has kubelet start kube-scheduler soon after its manifest was replaced, until ctx
// ends. Kubelet starts a static pod once the one of the same name has ended, and looks for that only
// every 10 to 15 s (backOffPeriod of pkg/kubelet), but also when its mirror pod is deleted.
func HastenScheduler(ctx context.Context, client kubernetes.Interface) {
	pods := client.CoreV1().Pods(scheduler.Namespace)
	var settled []byte // the manifest of the pod that is shown
	var ended time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(200 * time.Millisecond):
		}
		data, err := os.ReadFile(manifestPath)
		if err != nil || bytes.Equal(data, settled) {
			continue
		}
		wanted, err := parseManifest(data)
		if err != nil {
			continue
		}
		mirror, err := pods.Get(ctx, mirrorName, metav1.GetOptions{})
		if err != nil {
			continue
		}
		if scheduler.SamePod(wanted, mirror) {
			settled, ended = data, time.Time{}
			continue
		}
		left, err := filepath.Glob(filepath.Join(podCgroups, "*", "pod"+mirror.Annotations[hashAnnotation]))
		if err != nil || len(left) > 0 {
			ended = time.Time{}
			continue
		}
		if ended.IsZero() {
			ended = time.Now()
		}
		if time.Since(ended) < afterCgroups {
			continue
		}
		// An error means that kubelet was faster.
		_ = pods.Delete(ctx, mirror.Name, metav1.DeleteOptions{
			GracePeriodSeconds: ptr.To[int64](0), Preconditions: &metav1.Preconditions{UID: &mirror.UID},
		})
	}
}
