package gpuoperator

import (
	"strings"
	"testing"
)

func TestPause(t *testing.T) {
	const client, plugin = "nvidia.com/gpu.deploy.client", "nvidia.com/gpu.deploy.device-plugin"
	for name, tt := range map[string]struct {
		labels      string // key=value, separated by spaces
		cause, says string // both "" for no pause
	}{
		"no labels":                      {},
		"an operator at rest":            {labels: client + "=true " + plugin + "=true nvidia.com/mig.config.state=success"},
		"the stock plugin is off":        {labels: plugin + "=false"},
		"an upgrade is due":              {labels: upgradeLabel + "=upgrade-required"},
		"the node is to be cordoned":     {upgradeLabel + "=cordon-required", CauseDriverUpgrade, upgradeLabel + "=cordon-required"},
		"jobs are waited for":            {upgradeLabel + "=wait-for-jobs-required", CauseDriverUpgrade, "replaces the driver"},
		"GPU pods are evicted":           {upgradeLabel + "=pod-deletion-required", CauseDriverUpgrade, ""},
		"the node is drained":            {upgradeLabel + "=drain-required", CauseDriverUpgrade, ""},
		"the driver's pod is restarted":  {upgradeLabel + "=pod-restart-required", CauseDriverUpgrade, ""},
		"the new driver is validated":    {labels: upgradeLabel + "=validation-required"},
		"the node is to be uncordoned":   {labels: upgradeLabel + "=uncordon-required"},
		"the upgrade is done":            {labels: upgradeLabel + "=upgrade-done"},
		"the upgrade failed":             {upgradeLabel + "=upgrade-failed", CauseDriverUpgrade, "upgrade-failed"},
		"a state of a release to come":   {labels: upgradeLabel + "=celebration-required"},
		"clients are paused for it":      {client + "=paused-for-driver-upgrade", CauseDriverUpgrade, client + "=paused-for"},
		"a value of someone else's":      {client + "=yes_paused-for-driver-upgrade", CauseDriverUpgrade, client + "=yes_paused"},
		"a release without client label": {plugin + "=paused-for-driver-upgrade", CauseDriverUpgrade, plugin + "="},
		"a MIG change begins":            {"nvidia.com/mig.config.state=pending", CauseMIGChange, "changes the MIG devices"},
		"the node restarts for it":       {"nvidia.com/mig.config.state=rebooting", CauseMIGChange, "rebooting"},
		"the MIG change failed":          {labels: "nvidia.com/mig.config.state=failed"},
		"clients are paused for MIG":     {client + "=paused-for-mig-change", CauseMIGChange, client},
		"both": {"nvidia.com/mig.config.state=pending " + client + "=paused-for-mig-change " + upgradeLabel + "=drain-required",
			CauseDriverUpgrade, "drain-required"},
		"a MIG change, and an upgrade by label of a program": {
			"nvidia.com/mig.config.state=pending " + plugin + "=paused-for-driver-upgrade", CauseDriverUpgrade, plugin},
		"a label of another program": {labels: "example.com/gpu.deploy.client=paused-for-driver-upgrade"},
	} {
		t.Run(name, func(t *testing.T) {
			labels := map[string]string{}
			for _, field := range strings.Fields(tt.labels) {
				key, value, _ := strings.Cut(field, "=")
				labels[key] = value
			}
			got := Pause(labels)
			if got.Cause != tt.cause || got.Unhealthy != (tt.cause != "") || !strings.Contains(got.Reason, tt.says) {
				t.Errorf("Pause = %+v, want cause %q and a reason with %q", got, tt.cause, tt.says)
			}
		})
	}
}
