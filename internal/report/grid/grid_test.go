package grid

import (
	"strings"
	"testing"
)

func TestWrite(t *testing.T) {
	g := &Grid{Columns: []Column{{Title: "NAME"}, {Title: "N", Right: true}, {Title: "REST"}}}
	g.Add("ä", "10", "x")
	g.Add("longer", "1")
	var out strings.Builder
	if err := g.Write(&out, "  "); err != nil {
		t.Fatal(err)
	}
	want := "  NAME     N  REST\n  ä       10  x\n  longer   1\n"
	if out.String() != want {
		t.Errorf("got\n%s, want\n%s", out.String(), want)
	}
}

func TestBar(t *testing.T) {
	for used, want := range map[int64]string{
		-5:   "[--------------------]",
		0:    "[--------------------]",
		1:    "[#-------------------]",
		500:  "[##########----------]",
		999:  "[###################-]",
		1000: "[####################]",
		2000: "[####################]",
	} {
		if got := Bar(used, 1000); got != want {
			t.Errorf("Bar(%d, 1000) = %s, want %s", used, got, want)
		}
	}
}
