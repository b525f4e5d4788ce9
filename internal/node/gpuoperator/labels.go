package gpuoperator

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Vendor is the vendor whose devices the operator manages, as the configuration names it.
const Vendor = "nvidia"

// Causes of ill health while the driver must be left alone.
const (
	// CauseDriverUpgrade: the operator replaces the driver.
	CauseDriverUpgrade = "driver-upgrade"
	// CauseMIGChange: the operator's MIG manager changes the MIG devices.
	CauseMIGChange = "mig-change"
	// CauseLabelsUnknown: the API server has not reported the node's labels yet.
	CauseLabelsUnknown = "labels-unknown"
)

// Labels by which the operator says what it does with a node.
const (
	// upgradeLabel is the state of a driver upgrade.
	upgradeLabel = "nvidia.com/gpu-driver-upgrade-state"
	// migLabel is the state of a change of MIG devices.
	migLabel = "nvidia.com/mig.config.state"
	// deployPrefix begins the labels that say which of the operator's own programs, and which
	// clients of the driver, may run on the node.
	deployPrefix = "nvidia.com/gpu.deploy."
)

// How the values of labels with deployPrefix end during a pause. The driver manager appends
// its own to values other than "true"; "false" stays.
const (
	pausedForUpgrade = "paused-for-driver-upgrade"
	pausedForMIG     = "paused-for-mig-change"
)

// upgrading are the states of an upgrade in which the driver may be unloaded at any moment. In
// validation-required, the next one, the new driver serves: the operator's validator then
// waits until the node offers GPUs. After upgrade-failed an administrator repairs the driver.
var upgrading = []string{
	"cordon-required", "wait-for-jobs-required", "pod-deletion-required", "drain-required", "node-maintenance-required",
	"post-maintenance-required", "pod-restart-required", "upgrade-failed",
}

// changing are the states of a change of MIG devices in which they are changed.
var changing = []string{"pending", "rebooting"}

// Unknown is the state of the devices until the node's labels are known.
func Unknown() accel.Health {
	return accel.Health{Unhealthy: true, Cause: CauseLabelsUnknown,
		Reason: "the API server has not reported the labels of the node yet, and NVIDIA's GPU operator may be replacing the driver"}
}

// Pause returns why the driver must be left alone while the node has these labels, healthy
// if it need not.
func Pause(labels map[string]string) accel.Health {
	if state := labels[upgradeLabel]; slices.Contains(upgrading, state) {
		return paused(CauseDriverUpgrade, upgradeLabel, state)
	}
	var mig accel.Health
	if state := labels[migLabel]; slices.Contains(changing, state) {
		mig = paused(CauseMIGChange, migLabel, state)
	}
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		if !strings.HasPrefix(key, deployPrefix) {
			continue
		}
		switch value := labels[key]; {
		case strings.HasSuffix(value, pausedForUpgrade):
			return paused(CauseDriverUpgrade, key, value)
		case strings.HasSuffix(value, pausedForMIG) && !mig.Unhealthy:
			mig = paused(CauseMIGChange, key, value)
		}
	}
	return mig
}

// doing is what the operator does, by cause.
var doing = map[string]string{
	CauseDriverUpgrade: "replaces the driver",
	CauseMIGChange:     "changes the MIG devices",
}

func paused(cause, label, value string) accel.Health {
	return accel.Health{Unhealthy: true, Cause: cause,
		Reason: fmt.Sprintf("NVIDIA's GPU operator %s: the node has the label %s=%s", doing[cause], label, value)}
}
