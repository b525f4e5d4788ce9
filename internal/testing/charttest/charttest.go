// Package charttest renders the chart for tests, with the helm that `make
// verify-chart` uses.
package charttest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
)

// KubeVersion is the Kubernetes that the chart is rendered for.
const KubeVersion = "1.37.1"

// Release and Namespace are those of the release that is rendered.
const (
	Release   = "divvy"
	Namespace = "divvy-system"
)

// Root returns the root of the checkout.
func Root() (string, error) {
	_, file, _, ok := runtime.Caller(0)
	if !ok {
		return "", errors.New("the sources of the chart were not found")
	}
	return filepath.Join(filepath.Dir(file), "..", "..", ".."), nil
}

// Helm returns the program that `make verify-chart` uses; it is built where it is
// not there yet.
var Helm = sync.OnceValues(func() (string, error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	module := filepath.Join(root, "lab", "components")
	data, err := os.ReadFile(filepath.Join(module, "go.mod"))
	if err != nil {
		return "", err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	program := filepath.Join(cache, "divvy", "tools", fmt.Sprintf("%x", sha256.Sum256(data))[:12], "helm")
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	cmd := exec.Command("go", "build", "-o", program, "helm.sh/helm/v3/cmd/helm")
	cmd.Dir, cmd.Env = module, append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build helm: %w\n%s", err, out)
	}
	return program, nil
})

// Render returns the text of all objects of the chart, hooks among them, with more
// arguments of `helm template`, such as --set.
func Render(ctx context.Context, args ...string) ([]byte, error) {
	root, err := Root()
	if err != nil {
		return nil, err
	}
	return RenderChart(ctx, filepath.Join(root, "charts", "divvy"), args...)
}

// RenderChart is Render of another copy of the chart.
func RenderChart(ctx context.Context, dir string, args ...string) ([]byte, error) {
	program, err := Helm()
	if err != nil {
		return nil, err
	}
	all := append([]string{
		"template", Release, dir, "--namespace", Namespace, "--kube-version", KubeVersion,
	}, args...)
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program, all...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, &stderr)
	}
	return stdout.Bytes(), nil
}
