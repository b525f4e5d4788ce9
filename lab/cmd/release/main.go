// release builds what Divvy is delivered as: "release images" the container
// images, without docker, "release push" brings them to a registry, and "release
// files" makes the rest. "release pin" pins base images and actions.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/lab/internal/debian"
	"github.com/divvy-gpu/divvy/lab/internal/pins"
	"github.com/divvy-gpu/divvy/lab/internal/release"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1) //nolint:gocritic // the one exit of the program; stop has nothing left to do
	}
}

// common are the flags of all subcommands.
type common struct {
	repository, images, version, commit string
}

func (c common) stamp(ctx context.Context) (release.Stamp, error) {
	s, err := release.ReadStamp(ctx, c.repository)
	if c.version != "" {
		s.Version = c.version
	}
	if c.commit != "" {
		s.Commit = c.commit
	}
	return s, err
}

func command() *cobra.Command {
	var c common
	cmd := &cobra.Command{
		Use: "release", Short: "Build what Divvy is delivered as",
		SilenceUsage: true, SilenceErrors: true,
	}
	f := cmd.PersistentFlags()
	f.StringVar(&c.repository, "repository", "..", "root of the checkout")
	f.StringVar(&c.images, "images", filepath.Join("..", "dist", "images"), "folder of the images")
	f.StringVar(&c.version, "version", "", "version to write into programs and images; what git says when empty")
	f.StringVar(&c.commit, "commit", "", "commit to write into programs and images; what git says when empty")
	cmd.AddCommand(imagesCommand(&c), pushCommand(&c), filesCommand(&c), pinCommand(&c))
	return cmd
}

func imagesCommand(c *common) *cobra.Command {
	o := release.ImageOptions{}
	schedulers := false
	archive := debian.Archive{Suite: release.Suite}
	cmd := &cobra.Command{
		Use: "images", Short: "Build the container images, without docker", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			o.Repository, o.Dir, o.Report = c.repository, c.images, reporter(cmd.OutOrStdout())
			if o.Stamp, err = c.stamp(cmd.Context()); err != nil {
				return err
			}
			if schedulers {
				o.Images = append(o.Images, release.Schedulers...)
			}
			o.Base = release.Debian(archive)
			built, err := release.BuildImages(cmd.Context(), o)
			if err != nil {
				return fmt.Errorf("no images were made: %w", err)
			}
			out := cmd.OutOrStdout()
			fmt.Fprintf(out, "\nIn %s:\n", relative(o.Dir, c.repository))
			for _, b := range built {
				fmt.Fprintln(out, b.Reference())
				for _, arch := range o.Architectures {
					fmt.Fprintf(out, "  linux/%-6s %s\n", arch, b.Platforms[arch])
				}
			}
			return nil
		},
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.Architectures, "arch", []string{runtime.GOARCH}, "architectures: amd64, arm64")
	f.StringSliceVar(&o.Images, "image", release.Images, "images")
	f.BoolVar(&schedulers, "schedulers", false, "also the images of divvy-scheduler, one for each minor of Kubernetes")
	f.StringVar(&archive.Dir, "debian-dir", filepath.Join(cache, "divvy", "debian"), "folder for what is fetched from Debian")
	f.StringVar(&archive.Mirror, "debian-mirror", "", "mirror of Debian (default: the one that this machine's apt uses)")
	f.StringVar(&archive.SecurityMirror, "debian-security-mirror",
		"", "mirror of Debian's security updates (default: the one that this machine's apt uses)")
	return cmd
}

func pushCommand(c *common) *cobra.Command {
	o := release.PushOptions{}
	cmd := &cobra.Command{
		Use: "push REGISTRY", Short: "Push the images with their SBOMs to a registry, such as registry.example.com/divvy",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Dir, o.Registry = c.images, args[0]
			pushed, err := release.Push(cmd.Context(), o)
			for _, reference := range pushed.References {
				fmt.Fprintln(cmd.OutOrStdout(), reference)
			}
			var documents *release.SBOMError
			if errors.As(err, &documents) {
				fmt.Fprintln(cmd.ErrOrStderr(), "warning:", err)
				err = nil
			}
			if err == nil {
				fmt.Fprintf(cmd.OutOrStdout(), "%s names them, by the tag %s: helm install ... --values %[1]s\n",
					relative(filepath.Join(o.Dir, release.ValuesFile), c.repository), pushed.Tag)
			}
			return err
		},
	}
	cmd.Flags().StringVar(&o.Tag, "tag", "", "tag; the version of the images when empty")
	return cmd
}

// relative is a path as it is called in the root of the checkout, where make runs.
func relative(path, root string) string {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return path
	}
	if root, err = filepath.Abs(root); err != nil {
		return path
	}
	if short, err := filepath.Rel(root, absolute); err == nil && filepath.IsLocal(short) {
		return short
	}
	return absolute
}

func filesCommand(c *common) *cobra.Command {
	o := release.Options{Platforms: release.KubectlPlatforms()}
	cmd := &cobra.Command{
		Use: "files", Short: "Make all else of a release: manifests, the chart, kustomize bases, kubectl-divvy", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			o.Repository, o.Images, o.Report = c.repository, c.images, reporter(cmd.OutOrStdout())
			if o.Stamp, err = c.stamp(cmd.Context()); err != nil {
				return err
			}
			if err := release.Make(cmd.Context(), o); err != nil {
				return fmt.Errorf("no release was made: %w", err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "\n%s is in %s.\n", o.Stamp.Version, o.Dir)
			return nil
		},
	}
	cmd.Flags().StringVar(&o.Helm, "helm", "", "path of helm")
	cmd.Flags().StringVar(&o.Dir, "out", filepath.Join("..", "dist", "release"), "folder for the release")
	cmd.Flags().StringVar(&o.Pins, "pins", "", "record of what was pinned, which becomes part of the release where it exists")
	return cmd
}

func pinCommand(c *common) *cobra.Command {
	var record string
	resolver := pins.Resolver{Git: "https://github.com", Platforms: []string{"linux/amd64", "linux/arm64"}}
	cmd := &cobra.Command{
		Use: "pin", Short: "Write digests of base images and commits of actions into the files that name them", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			references, err := pins.Find(c.repository)
			if err != nil {
				return err
			}
			if references, err = resolver.Resolve(cmd.Context(), references); err != nil {
				return fmt.Errorf("nothing was pinned: %w", err)
			}
			if err := pins.Write(c.repository, references); err != nil {
				return err
			}
			text := pins.Record(references)
			fmt.Fprintf(cmd.OutOrStdout(), "%s", text)
			if record == "" {
				return nil
			}
			if err := os.MkdirAll(filepath.Dir(record), 0o755); err != nil {
				return fmt.Errorf("record what was pinned: %w", err)
			}
			if err := os.WriteFile(record, text, 0o644); err != nil {
				return fmt.Errorf("record what was pinned: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&record, "record", "", "file for the record of what is pinned")
	return cmd
}

// reporter returns a function that prints what is being done and since when.
func reporter(out io.Writer) func(string) {
	start := time.Now()
	return func(what string) { fmt.Fprintf(out, "%4.0fs  %s\n", time.Since(start).Seconds(), what) }
}
