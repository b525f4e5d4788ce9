package testenv

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/divvy-gpu/divvy/lab/internal/docscript"
)

// Page reads a page of the documentation; the path is below the repository's root.
func (s *Env) Page(path string) (*docscript.Page, error) {
	source, err := os.ReadFile(filepath.Join(s.Repository, path))
	if err != nil {
		return nil, fmt.Errorf("read a page: %w", err)
	}
	return docscript.Parse(path, source)
}

// RunPage types the commands of a page, as a person at this lab would who stands in
// the root of the repository, and stops at the first that fails. Then it compares what
// they printed with what the page shows. Out receives the commands and what they print.
// More variables go over those of the environment.
func (s *Env) RunPage(ctx context.Context, page *docscript.Page, out io.Writer, variables ...string) error {
	cmd := exec.CommandContext(ctx, "bash", "-c", page.Script())
	cmd.Dir = s.Repository
	// At a timeout all that bash started ends with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	var said lastLines
	var printed strings.Builder
	cmd.Stdout = io.MultiWriter(out, &said, &printed)
	cmd.Stderr = cmd.Stdout
	for _, variable := range append(s.Environment(), variables...) {
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
func (s *Env) CheckShown(path, command, printed string) error {
	page, err := s.Page(path)
	if err != nil {
		return err
	}
	c, err := page.Find(command)
	if err != nil {
		return err
	}
	return page.CheckOutput(c, printed)
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
