package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/lab/internal/build"
	"github.com/divvy-gpu/divvy/lab/internal/hardware"
	"github.com/divvy-gpu/divvy/lab/internal/host"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/proc"
	"github.com/divvy-gpu/divvy/lab/internal/progress"
	"github.com/divvy-gpu/divvy/lab/internal/scheduler"
)

// UpOptions say what Up brings up.
type UpOptions struct {
	// LabDir is the folder of the lab's Go module.
	LabDir string
	// BinDir holds the built programs.
	BinDir string
	// Out receives the progress.
	Out io.Writer
}

// kubeletSysctls are settings that kubelet changes when it starts.
var kubeletSysctls = []string{
	"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
	"kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
}

// networkSysctls are settings without which pods reach neither each other
// through a service nor the world.
var networkSysctls = map[string]string{
	"net/ipv4/ip_forward":                "1",
	"net/bridge/bridge-nf-call-iptables": "1",
}

// Up brings the cluster up, or what is missing of it; where it is up already
// nothing changes. After a failure, Up may be called again, or Down.
func Up(ctx context.Context, o UpOptions) (*Cluster, error) {
	c, err := prepare(ctx, o)
	if err != nil {
		return nil, err
	}
	report := progress.New(o.Out, 8)
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
	fresh := func(components ...Component) error {
		group, ctx := errgroup.WithContext(ctx)
		for _, component := range components {
			group.Go(func() error { return c.ensure(ctx, component) })
		}
		return group.Wait()
	}
	step("keys and configuration", func() error { return c.writeConfig() })
	step("containerd and etcd", func() error { return fresh(Containerd, Etcd) })
	step("kube-apiserver", func() error { return fresh(APIServer) })
	step("images", func() error { return c.loadImages(ctx, o.LabDir) })
	step("kube-controller-manager", func() error { return fresh(ControllerManager) })
	step("kubelet and kube-proxy", func() error {
		if err := c.ensureSchedulerManifest(); err != nil {
			return err
		}
		return fresh(Kubelet, Proxy)
	})
	step("node "+layout.NodeName, func() error {
		return poll.Until(ctx, readyTimeout, "the node", prepareNode)
	})
	step("kube-scheduler", func() error { return c.WaitReady(ctx, Scheduler) })
	if err != nil {
		return nil, fmt.Errorf("the lab did not come up: %w\nLogs are in %s; `lab down` takes away what was started", err, layout.LogDir)
	}
	return c, nil
}

