//go:build e2e

package installation

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

var (
	schedulerManifest = filepath.Join(layout.ManifestDir, "kube-scheduler.yaml")
	// ownConfig is the configuration of an administrator who had one before Divvy.
	ownConfig = filepath.Join(layout.KubernetesDir, "own-scheduler.yaml")
)

// rolledBackTimeout is how long kubelet may take to run two schedulers after each
// other on a busy machine.
const rolledBackTimeout = 3 * time.Minute

// schedconf runs divvy-control on the node, as an administrator does.
func schedconf(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(product.Programs(), "divvy-control"), append([]string{"schedconf"}, args...)...)
	cmd.Args = append(cmd.Args, "--node-name", layout.NodeName, "--settle", "1s")
	cmd.Env = append(os.Environ(), "KUBECONFIG=")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// installWired lets the chart wire kube-scheduler, and tries to take that back behind
// its back.
func installWired(t *testing.T) {
	t.Helper()
	install(t)
	// It waits for the watch to end, which it does not.
	out, err := schedconf(t.Context(), "uninstall", "--timeout", "3s")
	if err == nil || !strings.Contains(out, "divvy-schedconf watches this node") {
		t.Errorf("schedconf uninstall: %v\n%s", err, out)
	}
}

// installAndWire does by hand what the chart does otherwise; a second time changes
// nothing. The end of install takes it back with divvy-control.
func installAndWire(t *testing.T) {
	t.Helper()
	install(t, "scheduler.mode=none")
	if out, err := schedconf(t.Context(), "status"); err == nil || !strings.Contains(out, "does not call the extender") {
		t.Errorf("schedconf status before: %v\n%s", err, out)
	}
	for _, want := range []string{"is healthy", "nothing was changed"} {
		if out, err := schedconf(t.Context(), "install", "--resources", string(product.Resource)); err != nil ||
			!strings.Contains(out, want) {
			t.Fatalf("schedconf install: %v, want %q\n%s", err, want, out)
		}
	}
	if out, err := schedconf(t.Context(), "status"); err != nil {
		t.Errorf("schedconf status: %v\n%s", err, out)
	}
}

// TestWiredByHand: without the chart's DaemonSet an administrator wires kube-scheduler.
func TestWiredByHand(t *testing.T) {
	installAndWire(t)
	pod := lab.Pods.New("gcushare-pod-1", testenv.Container("app", 4))
	runPod(t, pod)
	if got, err := lab.Pods.API.Get(t.Context(), pod.Name, metav1.GetOptions{}); err != nil || got.Annotations["divvy.dev/grant"] == "" {
		t.Errorf("pod %s has no grant: %v", pod.Name, err)
	}
}

