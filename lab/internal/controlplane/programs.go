package controlplane

import (
	"context"
	"fmt"
	"io"
	"path/filepath"

	"github.com/divvy-gpu/divvy/lab/internal/build"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

// Programs are what a control plane with Divvy is made of.
type Programs struct {
	// BinDir has the programs of Kubernetes and etcd.
	BinDir string
	// Control is the path of divvy-control.
	Control string
	// Kubernetes and Etcd are versions, such as v1.37.1.
	Kubernetes, Etcd string
}

// wanted are the programs of the lab that a control plane runs. The others need
// libraries of the system, which nobody has installed for a control plane.
var wanted = []string{"etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager"}

// Build builds what is missing of a control plane's programs into the lab's cache,
// which takes long the first time, and this checkout's divvy-control into dir. Where
// control is not empty it is taken instead, as it is.
func Build(ctx context.Context, dir, control string, out io.Writer) (p Programs, err error) {
	labDir, err := layout.LabDir()
	if err != nil {
		return p, err
	}
	cache, err := layout.CacheDir()
	if err != nil {
		return p, err
	}
	builder := &build.Builder{Dir: labDir, CacheDir: cache, Components: build.Components(), Wanted: wanted, Out: out}
	if p.BinDir, err = builder.Run(ctx); err != nil {
		return p, err
	}
	versions, err := build.ReadVersions(build.ModuleDir(labDir))
	if err != nil {
		return p, err
	}
	p.Kubernetes, p.Etcd, p.Control = versions["k8s.io/kubernetes"], versions["go.etcd.io/etcd/server/v3"], control
	if control != "" {
		return p, nil
	}
	p.Control = filepath.Join(dir, "divvy-control")
	fmt.Fprintln(out, "Building divvy-control.")
	if err := build.RunGo(ctx, filepath.Dir(labDir), []string{"CGO_ENABLED=0"}, nil,
		"build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", p.Control, "./cmd/divvy-control"); err != nil {
		return p, fmt.Errorf("build divvy-control: %w", err)
	}
	return p, nil
}
