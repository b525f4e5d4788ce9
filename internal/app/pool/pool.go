// Package pool is the subcommand "kubectl-divvy pool", for administrators of a
// remote pool: it brings the pool's token into the cluster, and checks whether
// the token's servers can be reached.
package pool

import (
	"errors"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/pool/admin"
	"github.com/divvy-gpu/divvy/internal/pool/token"
)

// Command returns the subcommand.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pool",
		Short: "Import and check the token of a remote pool of GPUs",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(importCommand(), checkCommand())
	return cmd
}

// addImportFlags adds a flag for every option, with its present value as default.
func addImportFlags(fs *pflag.FlagSet, o *admin.ImportOptions) {
	fs.StringVarP(&o.Namespace, "namespace", "n", o.Namespace,
		"namespace of the secrets; must be the chart's pool.credentials.sourceNamespace")
	fs.StringSliceVar(&o.ClientVersions, "client-version", o.ClientVersions,
		"client versions that pods use, such as 450, separated by commas. For 350, the entry \"reachable\" is added to servers.conf")
	fs.BoolVar(&o.Reachable, "reachable", o.Reachable, "add the entry \"reachable\" to servers.conf regardless of the version")
	fs.StringVar(&o.DryRun, "dry-run", o.DryRun, "none, client (print what would be done) or server (also let the API server validate it)")
	fs.Lookup("dry-run").NoOptDefVal = admin.DryRunClient
	fs.BoolVar(&o.Force, "force", o.Force, "overwrite secrets that differ and were not created by this command")
}

func importCommand() *cobra.Command {
	o := admin.DefaultImportOptions()
	c := kubectl.New()
	cmd := &cobra.Command{
		Use:   "import TOKEN.tar|FOLDER",
		Short: "Create the secrets of the pool from a token",
		Long: "Create the secrets of the pool from the token that can be downloaded from the pool's administration, or from the\n" +
			"folder into which it was unpacked. Secrets that were imported before are updated; others are not changed\n" +
			"without --force. Only the addresses of the servers are printed from the token.",
		Example: "  kubectl divvy pool import CA7WPsj.tar\n" +
			"  kubectl divvy pool import CA7WPsj.tar --client-version 350 --dry-run",
		Args:    cobra.ExactArgs(1),
		PreRunE: func(*cobra.Command, []string) error { return o.Validate() },
		RunE: func(cmd *cobra.Command, args []string) error {
			t, err := admin.ReadToken(args[0], o, time.Now(), cmd.OutOrStdout(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			clients, err := c.Clients()
			if err != nil {
				return err
			}
			return admin.Import(cmd.Context(), o, clients.Kubernetes, t, cmd.OutOrStdout())
		},
	}
	addImportFlags(cmd.Flags(), &o)
	c.AddFlags(cmd.Flags())
	return cmd
}

// addCheckFlags adds a flag for every option, with its present value as default.
func addCheckFlags(fs *pflag.FlagSet, o *admin.CheckOptions) {
	fs.StringVar(&o.From, "from", o.From, "namespace of the secrets to check, if no token is given")
	fs.DurationVar(&o.Timeout, "timeout", o.Timeout, "how long to wait for each address")
	fs.IntVar(&o.Parallel, "parallel", o.Parallel, "number of addresses to check concurrently")
	fs.StringVar(&o.ServerName, "server-name", o.ServerName,
		"name that the servers' certificates must contain; the host of each address if empty")
	fs.StringVarP(&o.Output, "output", "o", o.Output, "table or json")
}

func checkCommand() *cobra.Command {
	o := admin.DefaultCheckOptions()
	c := kubectl.New()
	cmd := &cobra.Command{
		Use:   "check [TOKEN.tar|FOLDER]",
		Short: "Check the connection to every server of the pool",
		Long: "Connect from this machine to every server in servers.conf, verify its certificate with the ca.crt of the token,\n" +
			"and explain any failure. The token is read from the cluster's secrets, or from an archive or a folder.\n" +
			"The exit status is not 0 if a server cannot be used. No token is sent.",
		Example: "  kubectl divvy pool check\n" +
			"  kubectl divvy pool check CA7WPsj.tar --timeout 2s",
		Args:    cobra.MaximumNArgs(1),
		PreRunE: func(*cobra.Command, []string) error { return o.Validate() },
		RunE: func(cmd *cobra.Command, args []string) error {
			var t *token.Token
			var source string
			var warnings []string
			if len(args) == 1 {
				if cmd.Flags().Changed("from") {
					return errors.New("--from is for the secrets of the cluster: give it or a token, not both")
				}
				var err error
				if t, err = token.Read(args[0]); err != nil {
					return err
				}
				source = "token " + args[0]
			} else {
				clients, err := c.Clients()
				if err != nil {
					return err
				}
				if t, source, warnings, err = admin.FromSecrets(cmd.Context(), clients.Kubernetes, o.From); err != nil {
					return err
				}
			}
			return admin.Check(cmd.Context(), o, t, source, warnings, cmd.OutOrStdout())
		},
	}
	addCheckFlags(cmd.Flags(), &o)
	c.AddFlags(cmd.Flags())
	return cmd
}
