package node

import (
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/memlimit"
	"github.com/divvy-gpu/divvy/internal/node/mps"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

// mpsCommand runs the control daemons of MPS.
func mpsCommand() *cobra.Command {
	host := mps.Host{Mount: unix.Mount}
	cmd := &cobra.Command{
		Use:   "mps",
		Short: "Run the control daemons of NVIDIA's MPS on this node",
		Long: "Run a control daemon of NVIDIA's multi-process service for each GPU whose resource has isolation cooperative. The node's\n" +
			"daemon names them. When the program ends, the control daemons end, and the GPUs get compute mode DEFAULT again.\n\n" +
			"Exit codes: 0 success, 1 failure, 2 the command line is invalid.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			output := logging.NewOutput(os.Stderr)
			defer output.Close() //nolint:errcheck // the last line is written
			log, _ := logging.Setup(logging.Options{Stderr: output, Level: new(slog.LevelVar)})
			ctx := klog.NewContext(cmd.Context(), log)
			service := mps.Service{Dir: host.Dir(), Inside: mps.Dir, Prepare: host.Prepare, Now: time.Now,
				Tidy: func(servers []int) error { return host.Tidy("/proc", servers) },
				Open: func(driverRoot string) (mps.Modes, func(), error) { return openModes(host, driverRoot) },
				Log: func(err error, message string, id accel.DeviceID) {
					if err != nil {
						log.Error(err, message, "device", id)
						return
					}
					log.Info(message, "device", id)
				}}
			return service.Run(ctx)
		},
	}
	cmd.Flags().StringVar(&host.Root, "host-root", "/host", "folder in which the root of the host is mounted")
	return cmd
}

// openModes loads the driver's library for one pass, so that a driver that is replaced
// meanwhile is not in use.
func openModes(host mps.Host, driverRoot string) (mps.Modes, func(), error) {
	root, err := host.DriverRoot(driverRoot)
	if err != nil {
		return nil, nil, err
	}
	library, err := memlimit.OpenAny(memlimit.Places(backend.Options{DriverRoot: root}))
	if err != nil {
		return nil, nil, err
	}
	return library, func() { _ = library.Close() }, nil // the next pass loads it again
}
