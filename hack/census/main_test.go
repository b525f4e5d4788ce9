package main

import (
	"strings"
	"testing"
)

func TestCensus(t *testing.T) {
	c := &census{packages: map[string]bool{}, types: map[string]*typ{}}
	for name, source := range map[string]string{
		"internal/a/a.go": "package a\n\nimport other \"" + module +
			"/internal/b\"\n\ntype T struct {\n\tx, y int\n\t*U\n\tother.V\n}\n\n" +
			"type U struct{ z int }\n\nfunc (t *T) M() {}\nfunc (T) N()    {}\n",
		"internal/b/b.go": "package b\n\ntype V struct {\n\tA int `json:\"a\"`\n}\n\n// " + strings.Repeat("é", 137) + "\n// " +
			strings.Repeat("é", 138) + "\n",
		"internal/b/b_test.go": "package b\n",
		"lab/l.go":             "package lab\n",
		"hack/h.go":            "package main\n\ntype large struct {\n" + strings.Repeat("\t_ int\n", maxFields+1) + "}\n",
	} {
		if err := c.add(name, []byte(source)); err != nil {
			t.Fatal(err)
		}
	}
	var b strings.Builder
	if err := c.print(&b); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"product 22, lab 1, together 23; tests 1\n", "internal/: 2\n", "columns: 1\n", "    6  internal/a.T\n", "    1  internal/b.V\n",
		"    2  internal/a.T\n", "above the limit of 20:\n   21  hack.large\ntypes by", "above the limit of 25:\n  none\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in:\n%s", want, b.String())
		}
	}
	if err := c.add("internal/c/c.go", []byte("pack")); err == nil {
		t.Error("a file that is no Go is counted")
	}
}