// prepare notes what the machine is like, refuses where another Kubernetes
// lives, and changes the kernel's settings.
func prepare(ctx context.Context, o UpOptions) (*Cluster, error) {
	record, err := host.LoadRecord(recordPath)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if record, err = newRecord(ctx); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	case !host.HasAddress(record.NodeIP):
		return nil, fmt.Errorf("this machine no longer has the address %s that the lab was made for: run `lab down`, then `lab up`",
			record.NodeIP)
	}
	versions, err := build.ReadVersions(build.ModuleDir(o.LabDir))
	if err != nil {
		return nil, err
	}
	record.KubernetesVersion = versions["k8s.io/kubernetes"]
	record.BinDirs = append(slices.DeleteFunc(record.BinDirs, func(d string) bool { return d == o.BinDir }), o.BinDir)
	c := &Cluster{BinDir: o.BinDir, nodeIP: record.NodeIP, record: record}
	for _, component := range Components() {
		if _, running := c.Running(component); running {
			continue
		}
		for _, address := range listenAddresses(component, c.nodeIP) {
			if err := host.CheckPortFree(address, programName(component)); err != nil {
				return nil, err
			}
		}
	}
	for _, name := range kubeletSysctls {
		if err := record.KeepSysctl(name); err != nil {
			return nil, err
		}
	}
	if err := record.Save(); err != nil {
		return nil, err
	}
	for name, value := range networkSysctls {
		if err := record.SetSysctl(name, value); err != nil {
			return nil, err
		}
	}
	shared, err := host.ShareRoot()
	if err != nil {
		return nil, err
	}
	if shared {
		record.RootMadeShared = true
		if err := record.Save(); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// newRecord looks at the machine before anything is changed.
func newRecord(ctx context.Context) (*host.Record, error) {
	record := host.NewRecord(recordPath)
	if err := record.Claim(append(layout.HostPaths(), layout.StateDir)...); err != nil {
		return nil, err
	}
	record.Note(layout.SharedPaths()...)
	// Down ends every process in kubepods. In a pod that sees its host's control
	// groups that is every process here, this one included.
	if self, err := proc.Lookup(os.Getpid()); err != nil {
		return nil, err
	} else if inKubepods(self) {
		return nil, errors.New("this is itself a pod of a Kubernetes, whose control groups cannot be told from the lab's; use another " +
			"machine")
	}
	cgroups, err := host.Cgroups(kubepods)
	if err != nil {
		return nil, err
	}
	if len(cgroups) > 0 {
		return nil, fmt.Errorf("%s exists: another kubelet runs, or ran, on this machine", cgroups[0])
	}
	if record.FilterTables, err = host.FilterTables(ctx); err != nil {
		return nil, err
	}
	if record.NodeIP, err = host.PrimaryIP(); err != nil {
		return nil, err
	}
	if err := host.CheckNetworks(layout.BridgeName, layout.PodCIDR, layout.ServiceCIDR); err != nil {
		return nil, err
	}
	return record, nil
}

// writeConfig makes folders, keys and configuration files.
func (c *Cluster) writeConfig() error {
	for _, dir := range []string{
		layout.StateDir, layout.RunDir, layout.LogDir, layout.PIDDir, layout.KubernetesDir, layout.ManifestDir, layout.KubeletDir,
	} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make a folder of the lab: %w", err)
		}
	}
	// etcd insists on a folder that is its own.
	if err := os.MkdirAll(layout.EtcdDir, 0o700); err != nil {
		return fmt.Errorf("make a folder of the lab: %w", err)
	}
	if err := hardware.Default.Restore(); err != nil {
		return err
	}
	if err := ensureCredentials(c.nodeIP); err != nil {
		return err
	}
	files, err := renderAll(newValues(c.BinDir, c.nodeIP))
	if err != nil {
		return err
	}
	for path, data := range files {
		mode := fs.FileMode(0o644)
		if bytes.HasPrefix(data, []byte("#!")) {
			mode = 0o755
		}
		if err := writeFile(path, data, mode); err != nil {
			return err
		}
	}
	return nil
}

// ensure starts a component, or starts it anew where it runs with settings of
// an earlier version, and waits until it is ready.
func (c *Cluster) ensure(ctx context.Context, component Component) error {
	if d := c.daemon(component); d != nil && d.Stale() {
		if err := d.Stop(ctx, stopGrace(component)); err != nil {
			return err
		}
	}
	return c.Start(ctx, component)
}

// ensureSchedulerManifest makes kubelet run a scheduler of this version. What
// others have put into its manifest stays: Divvy wires it to its extender.
func (c *Cluster) ensureSchedulerManifest() error {
	if err := c.start(Scheduler); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	image := c.schedulerImage()
	pod, err := readManifest()
	if err == nil && len(pod.Spec.Containers) == 1 && pod.Spec.Containers[0].Image == image {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	manifest, err := scheduler.Manifest(image)
	if err != nil {
		return err
	}
	return writeFile(manifestPath, manifest, 0o600)
}

// MakeFolder makes a folder outside of the lab's own places for pods of the
// cluster, where there is none, and remembers to take it away with the lab. One
// that exists is somebody else's and left as it is.
func (c *Cluster) MakeFolder(path string) error {
	if _, err := os.Lstat(path); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	c.record.Note(path)
	if err := c.record.Save(); err != nil {
		return err
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return fmt.Errorf("make a folder for pods: %w", err)
	}
	return nil
}

// controlPlaneLabel marks the node as kubeadm does; kubelet may not set it.
const controlPlaneLabel = "node-role.kubernetes.io/control-plane"

// prepareNode returns nil when pods can be created for the node: it is ready,
// labelled, and the default service account exists.
func prepareNode(ctx context.Context) error {
	if err := nodeReady(ctx); err != nil {
		return err
	}
	client, err := Client()
	if err != nil {
		return err
	}
	if err := LabelNode(ctx, controlPlaneLabel, ""); err != nil {
		return err
	}
	_, err = client.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Get(ctx, "default", metav1.GetOptions{})
	return err
}

// LabelNode sets a label of the node.
func LabelNode(ctx context.Context, key, value string) error {
	client, err := Client()
	if err != nil {
		return err
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]string{key: value}}})
	if err != nil {
		return fmt.Errorf("label the node: %w", err)
	}
	_, err = client.CoreV1().Nodes().Patch(ctx, layout.NodeName, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return fmt.Errorf("label the node: %w", err)
	}
	return nil
}
