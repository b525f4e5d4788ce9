package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/proc"
	"github.com/divvy-gpu/divvy/lab/internal/scheduler"
)

// stopGrace is how long a component may take to end after SIGTERM.
func stopGrace(component Component) time.Duration {
	if component == APIServer {
		// It answers nothing new from the first moment on, and then waits up to
		// a minute for watches that clients have no reason to end.
		return 5 * time.Second
	}
	return 30 * time.Second
}

// manifestPath is the static pod that kubelet runs, parkedManifest where it is
// kept while the scheduler is stopped.
var (
	manifestPath   = filepath.Join(layout.ManifestDir, scheduler.ManifestFile)
	parkedManifest = filepath.Join(layout.KubernetesDir, "parked-"+scheduler.ManifestFile)
)

// Start starts a component where it does not run and waits until it is ready.
func (c *Cluster) Start(ctx context.Context, component Component) error {
	if err := c.start(component); err != nil {
		return err
	}
	return c.WaitReady(ctx, component)
}

// Stop asks a component to end and waits until it has. The scheduler is
// stopped by taking its manifest away from kubelet, which must run.
func (c *Cluster) Stop(ctx context.Context, component Component) error {
	if d := c.daemon(component); d != nil {
		return d.Stop(ctx, stopGrace(component))
	}
	if err := os.Rename(manifestPath, parkedManifest); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("take the scheduler's manifest away: %w", err)
	}
	return poll.Until(ctx, stopGrace(component), "the end of kube-scheduler", func(context.Context) error {
		if processes := schedulerProcesses(); len(processes) > 0 {
			return fmt.Errorf("process %d still runs", processes[0].PID)
		}
		return nil
	})
}

// Kill ends a component with SIGKILL. Kubelet starts a killed scheduler again
// by itself; the others stay down until Start.
func (c *Cluster) Kill(ctx context.Context, component Component) error {
	if d := c.daemon(component); d != nil {
		return d.Kill(ctx)
	}
	for _, id := range schedulerProcesses() {
		if err := id.End(ctx, syscall.SIGKILL, 0); err != nil {
			return fmt.Errorf("kill kube-scheduler: %w", err)
		}
	}
	return nil
}

// Restart stops a component, starts it and waits until it is ready.
func (c *Cluster) Restart(ctx context.Context, component Component) error {
	if err := c.Stop(ctx, component); err != nil {
		return err
	}
	return c.Start(ctx, component)
}

// Running returns the process of a component.
func (c *Cluster) Running(component Component) (proc.ID, bool) {
	if d := c.daemon(component); d != nil {
		return d.Running()
	}
	processes := schedulerProcesses()
	if len(processes) == 0 {
		return proc.ID{}, false
	}
	return processes[0], true
}

// WaitReady waits until a component answers that it is ready.
func (c *Cluster) WaitReady(ctx context.Context, component Component) error {
	d := c.daemon(component)
	return poll.Until(ctx, readyTimeout, programName(component), func(ctx context.Context) error {
		err := c.Healthy(ctx, component)
		if err == nil || d == nil {
			return err
		}
		if _, running := d.Running(); !running {
			return fmt.Errorf("%s ended (%w); the end of %s:\n%s", d.Name, poll.ErrHopeless, d.LogPath(), d.LogTail(15))
		}
		return err
	})
}

func (c *Cluster) daemon(component Component) *proc.Daemon {
	return daemon(component, c.BinDir, c.nodeIP)
}

func (c *Cluster) start(component Component) error {
	if d := c.daemon(component); d != nil {
		return d.Start()
	}
	if _, err := os.Stat(manifestPath); err == nil {
		return nil
	}
	if err := os.Rename(parkedManifest, manifestPath); err != nil {
		return fmt.Errorf("put the scheduler's manifest back: %w", err)
	}
	return nil
}

// schedulerProcesses returns the processes of kube-scheduler, which has another
// path inside its container.
func schedulerProcesses() []proc.ID {
	var found []proc.ID
	for _, id := range proc.All() {
		if exe, err := id.Executable(); err == nil && exe == schedulerInImage && inKubepods(id) {
			found = append(found, id)
		}
	}
	return found
}

// SchedulerWired reports whether the scheduler's manifest was changed so that it
// asks Divvy's extender.
func SchedulerWired() (bool, error) {
	pod, err := readManifest()
	if err != nil {
		return false, err
	}
	return pod.Annotations[schedconf.AnnotationHash] != "", nil
}

func readManifest() (*corev1.Pod, error) {
	data, err := os.ReadFile(manifestPath)
	if err != nil {
		return nil, fmt.Errorf("read the scheduler's manifest: %w", err)
	}
	return parseManifest(data)
}

func parseManifest(data []byte) (*corev1.Pod, error) {
	pod := &corev1.Pod{}
	if err := yaml.Unmarshal(data, pod); err != nil {
		return nil, fmt.Errorf("the scheduler's manifest %s: %w", manifestPath, err)
	}
	return pod, nil
}
