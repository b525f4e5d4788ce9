package nvidia

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// maxAnswer is more than any answer of the generator has, in bytes: a node with
	// 16 GPUs of 7 partitions each has some 200 KiB.
	maxAnswer = 16 << 20
	// maxLine is how much of a line of its diagnostics is kept, in bytes.
	maxLine = 1 << 10
	// killGrace is how long a process may take to end that was killed.
	killGrace = 10 * time.Second
)

// child runs the generator, one process at a time. It is safe for concurrent use.
type child struct {
	mu sync.Mutex
	// ended is closed when the last process ended; nil before the first one. The
	// driver may hold a process that cannot even be killed.
	ended chan struct{}
}

// run starts the command with in as standard input and returns its standard output.
// It ends soon after ctx or limit, and its error has the reason among the diagnostics.
func (c *child) run(ctx context.Context, command []string, limit time.Duration, in []byte) ([]byte, error) {
	if len(command) == 0 {
		return nil, errors.New("this program has no generator")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended != nil {
		select {
		case <-c.ended:
		default:
			return nil, errors.New("the generator was killed because it exceeded its time limit, and has not exited since: " +
				"the driver does not respond")
		}
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	out, log := &capped{limit: maxAnswer}, &diagnostics{}
	cmd := exec.CommandContext(limited, command[0], command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), out, log
	cmd.WaitDelay = killGrace / 2
	var err error
	ended := make(chan struct{})
	c.ended = ended
	go func() {
		defer close(ended)
		err = cmd.Run()
	}()
	select {
	case <-ended:
	case <-limited.Done():
		select {
		case <-ended:
		case <-time.After(killGrace):
			return nil, fmt.Errorf("the generator exceeded its time limit of %v and could not be killed", limit)
		}
	}
	switch {
	case err == nil && out.full:
		return nil, fmt.Errorf("the generator's answer exceeds %d bytes", maxAnswer)
	case err == nil:
		return out.buffer.Bytes(), nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case limited.Err() != nil:
		err = fmt.Errorf("the generator exceeded its time limit of %v and was killed", limit)
	}
	if why := log.reason(); why != "" {
		return nil, fmt.Errorf("%w: %s", err, why)
	}
	return nil, err
}

// capped keeps what is written up to a limit.
type capped struct {
	buffer bytes.Buffer
	limit  int
	full   bool
}

// Write implements io.Writer.
func (c *capped) Write(data []byte) (int, error) {
	if c.buffer.Len()+len(data) > c.limit {
		c.full = true
		return len(data), nil
	}
	return c.buffer.Write(data)
}

// diagnostics keeps the line that says why a process ended: the first one of a crash,
// or else the last one.
type diagnostics struct {
	line        []byte // that is being written
	crash, last string
}

// Write implements io.Writer.
func (d *diagnostics) Write(data []byte) (int, error) {
	for part := range bytes.Lines(data) {
		d.line = append(d.line, part[:min(len(part), max(0, maxLine-len(d.line)))]...)
		if bytes.HasSuffix(part, []byte("\n")) {
			d.end()
		}
	}
	return len(data), nil
}

// end takes the line that was written.
func (d *diagnostics) end() {
	line := strings.ToValidUTF8(strings.TrimSpace(string(d.line)), "?")
	d.line, d.last = nil, cmp.Or(line, d.last)
	if d.crash == "" && slices.ContainsFunc(crashes, func(prefix string) bool { return strings.HasPrefix(line, prefix) }) {
		d.crash = line
	}
}

// reason returns the line.
func (d *diagnostics) reason() string {
	d.end()
	return cmp.Or(d.crash, d.last)
}

// crashes are what Go's runtime begins its last words with.
var crashes = []string{"panic: ", "fatal error: ", "SIG"}
