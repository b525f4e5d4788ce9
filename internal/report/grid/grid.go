// Package grid lays out what people read in a terminal: rows in columns, and bars.
package grid

import (
	"io"
	"strings"
	"unicode/utf8"
)

// Column is one column of a Grid.
type Column struct {
	Title string
	Right bool // aligned to the right, as numbers are
}

// Grid lays out rows in columns. It is used instead of text/tabwriter because
// numbers are read from the right and names from the left.
type Grid struct {
	Columns []Column
	rows    [][]string
}

// Add appends a row; columns that it does not reach are empty.
func (g *Grid) Add(cells ...string) { g.rows = append(g.rows, cells) }

// Write prints the titles and the rows, each after the indent.
func (g *Grid) Write(w io.Writer, indent string) error {
	titles := make([]string, len(g.Columns))
	for i, c := range g.Columns {
		titles[i] = c.Title
	}
	rows := append([][]string{titles}, g.rows...)
	widths := make([]int, len(g.Columns))
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
			if g.Columns[i].Right {
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

// barWidth is the number of signs in a bar.
const barWidth = 20

// Bar draws how much is used. Only nothing is drawn as nothing, and only all as
// all.
func Bar[N ~int64 | ~uint64](used, total N) string {
	n := 0
	switch {
	case used <= 0 || total <= 0:
	case used >= total:
		n = barWidth
	default:
		n = min(max(int(float64(used)/float64(total)*barWidth+0.5), 1), barWidth-1)
	}
	return "[" + strings.Repeat("#", n) + strings.Repeat("-", barWidth-n) + "]"
}
