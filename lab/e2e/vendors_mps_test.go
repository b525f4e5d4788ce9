//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/mps"
	"github.com/divvy-gpu/divvy/internal/testing/mpssim"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/limitshost"
	"github.com/divvy-gpu/divvy/lab/internal/nvidiahost"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// mpsDaemon is the part that runs MPS.
const mpsDaemon = "divvy-mps"

// mpsValues are those with which the second GPU is shared by MPS and the first is not shared.
const mpsValues = "sharedResources[0].devices.indexes={0},sharedResources[1].devices.indexes={1}," +
	"sharedResources[1].isolation=cooperative,node.vendors.nvidia.injection={cdi},node.vendors.nvidia.cdiDisableHooks={all}"

// beginMPS starts a test on cards of three vendors, of which MPS serves the second GPU, which it
// returns.
func beginMPS(t *testing.T) (context.Context, accel.DeviceID) {
	t.Helper()
	ctx := beginMixed(t)
	plain, err := lab.Cards(demos.Mixed)
	must(t, err)
	hardware, err := limitshost.SetUp(ctx, plain) // a driver with its libraries
	if errors.Is(err, limitshost.ErrUnified) {
		t.Skip(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		must(t, errors.Join(lab.SetHardware(ctx, plain), limitshost.TearDown(ctx), os.RemoveAll(nvidiahost.MPSControl)))
	})
	must(t, err)
	must(t, lab.SetHardware(ctx, hardware))
	withValues(t, ctx, mpsValues)
	t.Cleanup(func() { must(t, lab.Pods.DeleteAll(context.WithoutCancel(ctx))) })

	condition(t, wire.IsolationCondition, corev1.ConditionTrue, "there is no nvidia-cuda-mps-control in the driver's folder / of the host")
	module, err := layout.LabDir()
	must(t, err)
	must(t, nvidiahost.InstallMPS(ctx, module))
	stated(t, accel.TierCooperative)
	condition(t, wire.IsolationCondition, corev1.ConditionFalse, "")
	return ctx, accel.DeviceID(hardware.Cards[1].UUID)
}

// TestMPS: containers are clients of MPS with their shares, and the service ends with the tier.
func TestMPS(t *testing.T) {
	ctx, _ := beginMPS(t)
	client := asking("client", demos.GPUMemory, 3)
	client.Annotations = map[string]string{wire.IsolationAnnotation: "cooperative", wire.ComputeAnnotation: "40"}
	client.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", Value: "100"}}
	start(t, client)
	text, err := lab.Pods.Exec(ctx, "client", "app", "sh", "-c", "env | grep ^CUDA_MPS | sort; ls /run/nvidia-mps")
	must(t, err)
	for _, want := range []string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=3072M",
		"CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps", "\ncontrol"} {
		if !strings.Contains(text, want) {
			t.Errorf("the container has no %q:\n%s", want, text)
		}
	}

	// Without isolation the service stops, and gives the GPU back.
	must(t, lab.Pods.DeleteAll(ctx))
	must(t, reconfigure(ctx, mixed, "--set", strings.Replace(mpsValues, "=cooperative", "=none", 1)))
	must(t, lab.Divvy.Wait(ctx, settingTimeout))
	must(t, poll.Until(ctx, podTimeout, "divvy-mps to be gone", func(ctx context.Context) error {
		pods, err := lab.Divvy.Pods(ctx, mpsDaemon)
		if err == nil && len(pods) > 0 {
			err = fmt.Errorf("%d pods", len(pods))
		}
		return err
	}))
	stated(t, accel.TierNone)
	must(t, lab.Divvy.DeletePods(ctx, testenv.NodeDaemon))
}

// TestMPSStays: the tier outlasts another daemon, and is not stated during a fault.
func TestMPSStays(t *testing.T) {
	ctx, gpu := beginMPS(t)
	start(t, asking("client", demos.GPUMemory, 3))
	// A daemon that is replaced leaves MPS alone.
	before, err := lab.Divvy.Pod(ctx, mpsDaemon)
	must(t, err)
	must(t, lab.Divvy.Roll(ctx, podTimeout))
	after, err := lab.Divvy.Pod(ctx, mpsDaemon)
	must(t, err)
	if after.UID != before.UID || after.Status.ContainerStatuses[0].RestartCount != before.Status.ContainerStatuses[0].RestartCount {
		t.Error("the pod of divvy-mps was replaced or restarted with the node's daemon")
	}
	stated(t, accel.TierCooperative)

	fault := mpssim.State{Servers: []mpssim.Server{{PID: os.Getpid(), State: "FAULT"}}}
	must(t, mpssim.SetState(mps.PipeDir(mps.Dir, gpu), fault))
	condition(t, wire.IsolationCondition, corev1.ConditionTrue, "is in state FAULT")
	stated(t, accel.TierNone)
	picky := asking("picky", demos.GPUMemory, 3)
	picky.Annotations = map[string]string{wire.IsolationAnnotation: "cooperative"}
	pending(t, create(t, picky)[0], "isolation cooperative required, device states none")
	must(t, mpssim.SetState(mps.PipeDir(mps.Dir, gpu), mpssim.State{}))
	stated(t, accel.TierCooperative)
	running(t, "picky")
}