// TestSchedulerWithItsOwnConfiguration wires a scheduler that has two profiles and
// another extender: both are still there, and work. What kube-scheduler refuses is
// rolled back, and pods are scheduled again. Uninstalling leaves not a byte.
func TestSchedulerWithItsOwnConfiguration(t *testing.T) {
	ctx := t.Context()
	var asked atomic.Int64
	other := httptest.NewServer(otherExtender(&asked))
	t.Cleanup(other.Close)
	valid := fmt.Sprintf(`# An administrator's own.
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection:
  kubeconfig: /etc/kubernetes/scheduler.conf
leaderElection: {leaderElect: true}
profiles:
- schedulerName: default-scheduler
- schedulerName: second-scheduler # for batch work
  plugins:
    score: {disabled: [{name: NodeResourcesBalancedAllocation}]}
extenders:
- urlPrefix: %s/other
  filterVerb: filter
  ignorable: true
`, other.URL)
	plain := read(t, schedulerManifest)
	t.Cleanup(func() {
		// kubelet replaces kube-scheduler while the next test begins.
		write(t, schedulerManifest, plain)
		if err := os.Remove(ownConfig); err != nil {
			t.Errorf("put the lab's scheduler back: %v", err)
		}
	})
	write(t, ownConfig, []byte(valid))
	write(t, schedulerManifest, withConfig(t, plain))
	if err := lab.Cluster.WaitReady(ctx, cluster.Scheduler); err != nil {
		t.Fatal(err)
	}
	installWired(t) // its end compares the manifest

	out, err := schedconf(ctx, "status")
	if err != nil || !strings.Contains(out, "second-scheduler") || !strings.Contains(out, other.URL) || !strings.Contains(out, "wired") {
		t.Errorf("schedconf status: %v\n%s", err, out)
	}
	if out, err := schedconf(ctx, "plan", "--resources", "enflame.com/gcu-memory,example.com/another"); err != nil ||
		!strings.Contains(out, "+  - name: example.com/another") || strings.Contains(out, "BEGIN") || strings.Contains(out, keyOf(t)) {
		t.Errorf("schedconf plan: %v\n%s", err, out)
	}
	before := asked.Load()
	for name, scheduler := range map[string]string{"by-default": "", "by-second": "second-scheduler"} {
		pod := lab.Pods.New(name, testenv.Container("app", 4))
		pod.Spec.SchedulerName = scheduler
		runPod(t, pod)
		if got, err := lab.Pods.API.Get(ctx, name, metav1.GetOptions{}); err != nil || got.Annotations["divvy.dev/grant"] == "" {
			t.Errorf("pod %s has no grant: %v", name, err)
		}
	}
	if asked.Load() == before {
		t.Error("the other extender was not asked")
	}

	t.Run("a configuration that is refused is rolled back", func(t *testing.T) {
		ctx := t.Context()
		t.Cleanup(func() { write(t, ownConfig, []byte(valid)) })
		wired := read(t, schedulerManifest)
		started := time.Now()
		write(t, ownConfig, []byte(strings.Replace(valid,
			"extenders:", "- schedulerName: third-scheduler\n  plugins:\n    filter: {enabled: [{name: NoSuchPlugin}]}\nextenders:", 1)))
		pod := lab.Pods.New("meanwhile", testenv.Container("app", 0))
		if err := poll.Until(ctx, rolledBackTimeout, "kube-scheduler to get the bad configuration", func(context.Context) error {
			if bytes.Equal(read(t, schedulerManifest), wired) {
				return errors.New("it has the one before")
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		createPod(t, pod)
		if err := poll.Until(ctx, rolledBackTimeout, "an event that tells of it", func(ctx context.Context) error {
			events, err := lab.Client.CoreV1().Events(metav1.NamespaceDefault).List(ctx,
				metav1.ListOptions{FieldSelector: "reason=SchedulerRolledBack"})
			if err != nil {
				return err
			}
			for _, e := range events.Items {
				if strings.Contains(e.Message, "NoSuchPlugin") {
					return nil
				}
			}
			return fmt.Errorf("of %d events none names the plugin", len(events.Items))
		}); err != nil {
			t.Fatal(err)
		}
		t.Logf("rolled back %s after the configuration was written", time.Since(started).Round(time.Second))
		if err := lab.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, pod.Name); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(read(t, schedulerManifest), wired) {
			t.Error("the manifest is not the one before")
		}
		if out, err := schedconf(ctx, "status"); err == nil || !strings.Contains(out, "NoSuchPlugin") {
			t.Errorf("schedconf status: %v\n%s", err, out)
		}
		write(t, ownConfig, []byte(valid))
		if err := lab.Divvy.Wait(ctx, podTimeout); err != nil {
			t.Fatal(err)
		}
	})
}

// otherExtender lets every node through, and counts.
func otherExtender(asked *atomic.Int64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		var args extenderv1.ExtenderArgs
		if err := json.NewDecoder(r.Body).Decode(&args); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		// its client is gone otherwise
		_ = json.NewEncoder(w).Encode(extenderv1.ExtenderFilterResult{Nodes: args.Nodes, NodeNames: args.NodeNames})
	})
}

// withConfig is a manifest whose scheduler uses ownConfig.
func withConfig(t *testing.T, manifest []byte) []byte {
	t.Helper()
	text := string(manifest)
	for _, edit := range []struct{ after, put string }{
		{"    - kube-scheduler\n", "    - --config=" + ownConfig + "\n"},
		{"    volumeMounts:\n", "    - {name: own, mountPath: " + ownConfig + ", readOnly: true}\n"},
		{"  volumes:\n", "  - {name: own, hostPath: {path: " + ownConfig + ", type: File}}\n"},
	} {
		if strings.Count(text, edit.after) != 1 {
			t.Fatalf("the manifest has not one line %q", edit.after)
		}
		text = strings.Replace(text, edit.after, edit.after+edit.put, 1)
	}
	return []byte(text)
}

// keyOf is a part of kube-scheduler's private key, as its configuration has it.
func keyOf(t *testing.T) string {
	t.Helper()
	_, rest, found := strings.Cut(string(read(t, filepath.Join(layout.KubernetesDir, "scheduler-extender-config-v1.23+.yaml"))), "keyData:")
	if !found {
		t.Fatal("the configuration has no key: the extender is not asked over TLS")
	}
	return strings.Trim(strings.TrimSpace(rest), `"`)[:40]
}

func runPod(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	createPod(t, pod)
	if err := lab.Pods.WaitPhase(t.Context(), podTimeout, corev1.PodRunning, pod.Name); err != nil {
		t.Fatal(err)
	}
}

func createPod(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	if _, err := lab.Pods.Create(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// write replaces a file as tools do that mind readers.
func write(t *testing.T, path string, data []byte) {
	t.Helper()
	temporary := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".test")
	if err := errors.Join(os.WriteFile(temporary, data, 0o600), os.Rename(temporary, path)); err != nil {
		t.Fatal(err)
	}
}
