//go:build e2e

package installation

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/nvidiahost"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// TestToolkitByHand follows NVIDIA's article on its device plugin, on a node whose driver
// and container toolkit were installed without the operator. Containerd is configured, and
// the toolkit's own CDI specification is written, by the toolkit's program.
func TestToolkitByHand(t *testing.T) {
	const spec = "/etc/cdi/nvidia.yaml"
	cuda := nvidiahost.CUDA(nvidiahost.Libraries, driverVersion)
	made := []string{spec, cuda, nvidiahost.PackageConfigDir}
	for _, name := range nvidiahost.Programs {
		made = append(made, filepath.Join(nvidiahost.PackageDir, name))
	}
	cleanHost(t, made...)
	must(t, nvidiahost.InstallCUDA(t.Context(), nvidiahost.Libraries, driverVersion))
	installToolkit(t, nvidiahost.Toolkit{Packages: true, DriverRoot: "/"})
	plain := read(t, containerdConfig)
	nvidiaCTK(t, "runtime", "configure", "--runtime=containerd", "--set-as-default", "--config="+containerdConfig,
		"--drop-in-config=/etc/containerd/conf.d/99-nvidia.toml",
		"--nvidia-runtime-path="+filepath.Join(nvidiahost.PackageDir, "nvidia-container-runtime"))
	must(t, lab.Cluster.Restart(t.Context(), cluster.Containerd))
	installWith(t, testenv.Options{
		Topology: demos.Mixed, Label: demos.Present, Values: []string{"../../examples/values/nvidia.yaml"},
		Set: []string{"scheduler.mode=none"}, // whole devices need no extender
	})

	t.Run("the article's steps", func(t *testing.T) {
		answers(t, "environment")
		shows(t, `(?m)^\S+ +Ready .* true$`, "get", "nodes", "-L", demos.Present)
		daemon := []string{"-n", product.Namespace, "-l", "app.kubernetes.io/name=divvy-node"}
		shows(t, `(?m)^divvy-node-\S+ +1/1 +Running +0 `, append([]string{"get", "pods"}, daemon...)...)
		shows(t, `msg="Registered with kubelet" resource=nvidia.com/gpu socket=/var/lib/kubelet/device-plugins/nvidia-gpu.sock`,
			append([]string{"logs", "--tail=-1"}, daemon...)...)
		served(t)
	})
	t.Run("CDI", func(t *testing.T) {
		write(t, containerdConfig, plain)
		must(t, lab.Cluster.Restart(t.Context(), cluster.Containerd))
		must(t, os.MkdirAll(filepath.Dir(spec), 0o755))
		nvidiaCTK(t, "cdi", "generate", "--output="+spec)
		answers(t, "cdi")
		served(t)
	})
	t.Run("the toolkit's specification", func(t *testing.T) {
		must(t, lab.Divvy.Upgrade(t.Context(), "node.vendors.nvidia.injection={cdi}", "node.vendors.nvidia.cdiKind=nvidia.com/gpu"))
		must(t, lab.Divvy.Wait(t.Context(), podTimeout))
		// kubelet takes up to a minute or two to show a changed ConfigMap to the daemon.
		must(t, poll.Until(t.Context(), podTimeout, "the daemon to have the configuration", func(ctx context.Context) error {
			text, err := lab.CLI.Kubectl(ctx, "logs", "--tail=-1", "-n", product.Namespace, "-l", "app.kubernetes.io/name=divvy-node")
			if err == nil && !strings.Contains(text, "injection=[cdi] pinned=true") {
				err = errors.New("it has the former one")
			}
			return err
		}))
		served(t)
		must(t, os.Remove(spec))
		pods, err := lab.Pods.Create(t.Context(), lab.Pods.New("without", testenv.Asking("app", demos.GPU, 1)))
		must(t, err)
		_, err = lab.Pods.WaitEvent(t.Context(), podTimeout, pods[0], "unresolvable CDI devices nvidia.com/gpu=GPU-")
		must(t, err)
	})
}

// nvidiaCTK runs the toolkit's program.
func nvidiaCTK(t *testing.T, args ...string) {
	t.Helper()
	_, err := lab.CLI.Command(t.Context(), "", filepath.Join(nvidiahost.PackageDir, "nvidia-ctk"), args...)
	must(t, err)
}

// shows runs kubectl and expects its output to match.
func shows(t *testing.T, pattern string, args ...string) {
	t.Helper()
	text, err := lab.CLI.Kubectl(t.Context(), args...)
	must(t, err)
	if !regexp.MustCompile(pattern).MatchString(text) {
		t.Errorf("kubectl %s does not match %s:\n%s", strings.Join(args, " "), pattern, text)
	}
}

// served runs the unchanged pod, which must find its GPU and the driver's library.
func served(t *testing.T) {
	t.Helper()
	got, err := unchangedPod(t)
	if err != nil {
		t.Fatalf("the unchanged pod: %v", err)
	}
	if got.visible == "" {
		t.Error("the container has no NVIDIA_VISIBLE_DEVICES")
	}
}
