package testenv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"

	"github.com/divvy-gpu/divvy/internal/report/why"
)

// Explain runs why about a pod or controller as a person does, and returns the explanation and
// the exit code.
func (c *CLI) Explain(ctx context.Context, namespace, target string) (why.Explanation, int, error) {
	var e why.Explanation
	code, err := c.answer(ctx, &e, "divvy", "why", "-n", namespace, target, "-o", "json")
	return e, code, err
}

// Defragment runs simulate --defragment as a person does, and returns the plan and the exit code.
func (c *CLI) Defragment(ctx context.Context) (why.Plan, int, error) {
	var p why.Plan
	code, err := c.answer(ctx, &p, "divvy", "simulate", "--defragment", "--from-cluster", "-o", "json")
	return p, code, err
}

// answer runs a command of kubectl that prints JSON, also where it exits with a code other than 0.
func (c *CLI) answer(ctx context.Context, into any, args ...string) (code int, err error) {
	text, err := c.Kubectl(ctx, args...)
	var exit *exec.ExitError
	if errors.As(err, &exit) && text != "" {
		code, err = exit.ExitCode(), nil
	}
	if err == nil {
		err = json.Unmarshal([]byte(text), into)
	}
	return code, err
}

// Advised returns the verified change of a kind that has a command; false for none.
func Advised(e *why.Explanation, kind why.ChangeKind) (why.Change, bool) {
	for i := range e.Changes {
		if c := &e.Changes[i]; c.Kind == kind && c.Verified && len(c.Commands) > 0 {
			return *c, true
		}
	}
	return why.Change{}, false
}

// CarryOut executes commands that why or simulate printed, exactly as they are printed, in a
// folder of their own: some write a file.
func (c *CLI) CarryOut(ctx context.Context, out io.Writer, commands ...string) (err error) {
	dir, err := os.MkdirTemp("", "divvy-advice-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for _, command := range commands {
		fmt.Fprintf(out, "$ %s\n", command)
		text, err := c.Command(ctx, "", "bash", "-c", "cd '"+dir+"' && "+command)
		if err != nil {
			return err
		}
		if text != "" {
			fmt.Fprintln(out, text)
		}
	}
	return nil
}
