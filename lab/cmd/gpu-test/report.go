package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/lab/internal/checks"
)

// section is a part of the test with what was found in it.
type section struct {
	Title  string
	Tables []table
	Notes  []string
	Checks []checks.Result
	// first is the number of its first check.
	first int
}

// table has a row of as many cells as Head for each thing.
type table struct {
	Head []string
	Rows [][]string
}

// report is what a run found, for people who were not there.
type report struct {
	Date     time.Time
	Version  string
	Verdict  string
	Sections []section
}

// record is what a run shows and checks: printed at once, and kept for the report.
type record struct {
	out      io.Writer
	checks   checks.Checks
	sections []section
}

// title begins a section.
func (r *record) title(text string) {
	fmt.Fprintf(r.out, "\n=== %s %s\n", text, strings.Repeat("=", max(0, 74-len(text))))
	r.sections = append(r.sections, section{Title: text, first: r.checks.Made()})
}

// section is the one that was begun last.
func (r *record) section() *section { return &r.sections[len(r.sections)-1] }

// note says what is no check.
func (r *record) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	fmt.Fprintf(r.out, "      %s\n", text)
	r.section().Notes = append(r.section().Notes, text)
}

// table shows a table.
func (r *record) table(rows table) {
	w := tabwriter.NewWriter(r.out, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{rows.Head}, rows.Rows...) {
		if strings.Join(row, "") != "" {
			fmt.Fprintf(w, "      %s\n", strings.Join(row, "\t"))
		}
	}
	w.Flush()
	r.section().Tables = append(r.section().Tables, rows)
}

// write writes the report into a file.
func (r *record) write(path string, date time.Time, verdict string) error {
	sections := slices.Clone(r.sections)
	results := r.checks.Results()
	for i, end := len(sections)-1, len(results); i >= 0; i-- {
		sections[i].Checks = results[sections[i].first:end]
		end = sections[i].first
	}
	page := report{Date: date, Version: version.String("gpu-test"), Verdict: verdict, Sections: sections}
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("write the report: %w", err) // it would not be known what to leave out
	}
	home, _ := os.UserHomeDir()
	if err := os.WriteFile(path, []byte(anonymous(page.Markdown(), host, home)), 0o644); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// Markdown is the report as a page.
func (r report) Markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Test on a GPU, %s\n\n%s. %s.\n", r.Date.UTC().Format(time.DateOnly), r.Version, cell(r.Verdict))
	for _, s := range r.Sections {
		fmt.Fprintf(&b, "\n## %s\n", s.Title)
		for _, t := range s.Tables {
			b.WriteString("\n")
			t.markdown(&b)
		}
		for _, note := range s.Notes {
			fmt.Fprintf(&b, "\n%s\n", cell(note))
		}
		if len(s.Checks) > 0 {
			rows := table{Head: []string{"check", "result"}}
			for _, c := range s.Checks {
				result := "ok"
				if !c.OK {
					result = "**differs**"
				}
				rows.Rows = append(rows.Rows, []string{c.Text, result})
			}
			b.WriteString("\n")
			rows.markdown(&b)
		}
	}
	return b.String()
}

func (t table) markdown(b *strings.Builder) {
	line := func(cells []string) {
		for _, c := range cells {
			fmt.Fprintf(b, "| %s ", cell(c))
		}
		b.WriteString("|\n")
	}
	line(t.Head)
	b.WriteString(strings.Repeat("|---", len(t.Head)) + "|\n")
	for _, row := range t.Rows {
		line(row)
	}
}

// cell is a text without what means something in Markdown's tables.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "\n", " ").Replace(strings.TrimSpace(text))
}

var (
	uuids = regexp.MustCompile(`\b([0-9a-fA-F]{8})(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b`)
	homes = regexp.MustCompile(`/(?:home|Users)/[^/\s|]+|/root\b`)
)

// anonymous is a text without what identifies the machine: UUIDs are shortened, the names
// of the host and of home directories are left out.
func anonymous(text, host, home string) string {
	text = uuids.ReplaceAllString(text, "$1...")
	if home != "" && home != "/" {
		text = strings.ReplaceAll(text, home, "~")
	}
	text = homes.ReplaceAllString(text, "~")
	short, _, _ := strings.Cut(host, ".")
	for _, name := range []string{host, cmp.Or(short, host)} {
		if name == "" || name == "localhost" {
			continue
		}
		whole := regexp.MustCompile(`(^|[^\w.-])` + regexp.QuoteMeta(name) + `($|[^\w-])`)
		text = whole.ReplaceAllString(text, "${1}HOST${2}")
	}
	return text
}
