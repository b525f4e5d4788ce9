package stage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/divvy-gpu/divvy/lab/internal/docscript"
	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// helmOfReader is helm as a reader of the documentation has it, but for the images,
// which are in no registry: what installs or renders the chart gets the lab's.
const helmOfReader = `#!/bin/bash
# helm, with the images of the lab.
for word in "$@"; do
  case "$word" in
    install|upgrade|template) exec %[1]q "$@" --values %[2]q --values %[3]q ;;
    -*) ;;
    *) break ;;
  esac
done
exec %[1]q "$@"
`

// Page reads a page of the documentation; the path is below the repository's root.
func (s *Stage) Page(path string) (*docscript.Page, error) {
	source, err := os.ReadFile(filepath.Join(s.Repository, path))
	if err != nil {
		return nil, fmt.Errorf("read a page: %w", err)
	}
	return docscript.Parse(path, source)
}

// RunPage types the commands of a page, as a person at this lab would who stands in
// the root of the repository, and stops at the first that fails. Then it compares what
// they printed with what the page shows. Out receives the commands and what they print.
func (s *Stage) RunPage(ctx context.Context, page *docscript.Page, out io.Writer) (err error) {
	bin, err := os.MkdirTemp("", "divvy-reader-*")
	if err != nil {
		return fmt.Errorf("a folder for the reader's programs: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(bin)) }()
	helm := fmt.Sprintf(helmOfReader, s.Cluster.Program("helm"), filepath.Join(s.Repository, "lab", "values", "reader.yaml"), product.ImageValues())
	if err := os.WriteFile(filepath.Join(bin, "helm"), []byte(helm), 0o755); err != nil {
		return fmt.Errorf("the reader's helm: %w", err)
	}
	cmd := exec.CommandContext(ctx, "bash", "-c", page.Script())
	cmd.Dir = s.Repository
	var said lastLines
	var printed strings.Builder
	cmd.Stdout = io.MultiWriter(out, &said, &printed)
	cmd.Stderr = cmd.Stdout
	for _, variable := range s.Environment() {
		if path, ok := strings.CutPrefix(variable, "PATH="); ok {
			variable = "PATH=" + bin + ":" + path
		}
		cmd.Env = append(cmd.Env, variable)
	}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("the commands of %s: %w: %s", page.Path, err, said)
	}
	return page.Check(printed.String())
}

// CheckShown compares what was printed with what a page shows below the command that
// prints it, where another runs it than the page's test.
func (s *Stage) CheckShown(path, command, printed string) error {
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
