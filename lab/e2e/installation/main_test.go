//go:build e2e

// Package installation tests what an administrator does with Divvy on a real
// Kubernetes: installing it, wiring kube-scheduler, changing it, removing it. It
// brings up a lab without Divvy, or uses such a lab, and every test leaves it so.
// It needs root.
//
//	go test -tags e2e -count=1 ./e2e/installation
package installation

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const (
	namespace  = "divvy-installation"
	podTimeout = testenv.PodTimeout
)

// lab is set once by TestMain. Tests run one after the other: there is one
// kube-scheduler.
var lab *testenv.Env

func TestMain(m *testing.M) {
	code := testenv.Main(m, testenv.Options{Namespace: namespace, Bare: true},
		func(_ context.Context, s *testenv.Env) { lab, clean = s, !s.FoundLab() },
		func(context.Context) error { return nil })
	if code != 0 {
		os.Exit(code)
	}
}

// install installs Divvy with values of the chart, each as KEY=VALUE, over those
// of the lab, and takes it away after the test.
func install(t *testing.T, values ...string) {
	t.Helper()
	installWith(t, testenv.Options{Set: values})
}

// installWith is install with all options; the guide's cards and unit
// are the default.
func installWith(t *testing.T, o testenv.Options) {
	t.Helper()
	if o.Topology == "" {
		o.Topology = testenv.Guide
	}
	if o.MemoryUnit == "" {
		o.MemoryUnit = "1"
	}
	o.Out = os.Stderr
	manifest := read(t, schedulerManifest)
	// It is registered first, so that it also runs after half an installation.
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if err := errors.Join(lab.Pods.DeleteAll(ctx), lab.Remove(ctx)); err != nil {
			t.Errorf("take Divvy away after the test: %v", err)
		}
		if after := read(t, schedulerManifest); !bytes.Equal(after, manifest) {
			t.Errorf("kube-scheduler's manifest is not what it was before:\n%s", after)
		}
	})
	clean = false
	if err := lab.Install(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}
