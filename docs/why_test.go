package docs

import (
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/report/why"
)

// TestEveryCodeOfWhyIsDocumented: docs/why.md has each code in its table of causes, and the
// example is what the program prints.
func TestEveryCodeOfWhyIsDocumented(t *testing.T) {
	page := read(t, "docs/why.md")
	_, causes, found := strings.Cut(page, "\n## Causes\n")
	if !found {
		t.Fatal("docs/why.md has no section Causes")
	}
	for _, code := range why.Codes() {
		if !strings.Contains(causes, "`"+string(code)+"`") {
			t.Errorf("docs/why.md does not describe the code %s", code)
		}
	}
	example, _, _ := strings.Cut(read(t, "internal/report/why/testdata/noDeviceFits.golden"), "\n\n")
	if !strings.Contains(page, example) {
		t.Errorf("the example in docs/why.md is not what the golden case prints:\n%s", example)
	}
}

// TestDefragmentationIsDocumented: docs/simulate.md has each rule and code of plans, and the
// example is what the program prints.
func TestDefragmentationIsDocumented(t *testing.T) {
	page := read(t, "docs/simulate.md")
	for _, rule := range why.Rules() {
		if !strings.Contains(page, "\n| `"+string(rule)+"` |") {
			t.Errorf("docs/simulate.md does not describe the rule %s", rule)
		}
	}
	for _, code := range why.LeftCodes() {
		if !strings.Contains(page, "\n| `"+string(code)+"` |") {
			t.Errorf("docs/simulate.md does not describe the code %s", code)
		}
	}
	example, _, _ := strings.Cut(read(t, "internal/report/why/testdata/plan-admit.golden"), "\n\n")
	if !strings.Contains(page, example) {
		t.Errorf("the example in docs/simulate.md is not what the golden case prints:\n%s", example)
	}
}
