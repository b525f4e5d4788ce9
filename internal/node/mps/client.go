package mps

import (
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// commandTimeout bounds a command to a control daemon.
const commandTimeout = 5 * time.Second

// Tool makes a command of the vendor's program nvidia-cuda-mps-control, with arguments and a
// GPU's environment.
type Tool func(ctx context.Context, env []string, args ...string) (*exec.Cmd, error)

// control sends commands to a control daemon.
type control struct {
	tool Tool
	env  []string
}

// maxAnswer bounds what is kept of an answer: the ids of some thousand processes.
const maxAnswer = 64 << 10

var errLong = fmt.Errorf("the answer of the control daemon of MPS is longer than %d bytes", maxAnswer)

// answer is output that ends with an error where it is too long.
type answer struct{ text []byte }

func (a *answer) Write(p []byte) (int, error) {
	kept := p[:min(len(p), maxAnswer-len(a.text))]
	if a.text = append(a.text, kept...); len(kept) < len(p) {
		return len(kept), errLong
	}
	return len(kept), nil
}

// send sends a command and returns the answer.
func (c control) send(ctx context.Context, command string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	cmd, err := c.tool(ctx, c.env)
	if err != nil {
		return "", err
	}
	var out, problem answer
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = strings.NewReader(command+"\n"), &out, &problem, time.Second
	err = cmd.Run()
	switch {
	case len(out.text) == maxAnswer || len(problem.text) == maxAnswer:
		return "", fmt.Errorf("%s: %w", command, errLong)
	case ctx.Err() != nil:
		return "", fmt.Errorf("%s: the control daemon of MPS did not answer within %v", command, commandTimeout)
	case err != nil:
		return "", fmt.Errorf("%s: %w: %s", command, err, firstLine(string(problem.text)+string(out.text)))
	}
	return strings.TrimSpace(string(out.text)), nil
}

// servers returns the servers of a control daemon with their clients.
func (c control) servers(ctx context.Context) ([]Server, error) {
	pids, err := c.pids(ctx, "get_server_list")
	if err != nil {
		return nil, err
	}
	var out []Server
	for _, pid := range pids {
		s := Server{PID: pid}
		if s.State, err = c.send(ctx, fmt.Sprintf("get_server_status %d", pid)); err != nil {
			return nil, err
		}
		s.State = firstLine(s.State)
		if s.Clients, err = c.pids(ctx, fmt.Sprintf("get_client_list %d", pid)); err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

// pids sends a command whose answer is a process's id in each line.
func (c control) pids(ctx context.Context, command string) ([]int, error) {
	text, err := c.send(ctx, command)
	if err != nil {
		return nil, err
	}
	var out []int
	for line := range strings.Lines(text) {
		pid, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil || pid <= 0 {
			return nil, fmt.Errorf("%s: the answer %q is not a list of processes", command, firstLine(text))
		}
		out = append(out, pid)
	}
	return out, nil
}

// firstLine returns the beginning of a text, for a message.
func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return strings.ToValidUTF8(line[:min(len(line), 300)], "?")
}
