//go:build e2e

package installation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/snapshot"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// calmTimeout is how long Kubernetes may take to collect what belonged to what was
// deleted.
const calmTimeout = 3 * time.Minute

// kubeletNotes is where kubelet notes which devices it gave to pods that run, and
// which resources it was offered.
const kubeletNotes = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"

// hostFolders are all places on the host that Divvy, kubelet on behalf of its pods,
// or the programs that it changes write to.
var hostFolders = []string{
	layout.KubernetesDir, "/var/lib/kubelet/device-plugins", "/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry",
	"/run/cdi", "/etc/cdi", "/var/lib/divvy", "/var/log/topscloud", "/run/nvidia", "/etc/topscloud", "/ixconfig", layout.CNIConfigDir,
	"/etc/cni",
}

// byTheTests leaves out what the tests and the lab bring along.
func byTheTests() []snapshot.Exception {
	scheduler := "kube-scheduler-" + layout.NodeName
	return []snapshot.Exception{
		{Namespace: lab.Pods.Namespace, Reason: "the pods of the test"},
		{Kind: "Namespace", Name: lab.Pods.Namespace, Reason: "it is labelled by the test"},
		{Namespace: product.PoolServer, Reason: "the lab's stand-in for the servers of a pool"},
		{Kind: "Namespace", Name: product.PoolServer, Reason: "the lab's stand-in for the servers of a pool"},
		{Kind: "IPAddress", Reason: "those of the services of the stand-in; Divvy's go with its services, which are compared"},
		{Kind: "Node", Fields: [][]string{{"status", "config"}, {"status", "volumesInUse"}}, Reason: "volumes of pods of the test"},
		{Kind: "Lease", Namespace: "kube-system", Name: "kube-scheduler", Reason: "kube-scheduler leads again after each start"},
		{
			Kind: "Pod", Namespace: "kube-system", Name: scheduler,
			Reason: "kube-scheduler was started again; its specification is compared",
			Fields: [][]string{
				{"metadata", "uid"}, {"metadata", "creationTimestamp"}, {"metadata", "annotations", "kubernetes.io/config.seen"},
				{"metadata", "generation"}, {"status"},
			},
		},
	}
}

// offeredByTests are all resources that a test of this package may have offered before.
var offeredByTests = []string{
	"nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/gpu-memory",
	"iluvatar.com/gpu", "iluvatar.com/gpu.shared", "iluvatar.com/gpu-memory",
	"enflame.com/gcu", "enflame.com/gcu-memory", "enflame.com/gcu-count", "bitfusion.io/gpu",
}

// nodeStatus leaves out what the node's status shows of the resources, where kubelet
// is not waited for, or where an earlier test did not.
func nodeStatus(resources ...string) snapshot.Exception {
	e := snapshot.Exception{Kind: "Node", Reason: "kubelet keeps resources for five minutes after their plugin has gone"}
	for _, r := range resources {
		e.Fields = append(e.Fields, []string{"status", "capacity", r}, []string{"status", "allocatable", r})
	}
	return e
}

// state is a cluster and its host.
type state struct{ objects, files snapshot.Snapshot }

func look(ctx context.Context, exceptions ...snapshot.Exception) (s state, err error) {
	config, err := cluster.RESTConfig()
	if err != nil {
		return s, err
	}
	if s.objects, err = snapshot.Objects(ctx, config, append(byTheTests(), exceptions...)...); err != nil {
		return s, err
	}
	s.files, err = snapshot.Files(hostFolders, []string{kubeletNotes})
	return s, err
}

