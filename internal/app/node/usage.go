package node

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/internal/node/usagefile"
	"github.com/divvy-gpu/divvy/internal/report/usagereport"
)

// usageCommand prints the report that the daemon of this container wrote into the folder.
func usageCommand(dir string) *cobra.Command {
	output := "table"
	cmd := &cobra.Command{
		Use:   "usage",
		Short: "Print what is in use of this node's devices",
		Long: "Print the last report of the daemon that runs in this container: what is in use of each device, and which containers\n" +
			"use it. \"kubectl divvy inspect --usage\" runs it on each node.\n\n" +
			"Exit codes: 0 success, 1 there is no current report, 2 the command line is invalid.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "table" && output != "json" {
				return usageError(fmt.Errorf("output format %q: must be one of table, json", output))
			}
			return printUsage(cmd.OutOrStdout(), dir, output == "json", time.Now())
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", output, "table or json")
	return cmd
}

func printUsage(w io.Writer, dir string, asJSON bool, now time.Time) error {
	report, err := usagefile.Read(dir, now)
	if err != nil {
		return err
	}
	if asJSON {
		return usagereport.WriteJSON(w, report)
	}
	return usagereport.WriteTable(w, report)
}
