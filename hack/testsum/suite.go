package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"
)

// stopTime is how long a suite that was told to stop has to clean up: a lab
// takes its cluster down.
const stopTime = 2 * time.Minute

// runSuite runs a command and keeps the counts. Counts of an earlier run go
// first, so that a run that crashes leaves none behind.
func runSuite(ctx context.Context, dir, suite, seeds string, command []string, out io.Writer) error {
	names := []string{suite}
	if seeds != "" {
		names = append(names, seeds)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the folder for the counts: %w", err)
	}
	for _, name := range names {
		if err := os.Remove(file(dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove old counts: %w", err)
		}
	}

	fmt.Fprintf(out, "== %s: %s\n", suite, strings.Join(command, " "))
	rec := newRecorder(out, modulePath(ctx))
	started := time.Now()
	cmdErr := pipe(ctx, command, rec)
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &usage); err != nil {
		return fmt.Errorf("get the processor time of the suite: %w", err)
	}
	tests, fuzz := rec.split(seeds != "")
	tests.Suite, fuzz.Suite = suite, seeds
	for i, c := range []*counts{&tests, &fuzz} {
		c.Command = command
		c.Seconds = time.Since(started).Seconds()
		c.CPUSeconds = float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
		c.Race = slices.Contains(command, "-race")
		if cmdErr != nil && len(tests.Failed)+len(fuzz.Failed) == 0 {
			c.Error = cmdErr.Error()
		}
		if i < len(names) {
			if err := save(file(dir, names[i]), *c); err != nil {
				return err
			}
		}
	}
	fmt.Fprintf(out, "== %s: %d passed, %d failed, %d skipped\n\n", suite,
		tests.Passed+fuzz.Passed, len(tests.Failed)+len(fuzz.Failed), len(tests.Skipped)+len(fuzz.Skipped))
	if cmdErr != nil {
		return fmt.Errorf("%s: %w", suite, cmdErr)
	}
	return nil
}

// pipe runs the command and hands its output to rec.
func pipe(ctx context.Context, command []string, rec *recorder) error {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Stderr = rec.out
	// A group of its own: an interrupt then reaches the go command and its
	// tests once, from here.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = stopTime
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	readErr := rec.read(stdout)
	if readErr != nil {
		// The command must not block on a pipe that nobody reads.
		_, _ = io.Copy(io.Discard, stdout)
	}
	return errors.Join(cmd.Wait(), readErr)
}

// modulePath asks for the module of the working directory; "" when there is
// none, which makes names longer and nothing worse.
func modulePath(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "go", "list", "-m").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func save(path string, c counts) error {
	data, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the counts: %w", err)
	}
	if err := os.WriteFile(path, append(data, '\n'), 0o644); err != nil {
		return fmt.Errorf("keep the counts: %w", err)
	}
	return nil
}
