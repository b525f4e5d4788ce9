// Package product builds Divvy from the checkout and installs it into the
// lab's cluster as a user would: container images, and the chart, which wires
// kube-scheduler, on simulated hardware.
package product

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/hardware"
	"github.com/divvy-gpu/divvy/lab/internal/image"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/progress"
	"github.com/divvy-gpu/divvy/lab/internal/release"
)

// Names in the cluster.
const (
	Namespace = "divvy-system"
	Release   = "divvy"
	// NodeImage is the node's image without its tag.
	NodeImage = release.Registry + "/" + release.Node
	// NodeLabel marks nodes that share their cards.
	NodeLabel = "enflame.com/gcushare"
	// EnabledLabel marks nodes that share cards of whatever vendor.
	EnabledLabel = "divvy.dev/enabled"
	// Resource is what pods ask for.
	Resource corev1.ResourceName = "enflame.com/gcu-memory"
)

// Options say what to install.
type Options struct {
	// Cluster is the lab to install into.
	Cluster *cluster.Cluster
	// RepositoryDir is the root of the checkout.
	RepositoryDir string
	// Topology is the file that describes the simulated cards.
	Topology string
	// MemoryUnit is the size of a unit in GB: "1", "0.1", "0.01" or "0.001".
	MemoryUnit string
	// Values are files of more values, later ones over earlier ones.
	Values []string
	// Label is the label that the node needs for the daemon to run there; when
	// empty, the node gets NodeLabel and EnabledLabel.
	Label string
	// Unlabelled leaves the node without that label, and so without the daemon.
	Unlabelled bool
	// Set holds more values of the chart, as helm's --set takes them.
	Set []string
	// Out receives the progress.
	Out io.Writer
}

// Install installs Divvy, or brings an installation up to date with the
// checkout and the options: pods restart where their image or configuration
// changed.
func Install(ctx context.Context, o Options) error { return install(ctx, o, true) }

// Prepare does what comes before the images and the chart: programs and simulated
// cards as for Install.
func Prepare(ctx context.Context, o Options) error { return install(ctx, o, false) }

// made is what this process has built, and the tags of the images that it has loaded: tests
// install again and again, from a checkout that does not change meanwhile.
var made struct {
	programs, scheduler bool
	tag, schedulerTag   string
}

// scheduler is the divvy-scheduler for the lab's Kubernetes. It is built and loaded only where it
// may run: it is as large as the others together.
var scheduler = release.Schedulers[0]

func install(ctx context.Context, o Options, chart bool) error {
	values, err := readValues(o)
	if err != nil {
		return fmt.Errorf("Divvy was not installed: %w", err) //nolint:staticcheck // a name
	}
	steps := 2
	if values.pool {
		steps++
	}
	if chart {
		steps += 2
	}
	report := progress.New(o.Out, steps)
	step := func(name string, run func() error) {
		if err != nil {
			return
		}
		task := report.Begin(name)
		if err = run(); err != nil {
			task.Failed()
			return
		}
		task.Done()
	}
	var stamp release.Stamp
	step("programs", func() (err error) {
		if stamp, err = release.ReadStamp(ctx, o.RepositoryDir); err != nil || made.programs {
			return err
		}
		err = release.Build(ctx, o.RepositoryDir, programDir, stamp, release.Host(), release.Node, release.Control, release.Hook,
			release.Kubectl)
		made.programs = err == nil
		return err
	})
	if chart {
		step("images", func() error { return loadImages(ctx, o, stamp, values.scheduler) })
	}
	step("simulated cards", func() error { return hardware.Default.Install(ctx, o.Topology) })
	if values.pool {
		step("servers of a remote pool", func() error { return setUpPool(ctx, o) })
	}
	if chart {
		step("chart", func() error { return installChart(ctx, o) })
	}
	if err != nil {
		return fmt.Errorf("Divvy was not installed: %w", err) //nolint:staticcheck // a name
	}
	return nil
}

// programDir holds the product's programs; images are made from there. It outlasts the lab,
// so that the next one links only what changed.
var programDir = func() string {
	cache, err := layout.CacheDir()
	if err != nil { // without a home
		cache = layout.StateDir
	}
	return filepath.Join(cache, "product")
}()

