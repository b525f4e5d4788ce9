//go:build e2e

package installation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/nvidiahost"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// driverVersion is that of demos.Mixed.
const driverVersion = "550.54.15"

// setupTimeout is how long the daemon may take to notice how a node is set up: it looks
// every 10 s.
const setupTimeout = time.Minute

// TestGPUOperator runs Divvy on nodes as NVIDIA's GPU operator leaves them, with the
// programs of its toolkit.
func TestGPUOperator(t *testing.T) {
	operatorNode(t)
	installWith(t, testenv.Options{
		Topology: demos.Mixed, Label: "nvidia.com/gpu.present",
		Values: []string{"../../examples/values/gpu-operator.yaml"},
		// These pods need no extender.
		Set: []string{"node.gpuOperator.clientLabel=false", "scheduler.mode=none"},
	})
	t.Run("driver upgrade", driverUpgrade)
	t.Run("MIG change", migChange)
	t.Run("setups", setups)
}

// TestMIG is `make demo-mig`.
func TestMIG(t *testing.T) {
	installWith(t, testenv.Options{
		Topology: demos.MIG, Values: []string{demos.MIGValues}, Label: demos.Present, Set: []string{"scheduler.mode=none"},
	})
	s := demos.New("mig", lab, t.Output())
	if err := errors.Join(s.MIG(t.Context()), s.Checks.Err()); err != nil {
		t.Fatal(err)
	}
}

// TestDRA is `make demo-dra`.
func TestDRA(t *testing.T) {
	installWith(t, testenv.Options{
		Topology: demos.DRATopology, Values: []string{demos.MixedValues, demos.DRAValues}, Label: demos.Present,
	})
	s := demos.New("dra", lab, t.Output())
	if err := errors.Join(s.DRA(t.Context()), s.Checks.Err()); err != nil {
		t.Fatal(err)
	}
}

// setups runs the unchanged pod of NVIDIA's documentation on nodes that are set up in each
// of the operator's ways, and looks for its GPU and for the driver's library in its
// container. The daemon finds the way out by itself, also when it changes.
func setups(t *testing.T) {
	ctx := t.Context()
	for _, way := range []struct {
		name    string
		toolkit nvidiahost.Toolkit
		runtime nvidiahost.Runtime
		// answer is what the daemon says that it answers with.
		answer string
		// visible is NVIDIA_VISIBLE_DEVICES in the container.
		visible string
	}{
		{name: "CDI", answer: "cdi", visible: "^void$"},
		{name: "CDI with NRI", runtime: nvidiahost.Runtime{NRI: true}, answer: "cdi", visible: "^void$"},
		{name: "NVIDIA's runtime as the default", runtime: nvidiahost.Runtime{NVIDIADefault: true}, answer: "environment",
			visible: "^(GPU-.*|void)$"},
		{name: "volume mounts", toolkit: nvidiahost.Toolkit{VolumeMounts: true}, runtime: nvidiahost.Runtime{NVIDIADefault: true},
			answer: "volumeMounts", visible: "^(/var/run/nvidia-container-devices|void)$"},
	} {
		t.Run(way.name, func(t *testing.T) {
			way.toolkit.DriverRoot = nvidiahost.DriverRoot
			must(t, nvidiahost.ConfigureToolkit(lab.Cluster.Program(""), way.toolkit))
			restartContainerd(t, way.runtime)
			answers(t, way.answer)
			got, err := unchangedPod(t)
			must(t, err)
			if !regexp.MustCompile(way.visible).MatchString(got.visible) {
				t.Errorf("NVIDIA_VISIBLE_DEVICES is %q, want %s", got.visible, way.visible)
			}
		})
	}
	// What the tests above look for is not there by itself.
	t.Run("device nodes alone", func(t *testing.T) {
		restartContainerd(t, nvidiahost.Runtime{})
		must(t, lab.Divvy.Upgrade(ctx, "node.vendors.nvidia.injection={deviceNodes}"))
		must(t, lab.Divvy.Wait(ctx, podTimeout))
		if _, err := unchangedPod(t); err == nil || !strings.Contains(err.Error(), "libcuda.so.1") {
			t.Errorf("a container without NVIDIA's libraries: %v", err)
		}
	})
}

// resumeTimeout is how soon devices are offered again after a pause: a promise of the
// product.
const resumeTimeout = 10 * time.Second

