//go:build e2e

package installation

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/debian"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/docscript"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/registry"
	"github.com/divvy-gpu/divvy/lab/internal/release"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// Where the pages' registry.example.com is in the lab: the pages say so themselves.
const (
	openRegistry    = "127.0.0.1:5443"
	privateRegistry = "127.0.0.1:5444"
)

// published is where images and chart of a release are.
const published = "ghcr.io/divvy-gpu"

// startRegistry starts a registry that the node pulls from, until the end of the test.
// The node has none of Divvy's images then.
func startRegistry(t *testing.T, o registry.Options) *registry.Registry {
	t.Helper()
	o.Dir, o.HostsDir = filepath.Join(layout.StateDir, "registry"), layout.RegistryHostsDir
	r, err := registry.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, prefix := range []string{o.Address, published + "/divvy-"} {
		if err := lab.Cluster.Images().Forget(t.Context(), prefix); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// bareLab makes the lab ready for a reader who installs Divvy: simulated cards, a pool,
// and kubectl-divvy. It takes away afterwards what the reader installed.
func bareLab(t *testing.T, topology string) {
	t.Helper()
	clean = false
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if t.Failed() {
			said, err := lab.CLI.Kubectl(ctx, "describe", "pods", "--all-namespaces", "--selector", "app.kubernetes.io/part-of=divvy")
			t.Log(said, err)
		}
		if err := errors.Join(lab.Pods.DeleteAll(ctx), lab.Remove(ctx)); err != nil {
			t.Errorf("after the page: %v", err)
		}
		for _, label := range []string{product.EnabledLabel, "iluvatar.com/gpu.present"} {
			if err := lab.Node.Label(ctx, label, ""); err != nil {
				t.Error(err)
			}
		}
	})
	// A reader makes it, and an earlier test may have left it.
	if _, err := lab.CLI.Kubectl(t.Context(), "delete", "namespace", product.Namespace, "--ignore-not-found"); err != nil {
		t.Fatal(err)
	}
	options := testenv.Options{Topology: topology, Values: []string{demos.PoolValues}, Out: os.Stderr}
	if err := lab.Prepare(t.Context(), options); err != nil {
		t.Fatal(err)
	}
}

// page returns what a page has for a test, in as many parts as it has fences.
func page(t *testing.T, file string) []*docscript.Page {
	t.Helper()
	whole, err := lab.CLI.Page(file)
	if err != nil {
		t.Fatal(err)
	}
	ours := whole.Of(t.Name())
	var parts []*docscript.Page
	for _, block := range ours.Blocks {
		part := *ours
		part.Blocks = []docscript.Block{block}
		parts = append(parts, &part)
	}
	if len(parts) == 0 {
		t.Fatalf("%s has no commands for %s", file, t.Name())
	}
	return parts
}

// run types commands of a page.
func run(t *testing.T, part *docscript.Page, variables ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), pageTimeout)
	defer cancel()
	if err := lab.CLI.RunPage(ctx, part, t.Output(), variables...); err != nil {
		t.Fatal(err)
	}
}

