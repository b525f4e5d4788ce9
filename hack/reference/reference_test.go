package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const root = "../.."

// TestPagesAreUpToDate: `make generate` writes them, and the files of the chart.
func TestPagesAreUpToDate(t *testing.T) {
	want, err := render(root)
	if err != nil {
		t.Fatal(err)
	}
	pages, err := filepath.Glob(filepath.Join(root, folder, "*"))
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]string{}
	for _, file := range append(pages, filepath.Join(root, vendorsFile), filepath.Join(root, schemaFile)) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		have[strings.TrimPrefix(filepath.ToSlash(file), root+"/")] = string(text)
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("run \"make generate\" (-want +have):\n%s", diff)
	}
}

// TestPagesTellSomething: an empty table is as up to date as a full one.
func TestPagesTellSomething(t *testing.T) {
	all, err := render(root)
	if err != nil {
		t.Fatal(err)
	}
	for file, rows := range map[string][]string{
		"flags.md": {
			"### divvy-control extender", "| `--policy string` | `DIVVY_POLICY` | `binpack` |", "### divvy-node pool",
			"### divvy-node config check",
			"### kubectl divvy inspect", "### divvy-control webhook", "| `--config stringArray` |",
		},
		"configuration.md": {
			"| `healthInterval` | duration | `5s` |", "| `mode` | `exclusive`, `timeSlicing`, `memory` |", "## DeviceSelector",
			"| `recoverAfter` | duration | `10s` |",
			"list of [Resource](#resource)",
		},
		"values.md": {
			"## Images", "| `image.pullPolicy` | `IfNotPresent` | `Always`, `IfNotPresent`, `Never` | Always, IfNotPresent or Never. |",
			"| `sharedResources[].name` |",
			"| `extender.replicas` | `null` |", "| `pool.webhook.timeoutSeconds` | `10` | number, 1 to 30 |",
			"devices: while a container holds a device", "| `sharedResources[].replicas` |",
		},
		"metrics.md":     {"| `divvy_extender_requests_total` | counter |", "## divvy-node pool"},
		"events.md":      {"| `DeviceUnhealthy` | Warning |"},
		"annotations.md": {"| `divvy.dev/grant` | Pod |"},
		"README.md":      {"[Metrics](metrics.md)"},
	} {
		for _, row := range rows {
			if !strings.Contains(all[folder+"/"+file], row) {
				t.Errorf("%s lacks %q", file, row)
			}
		}
	}
}

// prefixed are the names that the table is about.
var prefixed = regexp.MustCompile(`^(?:[a-z]+\.)?` +
	`(?:divvy\.dev|enflame\.com|iluvatar\.com|nvidia\.com|bitfusion\.io|auto-management|bitfusion-client)` +
	`/[A-Za-z0-9._*/-]*$`)

// TestEveryNameInTheCodeIsListed: what code of the programs and the chart writes as
// a name on objects.
func TestEveryNameInTheCodeIsListed(t *testing.T) {
	found := map[string]string{}
	for _, dir := range []string{"internal", "cmd", "api"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") ||
				slices.Contains([]string{"vendorsim", "kubetest", "backendtest"}, filepath.Base(filepath.Dir(path))) {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				if literal, ok := n.(*ast.BasicLit); ok && literal.Kind == token.STRING {
					if text, err := strconv.Unquote(literal.Value); err == nil {
						text, _, _ = strings.Cut(text, "=")
						if prefixed.MatchString(text) {
							found[text] = path
						}
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	templates, err := filepath.Glob(filepath.Join(root, "charts/divvy/templates/*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range templates {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, word := range regexp.MustCompile(`[A-Za-z0-9._/-]+`).FindAllString(string(text), -1) {
			if word = strings.TrimRight(word, "."); prefixed.MatchString(word) {
				found[word] = path
			}
		}
	}
	if len(found) < 30 {
		t.Fatalf("only %d names were found", len(found))
	}
	for word, path := range found {
		if !listed(word) {
			t.Errorf("%s of %s is not in the table of hack/reference/names.go", word, path)
		}
	}
	for _, group := range nameTable {
		for _, n := range group.names {
			stem, pattern := strings.CutSuffix(n.text, "*")
			used := false
			for word := range found {
				used = used || word == stem || pattern && strings.HasPrefix(word, stem) || strings.HasPrefix(stem, word) &&
					strings.HasSuffix(word, "/")
			}
			if !used && strings.HasPrefix(n.text, "divvy.dev/") && !pattern {
				t.Errorf("%s is listed, and no code writes it", n.text)
			}
		}
	}
}

// listed reports whether the table has a name, or names that begin with it.
func listed(word string) bool {
	for _, group := range nameTable {
		for _, n := range group.names {
			stem, pattern := strings.CutSuffix(n.text, "*")
			if n.text == word || pattern && strings.HasPrefix(word, stem) {
				return true
			}
			// The beginning of a family, to which code adds the rest.
			if strings.HasPrefix(n.text, word) && strings.ContainsAny(word[len(word)-1:], "/.-") {
				return true
			}
		}
	}
	return false
}
