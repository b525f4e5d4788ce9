package testenv

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// Environment returns the environment of a person at this lab: KUBECONFIG, and
// the lab's and the product's programs first in PATH.
func (s *Env) Environment() []string {
	helm := filepath.Join(layout.StateDir, "helm")
	return append(os.Environ(),
		"KUBECONFIG="+s.Cluster.Kubeconfig(),
		"PATH="+product.Programs()+":"+s.Cluster.BinDir()+":"+os.Getenv("PATH"),
		"HELM_CACHE_HOME="+filepath.Join(helm, "cache"),
		"HELM_CONFIG_HOME="+filepath.Join(helm, "config"),
		"HELM_DATA_HOME="+filepath.Join(helm, "data"))
}

// Kubectl runs kubectl and returns what it printed, trimmed.
func (s *Env) Kubectl(ctx context.Context, args ...string) (string, error) {
	return s.Command(ctx, "", s.Cluster.Program("kubectl"), args...)
}

// Helm runs helm and returns what it printed, trimmed.
func (s *Env) Helm(ctx context.Context, args ...string) (string, error) {
	return s.Command(ctx, "", s.Cluster.Program("helm"), args...)
}

// Exec runs a command in a container of a pod and returns its output.
func (s *Env) Exec(ctx context.Context, pod, container string, command ...string) (string, error) {
	args := []string{"exec", "--namespace", s.Namespace, pod, "--container", container, "--"}
	return s.Kubectl(ctx, append(args, command...)...)
}

// Command runs a program with the input and returns its standard output,
// trimmed. The error has what it wrote to standard error.
func (s *Env) Command(ctx context.Context, input, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = s.Environment()
	cmd.Stdin = strings.NewReader(input)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return strings.TrimSpace(stdout.String()), fmt.Errorf("%s %s: %w: %s",
			filepath.Base(program), strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(stdout.String()), nil
}