// installedFrom checks that all of Divvy's pods run images whose names begin with the
// prefix, and are pulled by the policy.
func installedFrom(t *testing.T, prefix string, policy corev1.PullPolicy) {
	t.Helper()
	pods, err := lab.Client.CoreV1().Pods(metav1.NamespaceAll).List(t.Context(),
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/part-of=divvy"})
	if err != nil {
		t.Fatal(err)
	}
	for _, pod := range pods.Items {
		for _, c := range pod.Spec.Containers {
			if !strings.HasPrefix(c.Image, prefix) || c.ImagePullPolicy != policy {
				t.Errorf("pod %s runs %s with policy %s; want %s..., %s", pod.Name, c.Image, c.ImagePullPolicy, prefix, policy)
			}
		}
		for _, c := range pod.Status.ContainerStatuses {
			if !c.Ready {
				t.Errorf("%s of pod %s is not ready", c.Name, pod.Name)
			}
		}
	}
	if len(pods.Items) == 0 {
		t.Error("nothing of Divvy runs")
	}
}

// onlyValues checks that the release has these values, and no others.
func onlyValues(t *testing.T, keys ...string) {
	t.Helper()
	text, err := lab.CLI.Helm(t.Context(), "get", "values", product.Release, "--namespace", product.Namespace, "--output", "json")
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := json.Unmarshal([]byte(text), &values); err != nil {
		t.Fatal(err)
	}
	for key := range values {
		if !slices.Contains(keys, key) {
			t.Errorf("the release has the value %s: %v", key, values[key])
		}
	}
	image, _ := values["image"].(map[string]any)
	if len(values) != len(keys) || slices.Contains(keys, "image") && (image["registry"] == nil || image["tag"] == nil) {
		t.Errorf("the release has the values %s, want %v", text, keys)
	}
}

// TestInstallFromPrivateRegistry: a registry with a login, which docker's
// configuration has for the push and a Secret for the node.
func TestInstallFromPrivateRegistry(t *testing.T) {
	bareLab(t, testenv.Guide)
	parts := page(t, "docs/install.md")
	words := parts[0].Words
	r := startRegistry(t, registry.Options{Address: privateRegistry, User: words["USER"], Password: words["PASSWORD"]})
	config := t.TempDir()
	login := base64.StdEncoding.EncodeToString([]byte(words["USER"] + ":" + words["PASSWORD"]))
	if err := os.WriteFile(filepath.Join(config, "config.json"), fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, privateRegistry, login),
		0o600); err != nil {
		t.Fatal(err)
	}
	run(t, parts[0], append(r.Environment(), "DOCKER_CONFIG="+config)...)
	installedFrom(t, privateRegistry+"/divvy/", corev1.PullIfNotPresent)
	if got := r.Pulled(); len(got) != 2 {
		t.Errorf("containerd has pulled %v from the registry", got)
	}
}

// TestInstallFromArchives: images that are loaded into the node's container runtime.
func TestInstallFromArchives(t *testing.T) {
	bareLab(t, testenv.Guide)
	if err := lab.Cluster.Images().Forget(t.Context(), published+"/divvy-"); err != nil {
		t.Fatal(err)
	}
	part := page(t, "docs/install.md")[0]
	part.Words["-linux-amd64"] = "-linux-" + runtime.GOARCH
	// Kubelet remembers which images it has pulled with a Secret, by their content, and
	// asks the registry before pods without that Secret run them. This content is none
	// that another test has pulled.
	run(t, part, "CONTAINERD_ADDRESS="+layout.ContainerdSocket, "VERSION=v0.0.2-e2e")
	installedFrom(t, published+"/divvy-", corev1.PullIfNotPresent)
	onlyValues(t, "image")
}

// makeRelease makes a release of the checkout, and has a registry publish it as
// ghcr.io does. It returns the folder of its files and the version of its chart.
func makeRelease(t *testing.T) (r *registry.Registry, dir, version string) {
	t.Helper()
	ctx := t.Context()
	stamp, err := release.ReadStamp(ctx, lab.CLI.Repository)
	if err != nil {
		t.Fatal(err)
	}
	stamp.Version, version = "v0.0.1-e2e", "0.0.1-e2e"
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	work := t.TempDir()
	images := filepath.Join(work, "images")
	if _, err := release.BuildImages(ctx, release.ImageOptions{
		Repository: lab.CLI.Repository, Dir: images, Stamp: stamp, Images: release.Images, Architectures: []string{runtime.GOARCH},
		Base:   release.Debian(debian.Archive{Dir: filepath.Join(cache, "divvy", "debian"), Suite: release.Suite}),
		Report: func(string) {},
	}); err != nil {
		t.Fatal(err)
	}
	dir = filepath.Join(work, "release")
	if err := release.Make(ctx, release.Options{
		Repository: lab.CLI.Repository, Dir: dir, Images: images, Helm: lab.Cluster.Program("helm"), Stamp: stamp, Report: func(string) {},
	}); err != nil {
		t.Fatal(err)
	}
	r = startRegistry(t, registry.Options{Address: openRegistry, Mirrors: []string{"ghcr.io"}})
	publish, err := docscript.Parse("publish", fmt.Appendf(nil, "```console\n$ (cd lab && go run ./cmd/release push %s/divvy-gpu "+
		"--images %s)\n$ helm push %s/divvy-%s.tgz oci://%[1]s/divvy-gpu/charts\n```\n",
		openRegistry, images, dir, version))
	if err != nil {
		t.Fatal(err)
	}
	run(t, publish, r.Environment()...)
	return r, dir, version
}

