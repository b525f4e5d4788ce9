// Command gpu-test tests the node daemon on a real NVIDIA GPU: discovery through
// NVML, what the driver reports of modes, limits and processes, the CDI specification,
// registration with kubelet's own device manager, allocation, health and labels. It
// needs neither root nor a cluster nor Go, changes no setting of a GPU, and leaves
// nothing behind. Its report can be committed to docs/hardware.
//
// It ends with 0 when all is right, 1 when something is not, and 3 where there
// is no NVIDIA GPU: then nothing was tested, and that is no success.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/lab/internal/checks"
	"github.com/divvy-gpu/divvy/lab/internal/progress"
)

// Exit codes.
const (
	exitFailed = 1
	exitUsage  = 2
	exitNoGPU  = 3
)

// errNoGPU says that there is nothing to test.
var errNoGPU = errors.New("there is no NVIDIA GPU here, so nothing was tested")

// options are the flags.
type options struct {
	// root is where the driver is installed; tests have another than "/".
	root string
	// library is NVML's file; "" for where the driver puts it.
	library string
	// watch is how long health is watched.
	watch time.Duration
	// simulated lets the test of the test run on a stand-in for NVML.
	simulated bool
	// libcuda is CUDA's file; "" for the one that the dynamic loader finds.
	libcuda string
	// nvidiaCTK is NVIDIA's program; "" for the one in PATH.
	nvidiaCTK string
	// report is the file that receives the report, "" for none.
	report string
	// verbose shows what kubelet and the daemon log.
	verbose bool
}

func main() {
	if isPart, err := runPart(os.Args[1:]); isPart {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(exitFailed)
		}
		return
	}
	if err := isolateMounts(); err != nil {
		fmt.Fprintln(os.Stderr, "gpu-test: continue in the mount namespace of the host:", err)
	}
	o := options{root: "/"}
	flag.StringVar(&o.library, "library", "", "NVML's `file`, where it is not in a usual place")
	flag.DurationVar(&o.watch, "watch", 10*time.Second, "how long to watch the GPUs' health for false alarms")
	flag.StringVar(&o.report, "report", "", "the `file` that receives a report in Markdown")
	flag.BoolVar(&o.verbose, "verbose", false, "show what kubelet and the daemon log")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "gpu-test: takes flags only, see --help")
		os.Exit(exitUsage)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpu-test:", err)
		os.Exit(exitCode(err))
	}
}

// ownMounts is the variable that tells the program that it has a mount namespace of its own.
const ownMounts = "GPU_TEST_OWN_MOUNTS"

// isolateMounts starts the program once more, in a mount namespace of its own, so that what
// it mounts is seen by its children alone and is gone when it ends. Without root it does
// nothing.
func isolateMounts() error {
	if os.Geteuid() != 0 || os.Getenv(ownMounts) != "" {
		return nil
	}
	runtime.LockOSThread() // the namespace is the thread's, and remains that of the program it executes
	defer runtime.UnlockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("look for this program: %w", err)
	}
	return unix.Exec(program, os.Args, append(os.Environ(), ownMounts+"=true"))
}

func exitCode(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errNoGPU):
		return exitNoGPU
	default:
		return exitFailed
	}
}

func run(ctx context.Context, out io.Writer, o options) error {
	started := time.Now()
	fmt.Fprintln(out, version.String("gpu-test"))
	t := &test{options: o, record: record{out: out, checks: checks.Checks{Out: out}}}
	err := t.all(ctx)
	if errors.Is(err, errNoGPU) {
		return err
	}
	verdict := fmt.Sprintf("%d checks on %d GPUs: ", t.checks.Made(), len(t.found.Devices))
	switch n := t.checks.Failed(); {
	case err != nil:
		err = fmt.Errorf("could not go on after %d checks: %w", t.checks.Made(), err)
		verdict = err.Error()
	case n > 0:
		verdict += fmt.Sprintf("%d DIFFER", n)
	default:
		verdict += "all are right"
	}
	fmt.Fprintf(out, "\ngpu-test: %s (%s)\n", verdict, progress.Elapsed(time.Since(started)))
	if o.report != "" {
		err = errors.Join(err, t.write(o.report, started, verdict))
	}
	return errors.Join(err, t.checks.Err())
}
