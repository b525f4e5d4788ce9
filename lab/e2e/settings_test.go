//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// The logs on the host that the guide promises.
const (
	nodeLog     = "/var/log/topscloud/gcushare/gcushare-device-plugin.log"
	extenderLog = "/var/log/topscloud/gcushare/gcushare-scheduler-extender.log"
)

func logSize(t *testing.T, path string) int {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	return int(info.Size())
}

// logged checks that a log on the host has a text.
func logged(t *testing.T, path, text string) {
	t.Helper()
	must(t, poll.Until(t.Context(), agreeTimeout, fmt.Sprintf("%q in %s", text, path), func(context.Context) error {
		data, err := os.ReadFile(path)
		if err == nil && !strings.Contains(string(data), text) {
			err = fmt.Errorf("not among its %d bytes", len(data))
		}
		return err
	}))
}

func TestLogsOutliveTheContainers(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("logged-pod", 4))
	agree(t)
	logged(t, nodeLog, "logged-pod")
	logged(t, extenderLog, "logged-pod")
	size := map[string]int{nodeLog: logSize(t, nodeLog), extenderLog: logSize(t, extenderLog)}
	for _, part := range []string{testenv.NodeDaemon, testenv.Extender} {
		must(t, lab.Divvy.DeletePods(ctx, part))
	}
	must(t, lab.Divvy.Wait(ctx, settingTimeout))
	for path, before := range size {
		logged(t, path, "logged-pod")
		if after := logSize(t, path); after <= before {
			t.Errorf("%s had %d bytes and has %d after a restart, want more", path, before, after)
		}
	}
}

func TestPrograms(t *testing.T) {
	ctx := begin(t, guide)
	for _, name := range []string{"divvy-node", "divvy-control", "kubectl-divvy"} {
		text, err := lab.CLI.Command(ctx, "", filepath.Join(product.Programs(), name), "--version")
		if err != nil || !strings.HasPrefix(text, name) || !strings.Contains(text, "go1.") {
			t.Errorf("%s --version: %q, %v; want its name and version, and that of Go", name, text, err)
		}
	}
	body, err := testenv.Fetch(ctx, testenv.ExtenderURL+"/version")
	must(t, err)
	if strings.TrimSpace(string(body)) == "" {
		t.Error("/version of the extender is empty")
	}
}

// TestWrongSettings: mistakes are told, all at once, before anything changes.
func TestWrongSettings(t *testing.T) {
	ctx := begin(t, guide)
	for _, value := range []string{"memoryUnit=2", "memoryUnit=0.5", "node.injection=magic", "memoryunit=1"} {
		err := lab.Divvy.Upgrade(ctx, value)
		if key, _, _ := strings.Cut(value, "="); err == nil || !strings.Contains(err.Error(), strings.ReplaceAll(key, ".", "/")) {
			t.Errorf("helm upgrade with %s: %v; want an error that names the value", value, err)
		}
	}
	path := filepath.Join(t.TempDir(), "config.yaml")
	config := `apiVersion: config.divvy.dev/v1alpha1
kind: NodeConfig
logLevel: loud
injection: magic
resources:
- name: enflame.com/gcu-memory
  vendor: acme
  mode: memory
  memoryUnit: "2"
`
	must(t, os.WriteFile(path, []byte(config), 0o600))
	_, err := lab.CLI.Command(ctx, "", filepath.Join(product.Programs(), "divvy-node"), "--node-name=x", "--config="+path)
	if err == nil {
		t.Fatal("divvy-node started with a broken configuration")
	}
	for _, want := range []string{path, "logLevel", "injection", "vendor", "memoryUnit"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not name %s: %v", want, err)
		}
	}
	must(t, lab.Divvy.Ready(ctx))
}

// TestUnitStaysWhilePodsRun: a request would mean another amount. The API server
// refuses the change; where it could not ask, the daemon holds it back.
func TestUnitStaysWhilePodsRun(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("holder", 4))
	alive := lives(t)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		if err := errors.Join(lab.Pods.DeleteAll(ctx), change(ctx, guide), offered(ctx, guide)); err != nil {
			t.Errorf("put the unit back: %v", err)
		}
	})
	err := lab.Divvy.Upgrade(ctx, "memoryUnit=0.1")
	if err == nil {
		t.Fatal("the change was taken")
	}
	for _, want := range []string{`memoryUnit of enflame.com/gcu-memory cannot change from "1" to "0.1"`,
		namespace + "/holder", "Delete these pods"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("helm does not say %q: %v", want, err)
		}
	}
	must(t, lab.Divvy.Ready(ctx))

	// helm makes it again, after the configuration.
	must(t, lab.Client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Delete(ctx, "divvy-config", metav1.DeleteOptions{}))
	must(t, lab.Divvy.Upgrade(ctx, "memoryUnit=0.1"))
	must(t, poll.Until(ctx, settingTimeout, "divvy-node to say why the unit stays", func(ctx context.Context) error {
		err := lab.Divvy.Ready(ctx)
		if err == nil {
			return errors.New("it says that it is ready")
		}
		if !strings.Contains(err.Error(), "memoryUnit stays 1") || !strings.Contains(err.Error(), namespace+"/holder") {
			return err
		}
		return nil
	}))
	node, err := auditor.Inspect(ctx)
	must(t, err)
	if node.Total != 128 || node.Unit != "1" {
		t.Errorf("inspect shows %d units of %s GB, want 128 of 1", node.Total, node.Unit)
	}
	wantCards(t, map[string]int{"holder": 0})
	undisturbed(t, alive)
	start(t, one("second", 2)) // still in units of 1 GB
	wantCards(t, map[string]int{"holder": 0, "second": 0})

	must(t, lab.Pods.Delete(ctx, "holder", "second"))
	finer := guide
	finer.unit, finer.units = "0.1", 1280
	must(t, lab.Divvy.Wait(ctx, settingTimeout))
	must(t, offered(ctx, finer))
	current = finer
	start(t, one("fine", 40), one("finer", 115))
	wantCards(t, map[string]int{"fine": 0, "finer": 0})
}
