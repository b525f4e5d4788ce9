// Package hook is the program divvy-hook, which container runtimes run on the host before
// the first program of a container starts. It bounds the container's device memory in the
// driver. It starts for each container with a limit while its creation waits, so it uses
// little: no C, no client of the API server.
package hook

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/memlimit"
	"github.com/divvy-gpu/divvy/internal/node/limits"
)

const usage = `divvy-hook bounds the device memory of a container in the driver. Container runtimes run it.

  divvy-hook limit --device=UUID --hard-mib=N   set the limit of the container whose state is on the standard input
  divvy-hook limit --device=UUID --max          clear the limit that the container may have inherited
  divvy-hook check                              print the driver's version if it has memory limits`

// Streams are the standard streams of the program.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// Run runs the program with its arguments, without its name. An error means that the container
// must not start; it is one sentence, which kubelet shows in an event of the pod.
func Run(ctx context.Context, args []string, s Streams) error {
	if len(args) == 0 {
		return errors.New(usage)
	}
	switch args[0] {
	case "limit":
		return limit(ctx, args[1:], s)
	case "check":
		return check(args[1:], s)
	}
	return fmt.Errorf("unknown command %q\n%s", args[0], usage)
}

// flags are those of a command.
func flags(name string) (set *flag.FlagSet, driverRoot *string) {
	set = flag.NewFlagSet(name, flag.ContinueOnError)
	set.SetOutput(io.Discard) // mistakes are in the error
	driverRoot = set.String("driver-root", "/", "folder of the driver's installation")
	return set, driverRoot
}

func parse(set *flag.FlagSet, args []string) error {
	if err := set.Parse(args); err != nil {
		return err
	}
	if set.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", set.Arg(0))
	}
	return nil
}

// open loads the driver's library.
func open(driverRoot string) (*memlimit.Library, error) {
	return memlimit.Open(memlimit.Places(backend.Options{DriverRoot: driverRoot}))
}

func limit(ctx context.Context, args []string, s Streams) error {
	set, driverRoot := flags("limit")
	device := set.String("device", "", "UUID of the GPU")
	mib := set.Uint64("hard-mib", 0, "limit in MiB")
	clears := set.Bool("max", false, "clear the limit instead; failures are only printed")
	h := limits.Hook{Now: time.Now}
	set.StringVar(&h.ProcRoot, "proc-root", "/proc", "folder of the kernel's processes")
	set.StringVar(&h.CgroupRoot, "cgroup-root", "/sys/fs/cgroup", "folder of the control groups")
	set.StringVar(&h.RecordDir, "record-dir", limits.RecordDir, "folder of the records of limits")
	if err := parse(set, args); err != nil {
		return err
	}
	switch {
	case *device == "":
		return errors.New("--device is missing")
	case *clears == (*mib != 0):
		return errors.New("give either --hard-mib, of 1 or more, or --max")
	case *mib > math.MaxUint64/limits.MiB:
		return fmt.Errorf("--hard-mib=%d is too large", *mib)
	}
	h.Device, h.Bytes = accel.DeviceID(*device), *mib*limits.MiB
	err := h.Run(ctx, s.In, func() (limits.Driver, error) { return open(*driverRoot) })
	if err != nil && *clears {
		fmt.Fprintln(s.Err, "divvy-hook:", oneLine(err))
		return nil
	}
	return err
}

func check(args []string, s Streams) error {
	set, driverRoot := flags("check")
	if err := parse(set, args); err != nil {
		return err
	}
	l, err := open(*driverRoot)
	if err != nil {
		return err
	}
	fmt.Fprintln(s.Out, l.Driver())
	return l.Close()
}

// oneLine returns the text of an error without line breaks, as runtimes quote it in a message.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// Main runs the program and returns its exit code.
func Main(ctx context.Context, args []string, s Streams) int {
	if err := Run(ctx, args, s); err != nil {
		fmt.Fprintln(s.Err, "divvy-hook:", oneLine(err))
		return 1
	}
	return 0
}
