//go:build e2e

package installation

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/docscript"
	"github.com/divvy-gpu/divvy/lab/internal/show"
	"github.com/divvy-gpu/divvy/lab/internal/stage"
)

// pageTimeout is how long all commands of a page may take, those that install and
// remove among them.
const pageTimeout = 9 * time.Minute

// TestDocuments types the commands of the documentation, page by page, that begin
// with a cluster without Divvy. Images are loaded before, since there is no registry.
func TestDocuments(t *testing.T) {
	files, err := docscript.Files(lab.Repository)
	if err != nil {
		t.Fatal(err)
	}
	topologies := map[string]string{docscript.Bare: stage.Guide, docscript.BareVendors: show.Mixed}
	for _, file := range files {
		page, err := lab.Page(file)
		if err != nil {
			t.Fatal(err)
		}
		topology, ours := topologies[page.Lab]
		if here, _, _ := page.Runs(); !ours || here == 0 {
			continue
		}
		t.Run(file, func(t *testing.T) {
			t.Cleanup(func() {
				ctx := context.WithoutCancel(t.Context())
				if err := errors.Join(lab.DeleteAllPods(ctx), lab.Remove(ctx)); err != nil {
					t.Errorf("after the page: %v", err)
				}
			})
			if err := lab.Prepare(t.Context(), stage.Options{Topology: topology, Values: []string{show.PoolValues}, Out: os.Stderr}); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), pageTimeout)
			defer cancel()
			if err := lab.RunPage(ctx, page, t.Output()); err != nil {
				t.Fatal(err)
			}
		})
	}
}
