package docscript_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/docscript"
)

const root = "../../.."

var (
	testFunction = regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)
	note         = regexp.MustCompile(`\s+# .*`)
	makeTarget   = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):`)
)

// TestPages reads the documentation: every fence with commands is one that a test
// runs, or says which other test or target does.
func TestPages(t *testing.T) {
	runners := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, match := range testFunction.FindAllSubmatch(source, -1) {
			runners[string(match[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	for _, match := range makeTarget.FindAllSubmatch(makefile, -1) {
		runners["make "+string(match[1])] = true
	}

	files, err := docscript.Files(root)
	if err != nil {
		t.Fatal(err)
	}
	here, elsewhere, nowhere := 0, 0, 0
	for _, file := range files {
		page, err := docscript.Read(filepath.Join(root, file))
		if err != nil {
			t.Error(err)
			continue
		}
		for _, e := range page.Excerpts {
			content, err := os.ReadFile(filepath.Join(root, e.File))
			if err == nil {
				err = page.CheckFile(e, string(content))
			}
			if err != nil {
				t.Error(err)
			}
		}
		h, e, n := page.Runs()
		here, elsewhere, nowhere = here+h, elsewhere+e, nowhere+n
		for _, b := range page.Blocks {
			switch {
			case b.By == "" || runners[b.By]:
			case strings.HasSuffix(b.By, ".md"):
				checkSame(t, file, b)
			default:
				t.Errorf("%s:%d: by: %s: there is no such test, target of make or page", file, b.Line, b.By)
			}
		}
	}
	t.Logf("%d commands are run with their pages, %d by others, %d by none, in %d files", here, elsewhere, nowhere, len(files))
	if here == 0 {
		t.Error("no page has a command")
	}
}

// checkSame looks for the block's commands on the page that runs them, which has to
// show the same of their output as the block, if that shows any.
func checkSame(t *testing.T, file string, b docscript.Block) {
	t.Helper()
	page, err := docscript.Read(filepath.Join(root, b.By))
	if err != nil {
		t.Error(err)
		return
	}
	shown := map[string][]string{}
	for _, other := range page.Blocks {
		for _, c := range other.Commands {
			// A page in another language has other notes.
			if text := note.ReplaceAllString(c.Text, ""); other.Why == "" {
				shown[text] = append(shown[text], strings.Join(c.Output, "\n"))
			}
		}
	}
	for _, c := range b.Commands {
		switch outputs, run := shown[note.ReplaceAllString(c.Text, "")]; {
		case !run:
			t.Errorf("%s:%d: by: %s: it does not run this command: %s", file, c.Line, b.By, c.Text)
		case len(c.Output) > 0 && !slices.Contains(outputs, strings.Join(c.Output, "\n")):
			t.Errorf("%s:%d: by: %s: it does not show this output: %s", file, c.Line, b.By, c.Text)
		}
	}
}
