package docs

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/report/doctor"
)

// TestEveryCheckOfTheDoctorIsDocumented: docs/doctor.md has a section for each
// check, below its group, that begins with what the check is called on the screen;
// and none for a check that is not there.
func TestEveryCheckOfTheDoctorIsDocumented(t *testing.T) {
	page := read(t, "docs/doctor.md")
	counts := regexp.MustCompile(`\d+ checks`).FindAllString(page, -1)
	if want := fmt.Sprintf("%d checks", len(doctor.Checks())); len(counts) == 0 ||
		slices.ContainsFunc(counts, func(c string) bool { return c != want }) {
		t.Errorf("docs/doctor.md says that there are %v, want %s", counts, want)
	}
	_, page, found := strings.Cut(page, "\n## Checks\n")
	if !found {
		t.Fatal("docs/doctor.md has no section Checks")
	}
	var names []string
	for _, c := range doctor.Checks() {
		names = append(names, c.Name)
		_, group, found := strings.Cut(strings.ToLower(page), "\n### "+c.Group+"\n")
		if !found {
			t.Errorf("docs/doctor.md has no section of the group %q", c.Group)
			continue
		}
		group, _, _ = strings.Cut(group, "\n### ")
		_, section, found := strings.Cut(strings.Join(strings.Fields(group), " "), "#### `"+c.Name+"` ")
		if !found {
			t.Errorf("docs/doctor.md has no section %s in %q", c.Name, c.Group)
		} else if !strings.HasPrefix(section, "*"+strings.ToLower(c.Title)+".*") {
			t.Errorf("docs/doctor.md: section %s does not begin with *%s.*", c.Name, c.Title)
		}
	}
	for line := range strings.Lines(page) {
		if name, ok := strings.CutPrefix(line, "#### "); ok && !slices.Contains(names, strings.Trim(name, "`\n")) {
			t.Errorf("docs/doctor.md: there is no check %s", name)
		}
	}
	trouble := read(t, "docs/troubleshooting.md")
	for _, name := range names {
		if !strings.Contains(trouble, "](doctor.md#"+name+")") {
			t.Errorf("docs/troubleshooting.md leads from no symptom to the check %s", name)
		}
	}
}
