package scheduler

import (
	"fmt"
	"strings"
)

// Extender says how kube-scheduler reaches Divvy's extender and for which
// resources it asks it.
type Extender struct {
	// URL is the prefix of the verbs' routes.
	URL string
	// Resources are the extended resources whose pods the extender places.
	Resources []string
}

// DivvyExtender is the extender as the chart installs it: on the host network
// of the control-plane node, under the routes that the user guide documents.
var DivvyExtender = Extender{
	URL:       "http://127.0.0.1:32766/gcushare-scheduler",
	Resources: []string{"enflame.com/gcu-memory", "iluvatar.com/gpu-memory", "nvidia.com/gpu-memory"},
}

// Config returns a KubeSchedulerConfiguration that is like the one of a
// scheduler without any, but for the extender. Pods that ask for none of the
// resources never reach it; pods that do are not scheduled without it.
func (e Extender) Config() []byte {
	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: true
clientConnection:
  kubeconfig: %s
extenders:
- urlPrefix: %s
  filterVerb: filter
  prioritizeVerb: prioritize
  weight: 1
  bindVerb: bind
  nodeCacheCapable: true
  ignorable: false
  httpTimeout: 10s
  managedResources:
`, Kubeconfig, e.URL)
	for _, r := range e.Resources {
		fmt.Fprintf(&b, "  - name: %s\n    ignoredByScheduler: false\n", r)
	}
	return []byte(b.String())
}
