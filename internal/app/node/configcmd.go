package node

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
)

// Exit codes of divvy-node.
const (
	// ExitFailure is that of the daemon when it cannot go on, and of config
	// when files have mistakes.
	ExitFailure = 1
	// ExitUsage is for a command line that is not understood and for files that
	// cannot be read.
	ExitUsage = 2
	// ExitTimeout is that of wait when its time is over.
	ExitTimeout = 3
)

// exitError is an error with an exit code of its own.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }

func (e *exitError) Unwrap() error { return e.err }

// ExitCode is the exit code for what Command returned.
func ExitCode(err error) int {
	var e *exitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &e):
		return e.code
	}
	return ExitFailure
}

// usageError says that the command line, or a file on it, cannot be read.
func usageError(err error) error { return &exitError{ExitUsage, err} }

func configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Check and convert configuration files",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(&cobra.Command{
		Use:   "convert FILE...",
		Short: "Convert configuration files of any supported format to that of divvy-node",
		Long: "Print the resulting configuration in the format of divvy-node. The files may have the format of divvy-node, of\n" +
			"NVIDIA's device plugin (version: v1) or of Iluvatar's (ix-config); later files override earlier ones. Settings that\n" +
			"divvy-node does not support are listed in comments. Environment variables are ignored.\n\n" +
			"Exit codes: 0 success, 1 a file is invalid, 2 a file cannot be read.",
		Args: filesArgs,
		RunE: func(cmd *cobra.Command, files []string) error { return convert(cmd.OutOrStdout(), files) },
	})
	var strict bool
	check := &cobra.Command{
		Use:   "check FILE...",
		Short: "Report all errors and warnings in configuration files",
		Long: "Print all errors in the files, merged as divvy-node does it, and all settings without effect.\n\n" +
			"Exit codes: 0 no errors, 1 errors (with --strict also warnings), 2 a file cannot be read.",
		Args: filesArgs,
		RunE: func(cmd *cobra.Command, files []string) error { return check(cmd.OutOrStdout(), files, strict) },
	}
	check.Flags().BoolVar(&strict, "strict", false, "treat warnings as errors")
	cmd.AddCommand(check)
	return cmd
}

// noArgs refuses arguments, and commands that there are not.
func noArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return usageError(err)
	}
	return nil
}

func filesArgs(_ *cobra.Command, args []string) error {
	if len(args) == 0 {
		return usageError(errors.New("name at least one configuration file"))
	}
	return nil
}

// load reads files without regard to the environment.
func load(files []string) (nodeconfig.Loaded, error) {
	l, err := nodeconfig.Load(files, nil, vendors.Names())
	l.Warnings = append(l.Warnings, vendors.UnknownCauses(l.Config)...)
	var mistakes *config.MistakesError
	if err != nil && !errors.As(err, &mistakes) {
		return l, usageError(err)
	}
	return l, err
}

func convert(w io.Writer, files []string) error {
	l, err := load(files)
	if err != nil {
		return err
	}
	text, err := config.Encode(l.Config)
	if err != nil {
		return err
	}
	var out strings.Builder
	fmt.Fprintf(&out, "# Converted from %s.\n", strings.Join(files, ", "))
	for _, warning := range l.Warnings {
		fmt.Fprintf(&out, "# Warning: %s\n", strings.ReplaceAll(warning, "\n", " "))
	}
	out.Write(text)
	if _, err := io.WriteString(w, out.String()); err != nil {
		return fmt.Errorf("print the configuration: %w", err)
	}
	return nil
}

func check(w io.Writer, files []string, strict bool) error {
	l, err := load(files)
	for _, warning := range l.Warnings {
		fmt.Fprintf(w, "warning: %s\n", warning)
	}
	if err != nil {
		return err
	}
	if strict && len(l.Warnings) > 0 {
		return fmt.Errorf("%s: --strict takes warnings for mistakes, and there are %d", strings.Join(files, ", "), len(l.Warnings))
	}
	for _, r := range l.Config.Resources {
		fmt.Fprintf(w, "%s: %s devices, %s\n", r.Name, r.Vendor, r.Mode)
	}
	fmt.Fprintln(w, "no mistakes")
	return nil
}
