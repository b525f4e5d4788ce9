//go:build e2e

package installation

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/docscript"
	"github.com/divvy-gpu/divvy/lab/internal/registry"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// pageTimeout is how long all commands of a page may take, those that build images,
// install and remove among them.
const pageTimeout = 12 * time.Minute

// quickStart builds and pushes the images that the other pages install.
const quickStart = "docs/quick-start.md"

// TestDocuments types the commands of the documentation, page by page, that begin
// with a cluster without Divvy. The node pulls from a registry what they push there,
// and helm gets what a reader gives it.
func TestDocuments(t *testing.T) {
	files, err := docscript.Files(lab.CLI.Repository)
	if err != nil {
		t.Fatal(err)
	}
	files = slices.DeleteFunc(files, func(file string) bool { return file == quickStart })
	topologies := map[string]string{docscript.Bare: testenv.Guide, docscript.BareVendors: demos.Mixed}
	r := startRegistry(t, registry.Options{Address: openRegistry})
	pushed := false
	for _, file := range append([]string{quickStart}, files...) {
		page, err := lab.CLI.Page(file)
		if err != nil {
			t.Fatal(err)
		}
		topology, ours := topologies[page.Lab]
		if here, _, _ := page.Runs(); !ours || here == 0 {
			continue
		}
		t.Run(file, func(t *testing.T) {
			bareLab(t, topology)
			ctx, cancel := context.WithTimeout(t.Context(), pageTimeout)
			defer cancel()
			if !pushed && file != quickStart {
				// The page alone was asked for.
				push(t, ctx, r)
			}
			pushed = true
			if err := lab.CLI.RunPage(ctx, page, t.Output(), r.Environment()...); err != nil {
				t.Fatal(err)
			}
			if file == quickStart {
				installedFrom(t, openRegistry+"/divvy/", "IfNotPresent")
				onlyValues(t, "image", "memoryUnit")
				if got, want := r.Pulled(), []string{"divvy/divvy-control", "divvy/divvy-node"}; !slices.Equal(got, want) {
					t.Errorf("containerd has pulled %v from the registry, want %v", got, want)
				}
			}
		})
	}
}

// push does what the quick start does before it installs.
func push(t *testing.T, ctx context.Context, r *registry.Registry) {
	t.Helper()
	page, err := docscript.Parse("images", []byte("```console\n$ make images push IMAGE_REPO="+openRegistry+"/divvy\n```\n"))
	if err == nil {
		err = lab.CLI.RunPage(ctx, page, t.Output(), r.Environment()...)
	}
	if err != nil {
		t.Fatal(err)
	}
}
