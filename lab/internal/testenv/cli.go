package testenv

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/docscript"
	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// CLI runs programs as a person at this lab does.
type CLI struct {
	Cluster *cluster.Cluster
	// Repository is the root of the checkout.
	Repository string
}

func (c *CLI) chart() string { return filepath.Join(c.Repository, "charts", "divvy") }

func (c *CLI) valuesPaths(names []string) []string {
	var paths []string
	for _, name := range names {
		paths = append(paths, filepath.Join(c.Repository, "lab", "values", name))
	}
	return paths
}

// Environment returns the environment of a person at this lab: KUBECONFIG, and
// the lab's and the product's programs first in PATH.
func (c *CLI) Environment() []string {
	return append(product.Environment(), "PATH="+product.Programs()+":"+c.Cluster.BinDir+":"+os.Getenv("PATH"))
}

// Kubectl runs kubectl and returns what it printed, trimmed.
func (c *CLI) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.Command(ctx, "", c.Cluster.Program("kubectl"), args...)
}

// Helm runs helm and returns what it printed, trimmed.
func (c *CLI) Helm(ctx context.Context, args ...string) (string, error) {
	return c.Command(ctx, "", c.Cluster.Program("helm"), args...)
}

// Command runs a program with the input and returns its standard output,
// trimmed. The error has what it wrote to standard error.
func (c *CLI) Command(ctx context.Context, input, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = c.Environment()
	cmd.Stdin = strings.NewReader(input)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return strings.TrimSpace(stdout.String()), fmt.Errorf("%s %s: %w: %s",
			filepath.Base(program), strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(stdout.String()), nil
}

// Example returns the path of an example.
func (c *CLI) Example(name string) string { return filepath.Join(c.Repository, "examples", name) }

// Page reads a page of the documentation; the path is below the repository's root.
func (c *CLI) Page(path string) (*docscript.Page, error) {
	source, err := os.ReadFile(filepath.Join(c.Repository, path))
	if err != nil {
		return nil, fmt.Errorf("read a page: %w", err)
	}
	return docscript.Parse(path, source)
}

// RunPage types the commands of a page, as a person at this lab would who stands in
// the root of the repository, and stops at the first that fails. Then it compares what
// they printed with what the page shows. Out receives the commands and what they print.
// More variables go over those of the environment.
func (c *CLI) RunPage(ctx context.Context, page *docscript.Page, out io.Writer, variables ...string) error {
	cmd := exec.CommandContext(ctx, "bash", "-c", page.Script())
	cmd.Dir = c.Repository
	// At a timeout all that bash started ends with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	var said lastLines
	var printed strings.Builder
	cmd.Stdout = io.MultiWriter(out, &said, &printed)
	cmd.Stderr = cmd.Stdout
	for _, variable := range append(c.Environment(), variables...) {
		// The flags of a make that runs this are not those of a make on the page.
		if !strings.HasPrefix(variable, "MAKE") && !strings.HasPrefix(variable, "MFLAGS=") {
			cmd.Env = append(cmd.Env, variable)
		}
	}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("the commands of %s: %w: %s", page.Path, err, said)
	}
	return page.Check(printed.String())
}

// CheckShown compares what was printed with what a page shows below the command that
// prints it, where another runs it than the page's test.
func (c *CLI) CheckShown(path, command, printed string) error {
	page, err := c.Page(path)
	if err != nil {
		return err
	}
	found, err := page.Find(command)
	if err != nil {
		return err
	}
	return page.CheckOutput(found, printed)
}

// lastLines keeps the last lines that were written, as one: the command that failed is
// mostly among them.
type lastLines []string

func (l *lastLines) Write(text []byte) (int, error) {
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" {
			*l = append(*l, line)
		}
	}
	*l = (*l)[max(0, len(*l)-6):]
	return len(text), nil
}

func (l lastLines) String() string { return strings.Join(l, " | ") }
