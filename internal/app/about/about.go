// Package about gives a program --version and the subcommand version.
package about

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// Version adds --version to a program and to each of its subcommands, and the
// subcommand version, which can print the same for machines. It is called when
// all subcommands are there.
func Version(root *cobra.Command, apis ...version.API) {
	info := version.Of(root.Name(), apis...)
	addFlag(root, info.Text())

	var format string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version, commit, Go release and API versions of this program",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := info.Format(format)
			if err != nil {
				return fmt.Errorf("--output: %w", err)
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), out)
			return err
		},
	}
	cmd.Flags().StringVarP(&format, "output", "o", version.Formats[0], "one of "+strings.Join(version.Formats, ", "))
	root.AddCommand(cmd)
}

// addFlag adds --version, which goes before all other flags and arguments. Libraries of
// Kubernetes have such a flag for all programs, which cobra would take for its own.
func addFlag(cmd *cobra.Command, text string) {
	cmd.Flags().Bool("version", false, "version for "+cmd.Name())
	cmd.Version = version.Version
	cmd.SetVersionTemplate(text)
	for _, sub := range cmd.Commands() {
		addFlag(sub, text)
	}
}