// asBefore waits until nothing differs, but for the files that are listed.
func asBefore(t *testing.T, before state, files []string, exceptions ...snapshot.Exception) {
	t.Helper()
	err := poll.Until(t.Context(), calmTimeout, "cluster and host to be as before", func(ctx context.Context) error {
		after, err := look(ctx, exceptions...)
		if err != nil {
			return err
		}
		more := slices.DeleteFunc(snapshot.Diff(before.files, after.files), func(line string) bool {
			path, _, _ := strings.Cut(line, ": ")
			return slices.Contains(files, path)
		})
		for _, path := range files {
			if _, there := after.files[path]; !there {
				more = append(more, path+": should have stayed")
			}
		}
		if all := append(snapshot.Diff(before.objects, after.objects), more...); len(all) > 0 {
			return fmt.Errorf("%d differences:\n%s", len(all), strings.Join(all, "\n"))
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	registered, err := registeredResources()
	if err != nil {
		t.Error(err)
	}
	t.Logf("compared %d objects and %d files; kubelet remembers the resources %q", len(before.objects), len(before.files), registered)
}

// registeredResources are the resources that kubelet still has plugins in mind for.
func registeredResources() ([]string, error) {
	data, err := os.ReadFile(kubeletNotes)
	if err != nil {
		return nil, err
	}
	var notes struct {
		Data struct {
			RegisteredDevices map[string][]string
		}
	}
	if err := json.Unmarshal(data, &notes); err != nil {
		return nil, fmt.Errorf("%s: %w", kubeletNotes, err)
	}
	return slices.Sorted(maps.Keys(notes.Data.RegisteredDevices)), nil
}

// lives are the containers of all pods of the tests: which, since when, and how
// often they were started again.
func lives(t *testing.T) map[string]string {
	t.Helper()
	list, err := lab.Client.CoreV1().Pods(lab.Pods.Namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, pod := range list.Items {
		for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			since := "not running"
			if status.State.Running != nil {
				since = "running since " + status.State.Running.StartedAt.String()
			}
			found[pod.Name+"/"+status.Name] = fmt.Sprintf("%s %s, started again %d times", status.ContainerID, since, status.RestartCount)
		}
	}
	return found
}

// runPods makes pods and waits until they run.
func runPods(t *testing.T, pods ...*corev1.Pod) {
	t.Helper()
	made, err := lab.Pods.Create(t.Context(), pods...)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, pod := range made {
		names = append(names, pod.Name)
	}
	if err := lab.Pods.WaitPhase(t.Context(), 2*podTimeout, corev1.PodRunning, names...); err != nil {
		t.Fatal(err)
	}
}

// uninstall is what an administrator types. It returns all that is printed.
func uninstall(t *testing.T, args ...string) string {
	t.Helper()
	began := time.Now()
	// helm prints what hooks say as errors.
	text, err := lab.CLI.Command(t.Context(), "", "/bin/sh", append([]string{
		"-c", `exec "$0" "$@" 2>&1`, lab.Cluster.Program("helm"), "uninstall", product.Release, "--namespace", product.Namespace, "--wait",
	}, args...)...)
	t.Logf("helm uninstall took %v:\n%s", time.Since(began).Round(time.Second), text)
	if err != nil {
		pods, _ := lab.CLI.Kubectl(t.Context(), "get", "pods", "--all-namespaces", "--output", "wide")
		t.Fatalf("%v\n%s", err, pods)
	}
	clean = true
	return text
}

// clean says that nothing of Divvy is left in the lab: it is new, or Divvy was uninstalled
// in the administrator's way, with all hooks, and not installed since.
var clean bool

// makeNamespaces makes those that helm and the chart do not take away, so that they
// are there before and after.
func makeNamespaces(t *testing.T) {
	t.Helper()
	if err := lab.In(product.Namespace).Pods.EnsureNamespace(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestUninstallQuickly uninstalls under running pods, without waiting for kubelet:
// a node does not answer, and somebody edited kube-scheduler's manifest since. The
// cluster and the host are then as before, and Divvy can be installed again at once,
// under the pods that ran all the time.
func TestUninstallQuickly(t *testing.T) {
	ctx := t.Context()
	bare(t, product.NodeLabel, product.EnabledLabel)
	key := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "grant-key-of-ones-own"},
		Data: map[string][]byte{"key": []byte("0123456789abcdef0123456789abcdef")}}
	if _, err := lab.Client.CoreV1().Secrets(product.Namespace).Create(ctx, key, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := lab.Client.CoreV1().Secrets(product.Namespace).Delete(context.WithoutCancel(ctx), key.Name,
			metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	leave := nodeStatus(offeredByTests...)
	before, err := look(ctx, leave)
	if err != nil {
		t.Fatal(err)
	}
	original, err := os.ReadFile(schedulerManifest)
	if err != nil {
		t.Fatal(err)
	}
	values := []string{"uninstall.nodeStatus=false", "uninstall.removeLogs=true", "extender.leaderElection=true",
		"grantKey.existingSecret=" + key.Name}
	install(t, values...)
	auditor := audit.New(lab)
	runPods(t, lab.Pods.New("one", testenv.Container("app", 4)), lab.Pods.New("two", testenv.Container("app", 12)))
	alive := lives(t)
	books, err := auditor.Check(ctx, audit.DeviceNodes)
	if err != nil {
		t.Fatal(err)
	}

	// Somebody sets a label on the static pod.
	wired, err := os.ReadFile(schedulerManifest)
	if err != nil {
		t.Fatal(err)
	}
	edited := strings.Replace(string(wired), "  labels:\n", "  labels:\n    edited: since\n", 1)
	if edited == string(wired) {
		t.Fatalf("the manifest has no labels:\n%s", wired)
	}
	if err := replaceFile(schedulerManifest, []byte(edited)); err != nil {
		t.Fatal(err)
	}
	lost := loseANode(t)

	text := uninstall(t)
	for _, want := range []string{
		"kube-scheduler on node " + lost + ", which does not respond", "files on the host of node " + lost + ", which does not respond",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("helm uninstall does not say %q", want)
		}
	}
	manifest, err := os.ReadFile(schedulerManifest)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Replace(string(original), "  labels:\n", "  labels:\n    edited: since\n", 1)
	if diff := cmp.Diff(strings.Split(want, "\n"), strings.Split(string(manifest), "\n")); diff != "" {
		t.Errorf("kube-scheduler's manifest (-want +got):\n%s", diff)
	}
	if err := replaceFile(schedulerManifest, original); err != nil {
		t.Fatal(err)
	}
	forgetNode(t, lost)
	asBefore(t, before, nil, leave)
	if diff := cmp.Diff(alive, lives(t)); diff != "" {
		t.Errorf("containers (-before +after):\n%s", diff)
	}
	if text, err := lab.CLI.Helm(ctx, "uninstall", product.Release, "--namespace", product.Namespace); err == nil ||
		!strings.Contains(text+err.Error(), "not found") {
		t.Errorf("the second time: %v: %s", err, text)
	}

	// What pods hold is known again: kubelet tells the units, their grants the card,
	// because the key is the same. kube-scheduler, which takes some 12 s to be replaced, is
	// left alone this time.
	install(t, append(values, "scheduler.mode=none")...)
	if err := poll.Until(ctx, podTimeout, "the books to be as before", func(ctx context.Context) error {
		again, err := auditor.Check(ctx, audit.DeviceNodes)
		if err == nil {
			if diff := cmp.Diff(books.Inspect, again.Inspect); diff != "" {
				err = fmt.Errorf("inspect (-before +after):\n%s", diff)
			}
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(alive, lives(t)); diff != "" {
		t.Errorf("containers after installing again (-before +after):\n%s", diff)
	}
	if err := lab.Pods.DeleteAll(ctx); err != nil {
		t.Fatal(err)
	}
	uninstall(t)
	asBefore(t, before, nil, leave)
}

// TestUninstall is the whole of it, with kubelet's five minutes: cards
// of three vendors and a remote pool under running pods. Afterwards the cluster
// equals what it was before Divvy, and the host all but the log files.
func TestUninstall(t *testing.T) {
	ctx := t.Context()
	bare(t, "nvidia.com/gpu.present")
	// Tests before may have left some, which will be gone as well.
	before, err := look(ctx, nodeStatus(offeredByTests...))
	if err != nil {
		t.Fatal(err)
	}
	installWith(t, testenv.Options{
		Topology: demos.Mixed, Values: []string{demos.MixedValues, demos.PoolValues}, Label: "nvidia.com/gpu.present",
		// The node has none of the driver's libraries that NVIDIA's CDI specification needs.
		Set: []string{"uninstall.nodeStatus=true", "node.injection=cdi", "node.vendors.nvidia.injection[0]=deviceNodes"},
	})
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := errors.Join(product.RemovePool(ctx), lab.Pods.AllowPool(ctx, false)); err != nil {
			t.Errorf("take the pool away after the test: %v", err)
		}
	})
	if _, err := product.ImportToken(ctx); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(lab.Pods.AllowPool(ctx, true), lab.Pool.Wait(ctx, podTimeout)); err != nil {
		t.Fatal(err)
	}
	pooled, err := lab.Pods.Example("bitfusion/pod.yaml")
	if err != nil {
		t.Fatal(err)
	}
	pooled.Spec.RestartPolicy = corev1.RestartPolicyNever
	for i := range pooled.Spec.Containers {
		pooled.Spec.Containers[i].Command = []string{"sleep infinity"}
	}
	runPods(t,
		lab.Pods.New("whole-nvidia", testenv.Asking("app", demos.GPU, 1)),
		lab.Pods.New("whole-iluvatar", testenv.Asking("app", demos.IX, 1)),
		lab.Pods.New("memory", testenv.Asking("app", demos.GCUMemory, 4)), pooled)
	if copies, err := lab.Pods.TokenSecrets(ctx); err != nil || len(copies) == 0 {
		t.Fatalf("copies of the token: %v, %v", copies, err)
	}
	specs, err := filepath.Glob("/run/cdi/divvy-*")
	if err != nil || len(specs) == 0 {
		t.Fatalf("CDI specifications: %q, %v", specs, err)
	}
	alive := lives(t)

	uninstall(t)
	if diff := cmp.Diff(alive, lives(t)); diff != "" {
		t.Errorf("containers (-before +after):\n%s", diff)
	}
	if copies, err := lab.Pods.TokenSecrets(ctx); err != nil || len(copies) > 0 {
		t.Errorf("copies of the token are left: %v, %v", copies, err)
	}
	// The token itself is the administrator's.
	if err := product.ForgetToken(ctx); err != nil {
		t.Fatal(err)
	}
	logs, err := filepath.Glob("/var/log/topscloud/gcushare/*.log")
	if err != nil || len(logs) < 3 {
		t.Errorf("log files: %q, %v; want those of three programs", logs, err)
	}
	files := append([]string{"/var/log/topscloud", "/var/log/topscloud/gcushare"}, logs...)
	// Of the node's status nothing is left out that this installation offered.
	others := nodeStatus("nvidia.com/gpu.shared", "iluvatar.com/gpu.shared")
	asBefore(t, before, files, others)
	if registered, err := registeredResources(); err != nil || len(registered) > 0 {
		t.Errorf("kubelet still lists %q, %v", registered, err)
	}
	if err := lab.Pods.DeleteAll(ctx); err != nil {
		t.Fatal(err)
	}
	asBefore(t, before, files, others)
	if err := os.RemoveAll("/var/log/topscloud"); err != nil {
		t.Error(err)
	}
}

// bare brings a lab about on which nothing of an earlier test is left but entries of
// the node's status: tests take Divvy away in a short way. It labels the node as an
// administrator does.
func bare(t *testing.T, labels ...string) {
	t.Helper()
	ctx := t.Context()
	makeNamespaces(t)
	if !clean {
		install(t, "uninstall.nodeStatus=false", "uninstall.removeLogs=true")
		uninstall(t)
	}
	err := poll.Until(ctx, calmTimeout, "the last pod of Divvy to be gone, and the node's Lease", func(ctx context.Context) error {
		pods, err := lab.Client.CoreV1().Pods(product.Namespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(pods.Items) > 0 {
			err = errors.New(testenv.Describe(&pods.Items[0]))
		}
		if err == nil { // kubelet makes it some seconds after the lab came up
			_, err = lab.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, layout.NodeName, metav1.GetOptions{})
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, label := range labels {
		if err := lab.Node.Label(ctx, label, "true"); err != nil {
			t.Fatal(err)
		}
	}
}

// replaceFile puts another file in the place of one, of the same mode, at once.
func replaceFile(path string, content []byte) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	// Not in the folder: kubelet reads every file there.
	next := filepath.Join(layout.KubernetesDir, filepath.Base(path)+".next")
	if err := os.WriteFile(next, content, info.Mode()); err != nil {
		return err
	}
	return os.Rename(next, path)
}

// loseANode makes a node of the control plane that shares cards and does not answer,
// and returns its name. Daemons are meant to be on it.
func loseANode(t *testing.T) string {
	t.Helper()
	const name = "divvy-lab-away"
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		"kubernetes.io/os": "linux", "kubernetes.io/hostname": name, "node-role.kubernetes.io/control-plane": "", product.NodeLabel: "true",
	}}}
	t.Cleanup(func() { forgetNode(t, name) })
	nodes := lab.Client.CoreV1().Nodes()
	_, err := nodes.Create(t.Context(), node, metav1.CreateOptions{})
	if err == nil {
		// Controllers and Divvy write to a new node, too.
		err = retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			made, err := nodes.Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			made.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown,
				Reason: "NodeStatusUnknown"}}
			made.Status.Capacity = corev1.ResourceList{
				corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi"),
				corev1.ResourcePods: resource.MustParse("110"),
			}
			made.Status.Allocatable = made.Status.Capacity
			_, err = nodes.UpdateStatus(t.Context(), made, metav1.UpdateOptions{})
			return err
		})
	}
	if err != nil {
		t.Fatalf("make a node that does not answer: %v", err)
	}
	err = poll.Until(t.Context(), podTimeout, "daemons on the node that does not answer", func(ctx context.Context) error {
		pods, err := lab.Client.CoreV1().Pods(product.Namespace).List(ctx,
			metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=" + testenv.NodeDaemon})
		if err == nil && !slices.ContainsFunc(pods.Items, func(p corev1.Pod) bool { return p.Spec.NodeName == name }) {
			err = errors.New("there is none")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// forgetNode deletes a node and the pods that were on it.
func forgetNode(t *testing.T, name string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	_, err := lab.CLI.Kubectl(ctx, "delete", "node", name, "--ignore-not-found")
	if err == nil {
		_, err = lab.CLI.Kubectl(ctx, "delete", "pods", "--all-namespaces", "--field-selector", "spec.nodeName="+name,
			"--force", "--grace-period=0")
	}
	if err == nil {
		_, err = lab.CLI.Kubectl(ctx, "delete", "lease", name, "--namespace", "kube-node-lease", "--ignore-not-found")
	}
	if err != nil {
		t.Errorf("forget node %s: %v", name, err)
	}
}