// driverUpgrade plays the labels that the operator sets while it replaces the driver of a
// node, in its order.
func driverUpgrade(t *testing.T) {
	const state = "nvidia.com/gpu-driver-upgrade-state"
	pause(t, state, []string{"upgrade-required", "cordon-required", "wait-for-jobs-required", "pod-deletion-required", "drain-required",
		"pod-restart-required"}, []string{"validation-required", "uncordon-required", "upgrade-done"},
		"replaces the driver", func(topology string) {
			must(t, os.RemoveAll(nvidiahost.DriverRoot))
			must(t, nvidiahost.InstallDriver(t.Context(), nvidiahost.DriverRoot, "580.95.05",
				[]byte(strings.Replace(topology, driverVersion, "580.95.05", 1))))
		})
	must(t, os.RemoveAll(nvidiahost.DriverRoot))
	topology, err := lab.Topology(demos.Mixed)
	must(t, err)
	must(t, nvidiahost.InstallDriver(t.Context(), nvidiahost.DriverRoot, driverVersion, []byte(topology)))
}

// migChange plays the labels that the operator's MIG manager sets while it changes the MIG
// devices of a node.
func migChange(t *testing.T) {
	pause(t, "nvidia.com/mig.config.state", []string{"pending", "rebooting"}, []string{"success"}, "changes the MIG devices",
		func(string) {})
}

// pause sets a label to the values of a pause and to those of its end. Meanwhile the daemon
// has no library of NVIDIA's, no pod is placed, and the pod that runs stays; change is made
// in between.
func pause(t *testing.T, label string, paused, ended []string, reason string, change func(topology string)) {
	t.Helper()
	ctx := t.Context()
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		must(t, errors.Join(lab.Node.Label(ctx, label, ""), lab.Pods.DeleteAll(ctx)))
	})
	offered(t, podTimeout, 2)
	life, err := lab.Divvy.DaemonLife(ctx)
	must(t, err)
	runPods(t, lab.Pods.New("stays", testenv.Asking("app", demos.GPU, 1)))
	if !mapsNVML(t) {
		t.Fatal("the daemon has not loaded NVIDIA's library, so its release would show nothing")
	}
	for i, value := range paused {
		must(t, lab.Node.Label(ctx, label, value))
		if value == "upgrade-required" {
			continue // the driver is still in use
		}
		must(t, poll.Until(ctx, podTimeout, "NVIDIA's library to be released", func(context.Context) error {
			if mapsNVML(t) {
				return errors.New("the daemon still has it")
			}
			return nil
		}))
		if i == len(paused)-1 {
			offered(t, podTimeout, 1) // the one that a container holds
		}
	}
	waits := lab.Pods.New("waits", testenv.Asking("app", demos.GPU, 1))
	createPod(t, waits)
	must(t, saysWhy(t, reason))
	topology, err := lab.Topology(demos.Mixed)
	must(t, err)
	change(topology)
	pod, err := lab.Pods.API.Get(ctx, "waits", metav1.GetOptions{})
	must(t, err)
	if pod.Spec.NodeName != "" {
		t.Errorf("during the pause a pod was placed: %s", testenv.Describe(pod))
	}
	if mapsNVML(t) {
		t.Error("during the pause the daemon loaded NVIDIA's library")
	}
	must(t, lab.Node.Label(ctx, label, ended[0]))
	offered(t, resumeTimeout, 2)
	for _, value := range ended[1:] {
		must(t, lab.Node.Label(ctx, label, value))
	}
	must(t, lab.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "stays", "waits"))
	if now, err := lab.Divvy.DaemonLife(ctx); err != nil || now != life {
		t.Errorf("the daemon was %s and is %s: %v", life, now, err)
	}
	must(t, lab.Pods.Delete(ctx, "stays", "waits"))
}

// offered waits until the node offers so many GPUs.
func offered(t *testing.T, within time.Duration, want int64) {
	t.Helper()
	_, err := lab.Node.WaitAllocatable(t.Context(), within, demos.GPU, want)
	must(t, err)
}

// saysWhy returns an error unless the node says of each of its GPUs that it is unhealthy for
// that reason.
func saysWhy(t *testing.T, reason string) error {
	t.Helper()
	return poll.Until(t.Context(), podTimeout, "the node to say "+reason, func(ctx context.Context) error {
		shares, err := lab.Node.Published(ctx, demos.GPU)
		if err != nil {
			return err
		}
		for _, s := range shares {
			if !strings.Contains(s.Health.Reason, reason) {
				return fmt.Errorf("%s is %+v", s.ID, s.Health)
			}
		}
		return nil
	})
}