// TestInstallFromRelease: the chart and the images that a release publishes, with a
// mirror of ghcr.io in its place.
func TestInstallFromRelease(t *testing.T) {
	bareLab(t, testenv.Guide)
	r, _, version := makeRelease(t)
	part := page(t, "docs/install.md")[0]
	part.Words["ghcr.io"], part.Words["VERSION"] = openRegistry, version
	run(t, part, r.Environment()...)
	installedFrom(t, published+"/divvy-", corev1.PullIfNotPresent)
	if got, want := r.Pulled(), []string{"divvy-gpu/divvy-control", "divvy-gpu/divvy-node"}; !slices.Equal(got, want) {
		t.Errorf("containerd has pulled %v from the mirror, want %v", got, want)
	}
	onlyValues(t)
}

// TestMakeDeploy: the commands of the guide of "Bitfusion on Kubernetes", from its
// Makefile's build-image to its uninstall.
func TestMakeDeploy(t *testing.T) {
	bareLab(t, testenv.Guide)
	r := startRegistry(t, registry.Options{Address: openRegistry})
	parts := page(t, "docs/migrating.md")
	if len(parts) != 2 {
		t.Fatalf("the page has %d parts, want one that deploys and one that uninstalls", len(parts))
	}
	run(t, parts[0], r.Environment()...)
	installedFrom(t, openRegistry+"/divvy/", corev1.PullIfNotPresent)
	onlyValues(t, "image", "pool", "sharedResources")
	node, err := lab.Node.Get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if units := node.Status.Allocatable["bitfusion.io/gpu"]; units.Value() != testenv.PoolUnits {
		t.Errorf("the node offers %v of bitfusion.io/gpu, want %d", &units, testenv.PoolUnits)
	}
	hook, err := lab.Client.AppsV1().Deployments(product.PoolNamespace).Get(t.Context(), product.PoolWebhook, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if args := hook.Spec.Template.Spec.Containers[0].Args; !slices.Contains(args, "--total-gpu-memory=16000") {
		t.Errorf("the webhooks count with %v", args)
	}

	// Kubelet's five minutes are another test's.
	if _, err := lab.CLI.Helm(t.Context(), "upgrade", product.Release, filepath.Join(lab.CLI.Repository, "charts", "divvy"),
		"--namespace", product.Namespace,
		"--reset-then-reuse-values", "--set", "uninstall.nodeStatus=false"); err != nil {
		t.Fatal(err)
	}
	run(t, parts[1])
	for _, kind := range []string{"daemonsets", "deployments", "mutatingwebhookconfigurations", "validatingwebhookconfigurations",
		"clusterroles"} {
		left, err := lab.CLI.Kubectl(t.Context(), "get", kind, "--all-namespaces", "--selector", "app.kubernetes.io/part-of=divvy",
			"--output", "name")
		if err != nil || left != "" {
			t.Errorf("after make uninstall there are %s: %q, %v", kind, left, err)
		}
	}
}

// TestIXDevicePlugin: the ConfigMap of the README of ix-device-plugin, and a manifest
// of the release in the place of its DaemonSet.
func TestIXDevicePlugin(t *testing.T) {
	bareLab(t, "ix-1board.ini")
	r, dir, _ := makeRelease(t)
	part := page(t, "docs/migrating.md")[0]
	part.Words["ix-config.yaml"] = filepath.Join(lab.CLI.Repository, "lab", "e2e", "installation", "testdata", "ix-config.yaml")
	part.Words["divvy-ix-device-plugin.yaml"] = filepath.Join(dir, "divvy-ix-device-plugin.yaml")
	t.Cleanup(func() {
		if _, err := lab.CLI.Kubectl(context.WithoutCancel(t.Context()), "delete", "--ignore-not-found",
			"--filename", part.Words["divvy-ix-device-plugin.yaml"]); err != nil {
			t.Error(err)
		}
	})
	run(t, part, r.Environment()...)
	installedFrom(t, published+"/divvy-node:", corev1.PullIfNotPresent)
	// A board, not its two chips, four times.
	if _, err := lab.Node.WaitAllocatable(t.Context(), podTimeout, "iluvatar.com/gpu", 4); err != nil {
		t.Error(err)
	}
}
