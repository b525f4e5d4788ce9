package remotepool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Exit codes of commands that did not run, as a shell gives them.
const (
	exitFailed      = 1
	exitNotRunnable = 126
	exitNotFound    = 127
)

// forwarded are the signals that the command gets as well.
var forwarded = []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2}

// Run leases GPUs, runs the command with these streams and gives them back. It
// returns the command's exit code; an error means that it did not run or lost
// its GPUs.
func (c *Client) Run(ctx context.Context, r Request, command []string, in io.Reader, out, errOut io.Writer) (code int, err error) {
	if len(command) == 0 {
		return exitFailed, errors.New("there is no command to run")
	}
	if err := c.Files.checkLibraries(); err != nil {
		return exitFailed, err
	}
	s, err := c.connect(ctx)
	if err != nil {
		return exitFailed, err
	}
	c.logf("INFO", "Query server %s gpu availability", s.address)
	var servers []Availability
	if err := s.get(ctx, availabilityPath, &servers); err != nil {
		return exitFailed, fmt.Errorf("query server %s: %w", s.address, cause(err))
	}
	var addresses []string
	for _, server := range servers {
		addresses = append(addresses, server.Address)
	}
	c.logf("INFO", "Choosing GPUs from server list [%s]", strings.Join(addresses, " "))
	l, err := s.lease(ctx, r)
	if err != nil {
		return exitFailed, fmt.Errorf("server %s: %w", s.address, cause(err))
	}
	defer l.give()
	c.logf("INFO", "Requesting GPUs %v with %d MiB of memory from server %d, with version %s...", l.GPUs, l.MemoryMB, l.Server, c.Version)
	fmt.Fprintf(c.Log, "Requested resources:\nServer List: %s\nClient idle timeout: 0 min\n", l.Address)
	saved, err := saveConfiguration(l.Lease)
	if err != nil {
		return exitFailed, err
	}
	defer os.Remove(saved) //nolint:errcheck // a file in a temporary folder
	c.logf("INFO", "Locked %d GPUs with partial memory %s, configuration saved to '%s'", len(l.GPUs),
		strconv.FormatFloat(float64(l.MemoryMB*1000/l.PhysMB)/1000, 'g', -1, 64), saved)
	c.logf("INFO", "Running client command '%s' on %d GPUs, with the following servers:", strings.Join(command, " "), len(l.GPUs))
	host, port, _ := net.SplitHostPort(l.Address)
	c.logf("INFO", "%s 55001 %s %s %s\n", host, l.ID, port, c.Version)
	return c.command(ctx, l, command, in, out, errOut)
}

// saveConfiguration writes what was granted to a file of its own.
func saveConfiguration(l Lease) (path string, err error) {
	file, err := os.CreateTemp("", "bitfusion")
	if err != nil {
		return "", fmt.Errorf("save the configuration: %w", err)
	}
	_, err = fmt.Fprintf(file, "server: %s\ngpus: %v\nmemory: %d\n", l.Address, l.GPUs, l.MemoryMB)
	return file.Name(), errors.Join(err, file.Close())
}

func environment(l Lease) []string {
	var gpus []string
	for _, g := range l.GPUs {
		gpus = append(gpus, strconv.Itoa(g))
	}
	return append(os.Environ(),
		"BITFUSION_SERVER="+l.Hostname, "BITFUSION_ADDRESS="+l.Address, "BITFUSION_GPUS="+strings.Join(gpus, ","),
		"BITFUSION_GPU_NAME="+l.Name, fmt.Sprintf("BITFUSION_MEMORY_MB=%d", l.MemoryMB))
}

// endGrace is how long the command may take to end when its GPUs are lost.
const endGrace = 5 * time.Second

func (c *Client) command(ctx context.Context, l *held, command []string, in io.Reader, out, errOut io.Writer) (int, error) {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = environment(l.Lease)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, errOut
	cmd.WaitDelay = endGrace
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, forwarded...)
	defer signal.Stop(signals)
	if err := cmd.Start(); err != nil {
		code := exitNotRunnable
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
			code = exitNotFound
		}
		return code, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	lost := l.lost
	var lostErr error
	for {
		select {
		case sig := <-signals:
			_ = cmd.Process.Signal(sig) // it may have ended just now
		case <-lost:
			lost = nil
			lostErr = fmt.Errorf("the connection to server %s was lost, and the GPUs with it", l.Address)
			_ = cmd.Process.Signal(syscall.SIGTERM)
			kill := time.AfterFunc(endGrace, func() { _ = cmd.Process.Kill() })
			defer kill.Stop() //nolint:gocritic // once: lost is nil from now on
		case err := <-ended:
			if lostErr != nil {
				return exitFailed, lostErr
			}
			return exitCode(err)
		}
	}
}

// exitCode is the code that a shell would give for a command that ended.
func exitCode(err error) (int, error) {
	var exit *exec.ExitError
	if err == nil {
		return 0, nil
	}
	if !errors.As(err, &exit) {
		return exitFailed, err
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal()), nil
	}
	return exit.ExitCode(), nil
}

// ParseRun reads the arguments of the client's command run: how many GPUs, what
// of each, filters, and the command that follows, with or without "--" before
// it. Without -p and -m a GPU is wanted whole.
func ParseRun(args []string) (r Request, command []string, err error) {
	for len(args) > 0 && strings.HasPrefix(args[0], "-") {
		name, value, inline := strings.Cut(args[0], "=")
		args = args[1:]
		if name == "--" && !inline {
			break
		}
		if !inline {
			if len(args) == 0 {
				return r, nil, fmt.Errorf("option %s needs a value", name)
			}
			value, args = args[0], args[1:]
		}
		switch name {
		case "-n", "--num_gpus":
			r.Amount, err = strconv.Atoi(value)
		case "-p", "--partial":
			r.Fraction, err = strconv.ParseFloat(value, 64)
		case "-m", "--memory":
			r.MemoryMB, err = strconv.ParseInt(value, 10, 64)
		case "--filter":
			r.Filters = append(r.Filters, value)
		default:
			return r, nil, fmt.Errorf("there is no option %s; known are -n, -p, -m and --filter", name)
		}
		if err != nil {
			return r, nil, fmt.Errorf("option %s: %q is not a number that it takes", name, value)
		}
	}
	if len(args) == 0 {
		return r, nil, errors.New("there is no command to run")
	}
	if r.Fraction == 0 && r.MemoryMB == 0 {
		r.Fraction = 1
	}
	if err := r.check(); err != nil {
		return r, nil, err
	}
	return r, args, nil
}