// mapsNVML reports whether a library of NVIDIA's is in the daemon's memory.
func mapsNVML(t *testing.T) bool {
	t.Helper()
	pod, err := lab.Divvy.Pod(t.Context(), testenv.NodeDaemon)
	must(t, err)
	pid, err := testenv.ContainerPID(pod.Status.ContainerStatuses[0].ContainerID)
	must(t, err)
	return strings.Contains(string(read(t, fmt.Sprintf("/proc/%d/maps", pid))), "libnvidia-ml")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// operatorNode puts the operator's driver and its files on the node.
func operatorNode(t *testing.T) {
	t.Helper()
	cleanHost(t, "/run/nvidia", nvidiahost.ToolkitDir)
	topology, err := lab.Topology(demos.Mixed)
	must(t, err)
	must(t, nvidiahost.InstallDriver(t.Context(), nvidiahost.DriverRoot, driverVersion, []byte(topology)))
	installToolkit(t, nvidiahost.Toolkit{})
	must(t, os.MkdirAll(nvidiahost.Validations, 0o755))
	for _, ready := range []string{"driver-ready", "toolkit-ready"} {
		write(t, filepath.Join(nvidiahost.Validations, ready), nil)
	}
}

// containerdConfig is the configuration of the lab's containerd.
var containerdConfig = filepath.Join(layout.ConfigDir, "containerd.toml")

// cleanHost removes what a test makes at these paths after it, and puts containerd's
// configuration back. It lets containerd's configuration be found where it usually is.
func cleanHost(t *testing.T, made ...string) {
	t.Helper()
	const usual = "/etc/containerd"
	made = append(made, usual)
	original := read(t, containerdConfig)
	for _, path := range made {
		if _, err := os.Lstat(path); err == nil {
			t.Fatalf("%s exists: this node is in use with NVIDIA's GPUs", path)
		}
	}
	t.Cleanup(func() {
		write(t, containerdConfig, original)
		if err := lab.Cluster.Restart(context.WithoutCancel(t.Context()), cluster.Containerd); err != nil {
			t.Error(err)
		}
		for _, path := range made {
			if err := os.RemoveAll(path); err != nil {
				t.Error(err)
			}
		}
	})
	must(t, os.MkdirAll(usual, 0o755))
	must(t, os.Symlink(containerdConfig, filepath.Join(usual, "config.toml")))
}

// installToolkit installs the container toolkit, by default the operator's.
func installToolkit(t *testing.T, o nvidiahost.Toolkit) {
	t.Helper()
	o.DriverRoot = cmp.Or(o.DriverRoot, nvidiahost.DriverRoot)
	module := filepath.Join(lab.CLI.Repository, "lab")
	must(t, nvidiahost.InstallToolkit(t.Context(), module, lab.Cluster.Program(""), o))
}

// restartContainerd configures containerd for a way.
func restartContainerd(t *testing.T, r nvidiahost.Runtime) {
	t.Helper()
	plain := read(t, containerdConfig)
	t.Cleanup(func() { write(t, containerdConfig, plain) })
	changed, err := r.Configure(string(plain))
	must(t, err)
	write(t, containerdConfig, []byte(changed))
	must(t, lab.Cluster.Restart(t.Context(), cluster.Containerd))
}

// answers waits until the daemon answers in a way, by its own word.
func answers(t *testing.T, way string) {
	t.Helper()
	must(t, poll.Until(t.Context(), setupTimeout, "the daemon to answer by "+way, func(ctx context.Context) error {
		pod, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
		if err != nil {
			return err
		}
		text, err := testenv.Fetch(ctx, "http://"+pod.Status.PodIP+":9400/readyz?verbose")
		if err == nil && !strings.Contains(string(text), "reach containers by "+way+":") {
			err = errors.New(string(text))
		}
		return err
	}))
}

// container is what the pod sees.
type container struct {
	visible string
	gpus    []string
}

// unchangedPod runs the test pod of NVIDIA's article, and returns what is in its
// container, or what it lacks.
func unchangedPod(t *testing.T) (container, error) {
	t.Helper()
	ctx := t.Context()
	pod, err := lab.Pods.Example("nvidia-test-gpu.yaml")
	must(t, err)
	name := pod.Name
	defer func() { must(t, lab.Pods.Delete(context.WithoutCancel(ctx), name)) }()
	if _, err := lab.Pods.Create(ctx, pod); err != nil {
		return container{}, err
	}
	if err := lab.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, name); err != nil {
		return container{}, err
	}
	sight, err := lab.Pods.See(ctx, name)
	if err != nil {
		return container{}, err
	}
	got := container{visible: sight.Env["NVIDIA_VISIBLE_DEVICES"]}
	for _, node := range sight.Nodes {
		if regexp.MustCompile(`^nvidia[0-9]+$`).MatchString(node) {
			got.gpus = append(got.gpus, node)
		}
	}
	if len(got.gpus) != 1 || !slices.Contains(sight.Nodes, "nvidiactl") {
		return got, fmt.Errorf("the container has the device nodes %q, want one GPU and nvidiactl", sight.Nodes)
	}
	text, err := lab.Pods.Exec(ctx, name, pod.Spec.Containers[0].Name, "sh", "-c",
		"ls -l "+nvidiahost.Libraries+"/ && test -s "+nvidiahost.Libraries+"/libcuda.so.1")
	if err != nil || !strings.Contains(text, "libcuda.so."+driverVersion) {
		return got, fmt.Errorf("the container has no libcuda.so.1 of the driver: %w: %s", err, text)
	}
	return got, nil
}
