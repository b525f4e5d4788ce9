package build

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/mod/modfile"
)

// Component is one program of a Kubernetes that is built from a Go module.
type Component struct {
	// Name is the file name of the program.
	Name string
	// Package is the import path of its main package.
	Package string
	// Module is the module whose required version the program is stamped with.
	Module string
	// Stamp maps a variable of the program to a part of that version: "v" is
	// the version with its leading v, "plain" without, "major" and "minor" its
	// first two numbers.
	Stamp map[string]string
	// CGO says that the program needs a C compiler, Tags which build tags.
	CGO  bool
	Tags string
}

const (
	moduleKubernetes = "k8s.io/kubernetes"
	moduleContainerd = "github.com/containerd/containerd/v2"
	moduleCNI        = "github.com/containernetworking/plugins"
	moduleRunc       = "github.com/opencontainers/runc"
	moduleEtcd       = "go.etcd.io/etcd/server/v3"
	moduleHelm       = "helm.sh/helm/v3"
)

// Components returns everything the lab runs, the longest builds first: what
// they compile is shared by the others, so the time left shrinks as expected.
func Components() []Component {
	kubernetes := func(name string) Component {
		return Component{
			Name: name, Package: moduleKubernetes + "/cmd/" + name, Module: moduleKubernetes,
			Stamp: map[string]string{
				"k8s.io/component-base/version.gitVersion": "v",
				"k8s.io/component-base/version.gitMajor":   "major",
				"k8s.io/component-base/version.gitMinor":   "minor",
			},
		}
	}
	containerd := func(name string) Component {
		return Component{
			Name: name, Package: moduleContainerd + "/cmd/" + name, Module: moduleContainerd,
			Stamp: map[string]string{moduleContainerd + "/version.Version": "v"},
		}
	}
	cni := func(path string) Component {
		return Component{
			Name: filepath.Base(path), Package: moduleCNI + "/plugins/" + path, Module: moduleCNI,
			Stamp: map[string]string{moduleCNI + "/pkg/utils/buildversion.BuildVersion": "v"},
		}
	}
	return []Component{
		kubernetes("kubelet"),
		kubernetes("kube-apiserver"),
		kubernetes("kube-controller-manager"),
		kubernetes("kube-scheduler"),
		kubernetes("kube-proxy"),
		kubernetes("kubectl"),
		{Name: "etcd", Package: moduleEtcd, Module: moduleEtcd},
		containerd("containerd"),
		containerd("containerd-shim-runc-v2"),
		containerd("ctr"),
		{
			Name: "runc", Package: moduleRunc, Module: moduleRunc, CGO: true, Tags: "seccomp",
			Stamp: map[string]string{"main.version": "plain"},
		},
		cni("main/bridge"),
		cni("main/loopback"),
		cni("ipam/host-local"),
		cni("meta/portmap"),
		{
			Name: "helm", Package: moduleHelm + "/cmd/helm", Module: moduleHelm,
			Stamp: map[string]string{"helm.sh/helm/v3/internal/version.version": "v"},
		},
	}
}

// Versions holds the version that go.mod requires of each module.
type Versions map[string]string

// ReadVersions reads the requirements of the go.mod in dir.
func ReadVersions(dir string) (Versions, error) {
	path := filepath.Join(dir, "go.mod")
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the components' requirements: %w", err)
	}
	file, err := modfile.ParseLax(path, data, nil)
	if err != nil {
		return nil, fmt.Errorf("parse the components' requirements: %w", err)
	}
	versions := make(Versions, len(file.Require))
	for _, r := range file.Require {
		versions[r.Mod.Path] = r.Mod.Version
	}
	return versions, nil
}

// LinkerFlags returns the -ldflags of a component: no symbol tables, which
// halves the size, and its version.
func (c Component) LinkerFlags(versions Versions) (string, error) {
	flags := []string{"-s", "-w"}
	if len(c.Stamp) == 0 {
		return strings.Join(flags, " "), nil
	}
	version, ok := versions[c.Module]
	if !ok {
		return "", fmt.Errorf("%s: go.mod does not require %s", c.Name, c.Module)
	}
	parts := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	if len(parts) != 3 {
		return "", fmt.Errorf("%s: version %q of %s is not major.minor.patch", c.Name, version, c.Module)
	}
	values := map[string]string{
		"v": version, "plain": strings.TrimPrefix(version, "v"), "major": parts[0], "minor": parts[1],
	}
	for _, variable := range sortedKeys(c.Stamp) {
		value, ok := values[c.Stamp[variable]]
		if !ok {
			return "", fmt.Errorf("%s: unknown part %q of a version", c.Name, c.Stamp[variable])
		}
		flags = append(flags, "-X", variable+"="+value)
	}
	return strings.Join(flags, " "), nil
}

// Key names one set of built programs: it changes with any dependency, with
// how something is built, and with the compiler.
func Key(goSum []byte, components []Component, goVersion string) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%d\n", goVersion, len(goSum))
	h.Write(goSum)
	for _, c := range components {
		fmt.Fprintf(h, "%q %q %q %t %q", c.Name, c.Package, c.Module, c.CGO, c.Tags)
		for _, variable := range sortedKeys(c.Stamp) {
			fmt.Fprintf(h, " %q=%q", variable, c.Stamp[variable])
		}
		fmt.Fprintln(h)
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}
