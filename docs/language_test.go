package docs

import (
	"testing"

	"github.com/divvy-gpu/divvy/hack/terms"
)

// TestTermsOfTheField: the documentation, the chart and what the programs print use
// the terms of private-terms.txt nowhere.
func TestTermsOfTheField(t *testing.T) {
	found, err := terms.Find(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range found.Matches {
		t.Errorf("%s: %q: %s\n\t%.160s", m.Place, m.Term, m.Instead, m.Text)
	}
	t.Logf("%d matches of %d patterns in %d texts", len(found.Matches), found.Patterns, found.Texts)
}
