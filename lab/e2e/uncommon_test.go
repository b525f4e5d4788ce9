//go:build e2e

package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// These tests have settings of their own. A change of the setting starts the daemon
// again, so they are beside each other, after those of the guide and before those of
// several vendors: the tests run in the order of the files' names.

func TestInjection(t *testing.T) {
	t.Run("cdi", func(t *testing.T) {
		with := guide
		with.injection = audit.CDI
		ctx := begin(t, with)
		start(t, one("first", 12), one("second", 12))
		wantCards(t, map[string]int{"first": 0, "second": 1})
		specs, err := filepath.Glob("/var/run/cdi/divvy-*")
		if err != nil || len(specs) == 0 {
			t.Errorf("CDI specifications on the host: %v, %v; want one", specs, err)
		}
		must(t, lab.Cluster.Restart(ctx, "kubelet"))
		wantCards(t, map[string]int{"first": 0, "second": 1})
	})
	t.Run("environment", func(t *testing.T) {
		with := guide
		with.injection = audit.Environment
		ctx := begin(t, with)
		start(t, one("first", 12), one("second", 12))
		wantCards(t, map[string]int{"first": 0, "second": 1})
		text, err := lab.Pods.Exec(ctx, "second", "app", "env")
		must(t, err)
		if !strings.Contains(text, "ENFLAME_VISIBLE_DEVICES=1") {
			t.Errorf("the environment in the container has no ENFLAME_VISIBLE_DEVICES=1:\n%s", text)
		}
	})
}

func TestCardsOfDifferentSizes(t *testing.T) {
	ctx := begin(t, setting{topology: "gcu-mixed.ini", unit: "1", injection: audit.DeviceNodes, units: 128, cards: 4})
	// Cards of 48, 32, 32 and 16: the fullest that fits is the smallest.
	start(t, one("large", 40), one("whole", 16), one("middle", 20), one("rest", 12))
	wantCards(t, map[string]int{"large": 0, "whole": 3, "middle": 1, "rest": 1})
	pending(t, create(t, one("too-large", 33))[0], noRoom)
	must(t, lab.Pods.Delete(ctx, "large"))
	running(t, "too-large")
	wantCards(t, map[string]int{"too-large": 0, "whole": 3, "middle": 1, "rest": 1})
	// What the largest card could hold and no other.
	if result := filter(t, ctx, 48, layout.NodeName); len(result.FailedNodes) != 1 {
		t.Errorf("48 units with the large card in use: %+v, want the node to be refused for now", result)
	}
	if result := filter(t, ctx, 49, layout.NodeName); len(result.FailedAndUnresolvableNodes) != 1 {
		t.Errorf("49 units: %+v, want the node to be refused for good", result)
	}
}

// TestFinestUnit is what the guide calls impossible.
func TestFinestUnit(t *testing.T) {
	ctx := begin(t, setting{topology: "gcu-8x32.ini", unit: "0.001", injection: audit.DeviceNodes, units: 256000, cards: 8})
	start(t, one("four", 4000), one("whole", 32000))
	wantCards(t, map[string]int{"four": 0, "whole": 1})
	pending(t, create(t, one("too-large", 32001))[0], noRoom)
	must(t, lab.Pods.Delete(ctx, "too-large"))

	daemon, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
	must(t, err)
	var pods []*corev1.Pod
	for i := range 8 {
		pods = append(pods, one(fmt.Sprint("many-", i), 14000))
	}
	createAtOnce(t, pods)
	running(t, namesOf(pods)...)
	agree(t)
	now, err := lab.Divvy.Pod(ctx, testenv.NodeDaemon)
	must(t, err)
	if now.UID != daemon.UID || now.Status.ContainerStatuses[0].RestartCount != daemon.Status.ContainerStatuses[0].RestartCount {
		t.Errorf("%s did not live through it: %s", testenv.NodeDaemon, testenv.Describe(now))
	}
}