// Programs returns the folder that Install puts the product's programs into,
// kubectl-divvy among them.
func Programs() string { return programDir }

// imageValues is the file of values that names the images which Install loaded last.
var imageValues = filepath.Join(layout.StateDir, "image-values.yaml")

// loadImages makes the product's images, loads them into the node, and writes
// imageValues.
func loadImages(ctx context.Context, o Options, stamp release.Stamp, withScheduler bool) error {
	present, err := o.Cluster.Images().Digests(ctx)
	if err != nil {
		return err
	}
	load := func(tag *string, names ...string) error {
		missing := func(name string) bool { return present[release.Registry+"/"+name+":"+*tag] == "" }
		if *tag != "" && !slices.ContainsFunc(names, missing) {
			return nil
		}
		*tag, err = loadImagesOf(ctx, o.Cluster, programDir, stamp, names...)
		return err
	}
	if err := load(&made.tag, release.Node, release.Control); err != nil {
		return err
	}
	text := fmt.Sprintf("image:\n  tag: %s\n", made.tag)
	if withScheduler {
		if !made.scheduler {
			if err := release.Build(ctx, o.RepositoryDir, programDir, stamp, release.Host(), scheduler); err != nil {
				return err
			}
			made.scheduler = true
		}
		if err := load(&made.schedulerTag, scheduler); err != nil {
			return err
		}
		text += fmt.Sprintf("scheduler:\n  pluginImage:\n    tag: %s\n", made.schedulerTag)
	}
	if err := os.WriteFile(imageValues, []byte(text), 0o644); err != nil {
		return fmt.Errorf("name the images in a file of values: %w", err)
	}
	return nil
}

// loadImagesOf makes images of programs in a folder and loads them into the
// node. It returns their tag, which changes with their content.
func loadImagesOf(ctx context.Context, c *cluster.Cluster, programs string, stamp release.Stamp, names ...string) (tag string, err error) {
	specs, images := make([]image.Spec, len(names)), make([]v1.Image, len(names))
	content := sha256.New()
	for i, name := range names {
		program := filepath.Join(programs, name)
		var libraries []image.File
		if name == release.Node {
			// As in a release, but of this machine.
			if libraries, err = image.Libraries(program, release.VendorLibraryNeeds()...); err != nil {
				return "", err
			}
		}
		specs[i] = release.ImageSpec(name, program, libraries, stamp)
		if images[i], err = image.Build(specs[i]); err != nil {
			return "", err
		}
		digest, err := images[i].Digest()
		if err != nil {
			return "", fmt.Errorf("digest of image %s: %w", specs[i].Name, err)
		}
		content.Write([]byte(digest.Hex))
	}
	// A tag of its own for every content: kubelet and the chart notice a new
	// program by its name.
	tag = fmt.Sprintf("dev-%x", content.Sum(nil)[:6])
	for i, spec := range specs {
		if _, err := c.Images().Load(ctx, images[i], spec.Name+":"+tag, spec.Name+":dev"); err != nil {
			return "", err
		}
	}
	return tag, nil
}

// LoadVersion builds the product's programs once more, as another version of
// themselves, and loads their images into the node. It returns the images' tag.
func LoadVersion(ctx context.Context, c *cluster.Cluster, repository, version string) (tag string, err error) {
	stamp, err := release.ReadStamp(ctx, repository)
	if err != nil {
		return "", err
	}
	stamp.Version = version
	programs := filepath.Join(layout.StateDir, "bin-of-another-version")
	defer os.RemoveAll(programs) //nolint:errcheck // it goes with the lab
	if err := release.Build(ctx, repository, programs, stamp, release.Host(), release.Node, release.Control, release.Hook); err != nil {
		return "", err
	}
	return loadImagesOf(ctx, c, programs, stamp, release.Node, release.Control)
}

// chartTimeout is how long pods may take to become ready.
const chartTimeout = 3 * time.Minute

