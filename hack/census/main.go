// Command census prints measures of the tree: lines of Go, the types above the limits and the
// largest below, the packages at the top level of internal/, lines that are too wide, and
// terms that the project's texts do not use. It reads the files that git knows below the
// working directory, which is the root of the repository.
package main

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/divvy-gpu/divvy/hack/terms"
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "census:", err)
		os.Exit(1)
	}
}

const (
	// maxColumns is how wide a line of Go may be, a tab counted as 4.
	maxColumns = 140
	// maxFields and maxMethods are the limits of a type, the fields of embedded types counted.
	maxFields  = 20
	maxMethods = 25
	// listed is how many types of each kind are printed that are not above a limit.
	listed = 3
)

// module is the import path of the product; that of the lab is below it.
const module = "github.com/divvy-gpu/divvy"

// census is what was counted.
type census struct {
	// product and lab are lines without those of tests.
	product, lab, tests, wide int
	packages                  map[string]bool // at the top level of internal/
	types                     map[string]*typ // by import path and name
}

// typ is a declared type.
type typ struct {
	// fields are those that it declares, and embedded the types, by their keys, of which it
	// has the fields as well.
	fields   int
	embedded []string
	methods  int
	// data says that most fields have tags, as those of wire formats and configurations.
	data bool
}

func run(out io.Writer) error {
	names, err := exec.Command("git", "ls-files", "-z", "-co", "--exclude-standard", "*.go").Output()
	if err != nil {
		return fmt.Errorf("git ls-files: %w", err)
	}
	c := &census{packages: map[string]bool{}, types: map[string]*typ{}}
	for name := range strings.SplitSeq(strings.TrimRight(string(names), "\x00"), "\x00") {
		source, err := os.ReadFile(name)
		if os.IsNotExist(err) {
			continue // removed, and git was not told
		}
		if err != nil {
			return err
		}
		if err := c.add(name, source); err != nil {
			return err
		}
	}
	found, err := terms.Find(".")
	if err != nil {
		return err
	}
	for _, m := range found.Matches {
		fmt.Fprintf(out, "%s: %q: %s\n", m.Place, m.Term, m.Instead)
	}
	fmt.Fprintf(out, "matches of the %d patterns of private terms: %d\n", found.Patterns, len(found.Matches))
	return c.print(out)
}

// add counts a file.
func (c *census) add(name string, source []byte) error {
	for line := range bytes.Lines(source) {
		if utf8.RuneCount(bytes.TrimRight(line, "\n"))+3*bytes.Count(line, []byte("\t")) > maxColumns {
			c.wide++
		}
	}
	lines := bytes.Count(source, []byte("\n"))
	if strings.HasSuffix(name, "_test.go") {
		c.tests += lines
		return nil
	}
	switch top, _, _ := strings.Cut(name, "/"); top {
	case "api", "cmd", "internal":
		c.product += lines
	case "lab":
		c.lab += lines
	}
	if below, ok := strings.CutPrefix(name, "internal/"); ok {
		top, _, _ := strings.Cut(below, "/")
		c.packages[top] = true
	}
	file, err := parser.ParseFile(token.NewFileSet(), name, source, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	c.addTypes(module+"/"+path.Dir(name), file)
	return nil
}

// addTypes counts the fields and methods that a file declares.
func (c *census) addTypes(folder string, file *ast.File) {
	imports := map[string]string{}
	for _, i := range file.Imports {
		name := strings.Trim(i.Path.Value, `"`)
		local := path.Base(name)
		if i.Name != nil {
			local = i.Name.Name
		}
		imports[local] = name
	}
	for _, declaration := range file.Decls {
		switch d := declaration.(type) {
		case *ast.FuncDecl:
			if d.Recv != nil {
				c.at(key(folder, imports, d.Recv.List[0].Type)).methods++
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				s, ok := spec.(*ast.TypeSpec)
				if !ok {
					continue
				}
				if structure, ok := s.Type.(*ast.StructType); ok {
					c.at(folder+"."+s.Name.Name).take(folder, imports, structure)
				}
			}
		}
	}
}

// take counts the fields of a structure.
func (t *typ) take(folder string, imports map[string]string, structure *ast.StructType) {
	tags := 0
	for _, f := range structure.Fields.List {
		t.fields += max(len(f.Names), 1)
		if f.Tag != nil {
			tags++
		}
		if len(f.Names) == 0 {
			t.embedded = append(t.embedded, key(folder, imports, f.Type))
		}
	}
	t.data = 2*tags > len(structure.Fields.List)
}

func (c *census) at(key string) *typ {
	if c.types[key] == nil {
		c.types[key] = &typ{}
	}
	return c.types[key]
}

// key names the type of an expression by its import path.
func key(folder string, imports map[string]string, e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return key(folder, imports, e.X)
	case *ast.IndexExpr:
		return key(folder, imports, e.X)
	case *ast.IndexListExpr:
		return key(folder, imports, e.X)
	case *ast.SelectorExpr:
		if p, ok := e.X.(*ast.Ident); ok {
			return imports[p.Name] + "." + e.Sel.Name
		}
	case *ast.Ident:
		return folder + "." + e.Name
	}
	return ""
}

// all counts the fields of a type, those of its embedded types included where they are ours.
func (c *census) all(t *typ) int {
	sum := t.fields
	for _, e := range t.embedded {
		if inner := c.types[e]; inner != nil && inner != t {
			sum += c.all(inner)
		}
	}
	return sum
}

func (c *census) print(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "lines of Go without tests: product %d, lab %d, together %d; tests %d\n", c.product, c.lab, c.product+c.lab, c.tests)
	fmt.Fprintf(&b, "packages at the top level of internal/: %d\n", len(c.packages))
	fmt.Fprintf(&b, "lines over %d columns: %d\n", maxColumns, c.wide)
	var names []string
	for name := range c.types {
		if strings.HasPrefix(name, module) {
			names = append(names, name)
		}
	}
	// Without a limit it lists the wire formats and configurations.
	list := func(title string, limit int, size func(*typ) int) {
		slices.SortFunc(names, func(x, y string) int {
			return cmp.Or(cmp.Compare(size(c.types[y]), size(c.types[x])), cmp.Compare(x, y))
		})
		above, below := "", ""
		n := 0
		for _, name := range names {
			t := c.types[name]
			line := fmt.Sprintf("  %3d  %s\n", size(t), strings.TrimPrefix(name, module+"/"))
			switch {
			case t.data != (limit == 0):
			case limit > 0 && size(t) > limit:
				above += line
			case n < listed:
				below += line
				n++
			}
		}
		if limit > 0 {
			fmt.Fprintf(&b, "%s, above the limit of %d:\n%s", title, limit, cmp.Or(above, "  none\n"))
		}
		fmt.Fprintf(&b, "%s, the largest others:\n%s", title, below)
	}
	list("types by fields, with those of embedded types", maxFields, c.all)
	list("types by methods", maxMethods, func(t *typ) int { return t.methods })
	list("structures of wire formats and configurations by fields", 0, c.all)
	_, err := io.WriteString(out, b.String())
	return err
}
