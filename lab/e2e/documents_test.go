//go:build e2e

package e2e

import (
	"context"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/docscript"
)

// pageTimeout is how long all commands of a page may take.
const pageTimeout = 5 * time.Minute

// TestDocuments types the commands of the documentation, page by page, that need an
// installation; those that make one are run by the package installation.
func TestDocuments(t *testing.T) {
	settings := map[string]setting{docscript.Installed: guide, docscript.Vendors: mixed}
	files, err := docscript.Files(lab.CLI.Repository)
	must(t, err)
	for _, file := range files {
		page, err := lab.CLI.Page(file)
		must(t, err)
		want, ours := settings[page.Lab]
		if here, _, _ := page.Runs(); !ours || here == 0 {
			continue
		}
		t.Run(file, func(t *testing.T) {
			// Its cleanup fails if the page left a pod on a card.
			ctx, cancel := context.WithTimeout(begin(t, want), pageTimeout)
			defer cancel()
			// Readers of the pages that look at the whole installation brought it in; a
			// page may take it away.
			importToken(t, ctx)
			if err := lab.CLI.RunPage(ctx, page, t.Output()); err != nil {
				t.Fatal(err)
			}
		})
	}
}
