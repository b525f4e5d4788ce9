package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
)

const askAgain = time.Second

type waiting struct {
	vendor string
	// toolkit asks for the container toolkit too.
	toolkit bool
	// validations is the folder in which NVIDIA's GPU operator says what is
	// ready, "" for none.
	validations string
	// root is "/", where a container has what the container toolkit put there.
	root string
	// open makes the backend that is asked for devices.
	open  func(inContainer bool) (backend.Backend, error)
	every time.Duration
}

func waitCommand() *cobra.Command {
	w := waiting{root: "/", every: askAgain}
	var (
		places  nodeconfig.Places
		timeout time.Duration
	)
	cmd := &cobra.Command{
		Use:   "wait --vendor VENDOR",
		Short: "Wait until a vendor's driver responds and lists a device",
		Long: "Wait until the vendor's library responds and lists a device, as an init container of divvy-node or of any\n" +
			"pod that needs the driver. The command prints what it waits for, each time that changes.\n\n" +
			"With --validations, it waits for the file driver-ready of NVIDIA's GPU operator in that folder instead, and with\n" +
			"--toolkit for toolkit-ready as well. It does not load the library, since the operator may need the driver.\n" +
			"With --toolkit alone, it checks its own container, which must be started\n" +
			"by the NVIDIA container runtime: the library and /dev/nvidiactl must exist, and the library must list a device.\n\n" +
			"Exit codes: 0 a device was found, 1 this process cannot find out but a new one may, 2 invalid arguments, 3 timeout.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := w.check(); err != nil {
				return usageError(err)
			}
			if timeout < 0 {
				return usageError(fmt.Errorf("--timeout %v is negative; omit it to wait indefinitely", timeout))
			}
			places, _ = places.Find(os.LookupEnv)
			l, err := nodeconfig.Load(places.Files, nodeconfig.Collect(cmd.Flags(), os.LookupEnv, vendors.Names()), vendors.Names())
			if err != nil {
				return err
			}
			w.open = func(inContainer bool) (backend.Backend, error) {
				return vendors.New(w.vendor, w.options(l.Config, inContainer))
			}
			ctx := cmd.Context()
			if timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, timeout)
				defer cancel()
			}
			return w.wait(ctx, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&w.vendor, "vendor", "", "vendor of the device: "+strings.Join(vendors.Names(), ", "))
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "how long to wait, such as 5m; indefinitely if not set")
	cmd.Flags().BoolVar(&w.toolkit, "toolkit", false, "also wait for NVIDIA's container toolkit")
	cmd.Flags().StringVar(&w.validations, "validations", "", "folder of the status files of NVIDIA's GPU operator, such as "+
		"/run/nvidia/validations")
	cmd.Flags().StringArrayVar(&places.Files, "config", nil, "configuration file with the location of the driver; may be repeated")
	nodeconfig.AddFlags(cmd.Flags(), vendors.Names())
	return cmd
}

func (w *waiting) check() error {
	if !slices.Contains(vendors.Names(), w.vendor) {
		return fmt.Errorf("--vendor %q is not known; use one of %s", w.vendor, strings.Join(vendors.Names(), ", "))
	}
	if (w.toolkit || w.validations != "") && w.vendor != "nvidia" {
		return errors.New("--toolkit and --validations are for --vendor nvidia alone")
	}
	return nil
}

// options are those of the backend: as configured, or as a container sees what
// its runtime put into it.
func (w *waiting) options(c config.NodeConfig, inContainer bool) backend.Options {
	if inContainer {
		return backend.Options{DriverRoot: w.root}
	}
	return vendors.Options(c, w.vendor)
}

// wait returns once everything is there. It prints what it waits for, and what
// it found.
func (w *waiting) wait(ctx context.Context, out io.Writer) error {
	var told string
	for {
		found, err := w.attempt(ctx)
		if err == nil {
			fmt.Fprintln(out, found)
			return nil
		}
		var restart *backend.RestartNeededError
		if errors.As(err, &restart) {
			return err // kubelet starts the init container again
		}
		if text := strings.TrimSpace(err.Error()); text != told && ctx.Err() == nil {
			fmt.Fprintln(out, "waiting:", text)
			told = text
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return &exitError{ExitTimeout, fmt.Errorf("the time is over; last: %s", told)}
			}
			return ctx.Err()
		case <-time.After(w.every):
		}
	}
}

// attempt looks once. Its error says what is missing.
func (w *waiting) attempt(ctx context.Context) (found string, err error) {
	for _, name := range w.files() {
		if _, err := os.Stat(name); err != nil {
			return "", fmt.Errorf("%s is not there yet%s", name, w.noOperator())
		}
	}
	if w.validations != "" {
		// The operator may be changing the driver, and only the daemon learns of it.
		return "ready: " + strings.Join(w.files(), ", "), nil
	}
	// A new backend each time: what an earlier one has learnt of a driver that
	// was not complete is not to be relied on.
	b, err := w.open(w.inContainer())
	if err != nil {
		return "", err
	}
	defer b.Close() //nolint:errcheck // nothing is lost
	devices, err := b.Discover(ctx)
	if err != nil {
		return "", err
	}
	if len(devices.Devices) == 0 {
		var errs []error
		for _, f := range devices.Faults {
			errs = append(errs, f.Err)
		}
		return "", errors.Join(append(errs, fmt.Errorf("the driver of %s answers and lists no device that can be used", w.vendor))...)
	}
	return fmt.Sprintf("%s: %d devices, driver %s", w.vendor, len(devices.Devices), devices.Driver), nil
}

// noOperator says what to do on a node without NVIDIA's GPU operator, for as long as
// its folder has no file: then none may ever come.
func (w *waiting) noOperator() string {
	if w.validations == "" {
		return ""
	}
	if written, err := os.ReadDir(w.validations); err == nil && len(written) > 0 {
		return ""
	}
	return "; NVIDIA's GPU operator writes it. If driver and toolkit were installed without the operator, it never comes: " +
		"set the chart's value node.gpuOperator.enabled=false, as examples/values/nvidia.yaml does"
}

// inContainer reports whether this container is looked at instead of the host.
func (w *waiting) inContainer() bool { return w.toolkit && w.validations == "" }

func (w *waiting) files() []string {
	switch {
	case w.inContainer():
		return []string{filepath.Join(w.root, "dev/nvidiactl")}
	case w.validations == "":
		return nil
	}
	files := []string{filepath.Join(w.validations, "driver-ready")}
	if w.toolkit {
		files = append(files, filepath.Join(w.validations, "toolkit-ready"))
	}
	return files
}