func installChart(ctx context.Context, o Options) error {
	label := cmp.Or(o.Label, NodeLabel)
	if !o.Unlabelled {
		labels := []string{label}
		if o.Label == "" {
			labels = append(labels, EnabledLabel)
		}
		for _, l := range labels {
			if err := cluster.LabelNode(ctx, l, "true"); err != nil {
				return err
			}
		}
	}
	if err := forgetInterrupted(ctx); err != nil {
		return err
	}
	args := []string{
		"upgrade", Release, filepath.Join(o.RepositoryDir, "charts", "divvy"),
		"--install", "--namespace", Namespace, "--create-namespace",
		"--values", filepath.Join(o.RepositoryDir, "lab", "values", "lab.yaml"),
		"--values", imageValues,
	}
	for _, file := range o.Values {
		args = append(args, "--values", file)
	}
	args = append(args,
		"--set-string", "memoryUnit="+o.MemoryUnit,
		"--wait", "--timeout", chartTimeout.String())
	for _, value := range o.Set {
		args = append(args, "--set", value)
	}
	if _, err := command(ctx, nil, o.Cluster.Program("helm"), args...); err != nil {
		return fmt.Errorf("%w\n%s", err, describePods(ctx))
	}
	if o.Unlabelled {
		return unlabel(ctx, label, chartTimeout)
	}
	return waitRollout(ctx, chartTimeout)
}

// Unwire makes kube-scheduler what it was before Divvy, as an administrator does on
// a control-plane node, where it is not so already. The chart must be gone.
func Unwire(ctx context.Context, c *cluster.Cluster) error {
	wired, err := cluster.SchedulerWired()
	if err != nil || !wired {
		return err
	}
	_, err = command(ctx, nil, filepath.Join(programDir, "divvy-control"), "schedconf", "uninstall",
		"--kubeconfig", layout.AdminKubeconfig, "--node-name", layout.NodeName, "--settle", "1s", "--log-level", "warn")
	if err != nil {
		return err
	}
	return c.WaitReady(ctx, cluster.Scheduler)
}

// Environment is that of a person at the lab, but for PATH.
func Environment() []string {
	helm := filepath.Join(layout.StateDir, "helm")
	return append(os.Environ(),
		"KUBECONFIG="+layout.AdminKubeconfig,
		"HELM_CACHE_HOME="+filepath.Join(helm, "cache"),
		"HELM_CONFIG_HOME="+filepath.Join(helm, "config"),
		"HELM_DATA_HOME="+filepath.Join(helm, "data"))
}

// command runs a program as a person at the lab does, and returns what it printed, which
// is in the error as well.
func command(ctx context.Context, input []byte, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = Environment()
	cmd.Stdin = bytes.NewReader(input)
	out, err := cmd.CombinedOutput()
	text := strings.TrimSpace(string(out))
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", filepath.Base(program), args[0], err, text)
	}
	return text, err
}

// forgetInterrupted removes the notes of an installation that was interrupted,
// which would make helm refuse every later one.
func forgetInterrupted(ctx context.Context) error {
	client, err := cluster.Client()
	if err != nil {
		return err
	}
	err = client.CoreV1().Secrets(Namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{
		LabelSelector: "owner=helm,name=" + Release + ",status in (pending-install,pending-upgrade,pending-rollback)",
	})
	if err != nil {
		return fmt.Errorf("clean up after an interrupted installation: %w", err)
	}
	return nil
}

// describePods says in a line each what is wrong with the product's pods.
func describePods(ctx context.Context) string {
	client, err := cluster.Client()
	if err != nil {
		return err.Error()
	}
	var found []corev1.Pod
	for _, namespace := range []string{Namespace, PoolNamespace} {
		pods, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		found = append(found, pods.Items...)
	}
	var lines []string
	for _, pod := range found {
		state := string(pod.Status.Phase)
		for _, status := range pod.Status.ContainerStatuses {
			switch {
			case status.State.Waiting != nil:
				state = status.State.Waiting.Reason + ": " + status.State.Waiting.Message
			case !status.Ready:
				state = "not ready"
			}
			if last := status.LastTerminationState.Terminated; last != nil && last.Message != "" {
				state += "; it ended before with: " + strings.TrimSpace(last.Message)
			}
		}
		lines = append(lines, fmt.Sprintf("pod %s: %s", pod.Name, state))
	}
	return strings.Join(lines, "\n")
}
