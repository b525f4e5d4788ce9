package inspect

import (
	"io"
	"strings"
	"unicode/utf8"
)

// column is one column of a grid.
type column struct {
	title string
	right bool // aligned to the right, as numbers are
}

// grid lays out rows in columns. It is used instead of text/tabwriter because
// numbers are read from the right and names from the left.
type grid struct {
	columns []column
	rows    [][]string
}

// add appends a row; columns that it does not reach are empty.
func (g *grid) add(cells ...string) { g.rows = append(g.rows, cells) }

// write prints the titles and the rows, each after the indent.
func (g *grid) write(w io.Writer, indent string) error {
	titles := make([]string, len(g.columns))
	for i, c := range g.columns {
		titles[i] = c.title
	}
	rows := append([][]string{titles}, g.rows...)
	widths := make([]int, len(g.columns))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	for _, row := range rows {
		var line strings.Builder
		line.WriteString(indent)
		for i, cell := range row {
			if i > 0 {
				line.WriteString("  ")
			}
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if g.columns[i].right {
				line.WriteString(pad + cell)
			} else {
				line.WriteString(cell + pad)
			}
		}
		b.WriteString(strings.TrimRight(line.String(), " "))
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}
