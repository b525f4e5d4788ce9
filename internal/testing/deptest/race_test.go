package deptest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// unraced are the packages that the Makefile tests without the race detector.
var unraced = regexp.MustCompile(`(?m)^UNRACED +:= (.+)$`)

// starters are functions that call others of the package in a goroutine.
var starters = []string{
	"Go", "Parallel", "RunParallel", "AfterFunc", "HandlerFunc", "NewServer", "NewUnstartedServer", "ListenAndServe", "Serve",
}

// TestUnracedPackagesStartNoGoroutine: in one goroutine the race detector has nothing to find.
func TestUnracedPackagesStartNoGoroutine(t *testing.T) {
	const root = "../../.."
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	line := unraced.FindSubmatch(makefile)
	if line == nil {
		t.Fatalf("the Makefile has no line %s", unraced)
	}
	for dir := range strings.FieldsSeq(string(line[1])) {
		files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
		if err != nil || len(files) == 0 {
			t.Errorf("%s: %d files of Go: %v", dir, len(files), err)
		}
		for _, path := range files {
			for _, at := range goroutines(t, path, nil) {
				t.Errorf("%s starts a goroutine: take %s out of UNRACED in the Makefile", at, dir)
			}
		}
	}
}

func TestGoroutines(t *testing.T) {
	for source, want := range map[string]int{
		"package p\nfunc f() { go f() }":                                     1,
		"package p\nimport \"sync\"\nfunc f() { new(sync.WaitGroup).Go(f) }": 1,
		"package p\nfunc f(t *testing.T) { t.Parallel() }":                   1,
		"package p\nfunc f(h http.Handler) { httptest.NewServer(h) }":        1,
		"package p\nfunc f() { defer f(); g.Going() }":                       0,
	} {
		if got := goroutines(t, "p.go", source); len(got) != want {
			t.Errorf("%q: %v, want %d", source, got, want)
		}
	}
}

// goroutines returns where a file starts goroutines itself. The source is read from the file
// when it is nil.
func goroutines(t *testing.T, path string, source any) (at []string) {
	t.Helper()
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, source, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			at = append(at, files.Position(n.Pos()).String())
		case *ast.SelectorExpr:
			if slices.Contains(starters, n.Sel.Name) {
				at = append(at, files.Position(n.Pos()).String())
			}
		}
		return true
	})
	return at
}
