package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// Sight is what a container sees of cards.
type Sight struct {
	// Visible is ENFLAME_VISIBLE_DEVICES of its process, "" when it is not set.
	Visible string
	// Nodes are the device nodes gcu0, gcu1, ... in its /dev; of a container
	// that has ended they are not known.
	Nodes []string
	Ended bool
}

const visibleDevices = "ENFLAME_VISIBLE_DEVICES"

// see looks at a container from outside, through its first process, or for one
// that has ended at what it was started with.
func (a *Auditor) see(ctx context.Context, status corev1.ContainerStatus) (Sight, error) {
	if status.State.Running == nil {
		return a.seeEnded(ctx, status)
	}
	pid, err := testenv.ContainerPID(status.ContainerID)
	if err != nil {
		return Sight{}, err
	}
	seen, err := testenv.Look(pid)
	if err != nil {
		return Sight{}, err
	}
	return Sight{
		Visible: seen.Env[visibleDevices],
		Nodes:   slices.DeleteFunc(seen.Nodes, func(node string) bool { return !strings.HasPrefix(node, "gcu") }),
	}, nil
}

// seeEnded asks containerd what a container was started with. Kubelet keeps the
// container itself for a while.
func (a *Auditor) seeEnded(ctx context.Context, status corev1.ContainerStatus) (Sight, error) {
	_, id, _ := strings.Cut(status.ContainerID, "://")
	if id == "" {
		return Sight{}, errors.New("it was not started")
	}
	cmd := exec.CommandContext(ctx, a.lab.Cluster.Program("ctr"), "--address", layout.ContainerdSocket, "--namespace", "k8s.io",
		"containers", "info", id)
	out, err := cmd.Output()
	if err != nil {
		return Sight{}, fmt.Errorf("ask containerd about container %s: %w", id, err)
	}
	var info struct {
		Spec struct {
			Process struct {
				Env []string `json:"env"`
			} `json:"process"`
		}
	}
	if err := json.Unmarshal(out, &info); err != nil {
		return Sight{}, fmt.Errorf("what containerd says of container %s: %w", id, err)
	}
	return Sight{Visible: visible(info.Spec.Process.Env), Ended: true}, nil
}

func visible(environment []string) string {
	for _, variable := range environment {
		if value, ok := strings.CutPrefix(variable, visibleDevices+"="); ok {
			return value
		}
	}
	return ""
}
