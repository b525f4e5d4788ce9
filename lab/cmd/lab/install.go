package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/progress"
)

// defaultTopology is the machine of the user guide.
const defaultTopology = "gcu-8x16.ini"

// resourceTimeout is how long the node may take to offer its cards after
// everything is installed.
const resourceTimeout = time.Minute

func newInstallCommand() *cobra.Command {
	var topology, memoryUnit string
	var set, values []string
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Build Divvy and install it into the cluster on simulated cards",
		Long: "Build Divvy's images from the checkout, load them, put simulated cards on the machine, install the chart\n" +
			"and make kube-scheduler ask the extender. Again, it brings everything up to date.",
		Args: cobra.NoArgs,
		RunE: exclusive(func(cmd *cobra.Command, _ []string) error {
			started := time.Now()
			out := cmd.OutOrStdout()
			c, err := cluster.Open()
			if err != nil {
				return err
			}
			repository, err := layout.RepositoryDir()
			if err != nil {
				return err
			}
			path, err := findFile(repository, "topologies", topology)
			if err != nil {
				return err
			}
			for i, file := range values {
				if values[i], err = findFile(repository, "values", file); err != nil {
					return err
				}
			}
			fmt.Fprintf(out, "Installing Divvy with the cards of %s and units of %s GB.\n", path, memoryUnit)
			err = product.Install(cmd.Context(), product.Options{
				Cluster: c, RepositoryDir: repository, Topology: path, MemoryUnit: memoryUnit, Values: values, Set: set, Out: out,
			})
			if err != nil {
				return err
			}
			if err := importToken(cmd.Context(), out); err != nil {
				return err
			}
			offers, err := product.WaitForResources(cmd.Context(), resourceTimeout)
			if err != nil {
				return fmt.Errorf("Divvy is installed, but the node does not offer its cards: %w", err) //nolint:staticcheck // a name
			}
			var amounts []string
			for _, offer := range offers {
				amounts = append(amounts, fmt.Sprintf("%d of %s", offer.Units, offer.Resource))
			}
			fmt.Fprintf(out, "Divvy is installed after %s: node %s offers %s.\n",
				progress.Elapsed(time.Since(started)), layout.NodeName, strings.Join(amounts, ", "))
			fmt.Fprintf(out, "kubectl divvy is in %s:\n  export PATH=%s:%s:$PATH\nexport KUBECONFIG=%s\n",
				product.Programs(), product.Programs(), c.BinDir, layout.AdminKubeconfig)
			return nil
		}),
	}
	flags := cmd.Flags()
	flags.StringVar(&topology, "topology", cmp.Or(os.Getenv("TOPOLOGY"), defaultTopology),
		"file that describes the simulated cards, or the name of one in lab/topologies (environment TOPOLOGY)")
	flags.StringVar(&memoryUnit, "memory-unit", cmp.Or(os.Getenv("MEMORY_UNIT"), "1"),
		"size of one unit of memory in GB: 1, 0.1, 0.01 or 0.001 (environment MEMORY_UNIT)")
	flags.StringArrayVar(&values, "values", strings.Fields(os.Getenv("VALUES")),
		"file of values of the chart, or the name of one in lab/values; may be repeated (environment VALUES)")
	flags.StringArrayVar(&set, "set", nil, "value of the chart as KEY=VALUE, like helm's flag; may be repeated")
	return cmd
}

// importToken does an administrator's work where the lab has a remote pool.
func importToken(ctx context.Context, out io.Writer) error {
	client, err := cluster.Client()
	if err != nil {
		return err
	}
	if has, err := product.HasPool(ctx, client); err != nil || !has {
		return err
	}
	fmt.Fprintf(out, "kubectl divvy pool import %s\n", product.TokenFile())
	text, err := product.ImportToken(ctx)
	if text != "" {
		fmt.Fprintln(out, text)
	}
	return err
}

// findFile returns the path of a file that was named relative to the working
// directory, to the root of the checkout, or to a folder of lab/.
func findFile(repository, folder, name string) (string, error) {
	candidates := []string{name}
	if !filepath.IsAbs(name) {
		candidates = append(candidates, filepath.Join(repository, name), filepath.Join(repository, "lab", folder, name))
	}
	for _, candidate := range candidates {
		if info, err := os.Stat(candidate); err == nil && info.Mode().IsRegular() {
			path, err := filepath.Abs(candidate)
			if err != nil {
				return "", fmt.Errorf("find %s: %w", name, err)
			}
			return path, nil
		}
	}
	return "", fmt.Errorf("there is no %s; looked at %s", name, strings.Join(candidates, ", "))
}
