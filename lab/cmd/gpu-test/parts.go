package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/cdispec"
)

// self is this program.
const self = "/proc/self/exe"

// partLimit bounds a process that asks the driver. It takes a second or two, several
// more if the driver initialises its GPUs for it.
const partLimit = 30 * time.Second

// parts are what the program does in processes of its own, by their first argument: the
// driver's libraries may crash or hang there.
var parts = map[string]func(args []string) error{
	cdispec.Command: func([]string) error { return cdispec.Serve(os.Stdin, os.Stdout, os.Stderr) },
	inspectPart:     inspectCommand,
	contextPart:     contextCommand,
}

// runPart does what the arguments say, if the program was started as a part.
func runPart(args []string) (isPart bool, err error) {
	if len(args) == 0 || parts[args[0]] == nil {
		return false, nil
	}
	return true, parts[args[0]](args[1:])
}

// ask runs a command and reads the JSON that it writes.
func ask(ctx context.Context, answer any, name string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, partLimit)
	defer cancel()
	var out, log bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &log, time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%w: %s", errors.Join(err, ctx.Err()), lastLine(log.String()))
	}
	if err := json.Unmarshal(out.Bytes(), answer); err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	return nil
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}
