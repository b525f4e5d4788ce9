package packing

import (
	"errors"
	"fmt"
	"html/template"
	"io"
	"math"
	"strings"

	"github.com/divvy-gpu/divvy/internal/report/simulate"
)

// The size of one panel of a plot and of what is around it, in pixels.
const (
	panelWidth, panelHeight = 360, 240
	marginLeft, marginTop   = 46, 34
	marginRight             = 14
	marginBottom            = 40
	legendLine              = 16
	maxPanelsInRow          = 3
)

// plotFrom is the arrived demand at which plots begin: before it, policies do
// not differ, as all pods find room.
const plotFrom = 60

// colours can be told apart by people who see colours differently (Okabe and
// Ito, "Color Universal Design", 2008).
var colours = []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442"}

// panel is one workload in a plot.
type panel struct {
	X, Y   int
	Title  string
	Lines  []line
	XTicks []tick
	YTicks []tick
	// Ideal is the line of a cluster that takes all.
	Ideal string
}

type line struct {
	Policy, Points, Colour, Dash string
	// LegendY is where its name stands.
	LegendY int
	Last    string
}

type tick struct {
	At   float64
	Text string
}

// ErrNothingToPlot is the error of a plot of something that has no curve.
var ErrNothingToPlot = errors.New("a plot shows allocated share over arrived demand; there is none with churn or when nodes are looked for")

// PrintSVG prints a plot of what was allocated over what had arrived, a panel
// per workload.
func PrintSVG(out io.Writer, r *simulate.Report) error {
	if r.Kind != simulate.ReplayReport {
		return ErrNothingToPlot
	}
	until := r.Arrived[len(r.Arrived)-1]
	from := plotFrom
	if until <= from+10 {
		from = 0
	}
	lowest := 100.0
	for _, w := range r.Workloads {
		for _, p := range w.Policies {
			lowest = min(lowest, p.Curve[from])
		}
	}
	bottom := math.Max(0, 10*math.Floor(lowest/10))
	inner := struct{ w, h float64 }{panelWidth - marginLeft - marginRight, panelHeight - marginTop - marginBottom}
	x := func(v float64) float64 { return marginLeft + inner.w*(v-float64(from))/float64(until-from) }
	y := func(v float64) float64 { return marginTop + inner.h*(100-v)/(100-bottom) }

	view := struct {
		Width, Height int
		Left, Right   float64
		Top, Bottom   float64
		Panels        []panel
		Legend        []line
		LegendY       int
	}{Left: x(float64(from)), Right: x(float64(until)), Top: y(100), Bottom: y(bottom)}
	inRow := min(len(r.Workloads), maxPanelsInRow)
	rows := (len(r.Workloads) + inRow - 1) / inRow
	for i, w := range r.Workloads {
		p := panel{X: i % inRow * panelWidth, Y: i / inRow * panelHeight, Title: w.Name}
		for at := from; at <= until; at += 10 {
			p.XTicks = append(p.XTicks, tick{x(float64(at)), fmt.Sprint(at)})
		}
		for at := bottom; at <= 100; at += 10 {
			p.YTicks = append(p.YTicks, tick{y(at), fmt.Sprint(at)})
		}
		ideal := []string{fmt.Sprintf("%.1f,%.1f", x(math.Max(float64(from), bottom)), y(math.Max(float64(from), bottom)))}
		if until >= 100 {
			ideal = append(ideal, fmt.Sprintf("%.1f,%.1f", x(100), y(100)))
		}
		p.Ideal = strings.Join(append(ideal, fmt.Sprintf("%.1f,%.1f", x(float64(until)), y(math.Min(100, float64(until))))), " ")
		for j, res := range w.Policies {
			var points []string
			for at := from; at <= until; at++ {
				points = append(points, fmt.Sprintf("%.1f,%.1f", x(float64(at)), y(res.Curve[at])))
			}
			p.Lines = append(p.Lines, line{
				Policy: res.Policy, Points: strings.Join(points, " "), Colour: colours[j%len(colours)], Dash: dash(j),
				Last: fmt.Sprintf("%.2f %%", res.Curve[until]),
			})
		}
		view.Panels = append(view.Panels, p)
	}
	for j, l := range view.Panels[0].Lines {
		l.LegendY = rows*panelHeight + legendLine*j + legendLine
		view.Legend = append(view.Legend, l)
	}
	view.Width, view.Height = inRow*panelWidth, rows*panelHeight+legendLine*(len(view.Legend)+1)
	if err := plot.Execute(out, view); err != nil {
		return fmt.Errorf("plot: %w", err)
	}
	return nil
}

// dash tells lines apart when the colours are used up.
func dash(i int) string {
	if i < len(colours) {
		return "none"
	}
	return "6 3"
}

// plot is escaped as HTML, whose rules for text and attributes are those of SVG
// too: names of workloads come from file names.
var plot = template.Must(template.New("plot").Parse(`<svg xmlns="http://www.w3.org/2000/svg"
 width="{{.Width}}" height="{{.Height}}" viewBox="0 0 {{.Width}} {{.Height}}" font-family="sans-serif" font-size="11">
<title>Allocated share of the devices over arrived demand, in percent</title>
<rect width="100%" height="100%" fill="#ffffff"/>
{{- range .Panels}}
<g transform="translate({{.X}} {{.Y}})">
<text x="{{$.Left}}" y="20" font-size="13" font-weight="bold">{{.Title}}</text>
{{- range .YTicks}}
<line x1="{{$.Left}}" x2="{{$.Right}}" y1="{{.At}}" y2="{{.At}}" stroke="#dddddd"/>
<text x="{{$.Left}}" y="{{.At}}" dx="-6" dy="4" text-anchor="end">{{.Text}}</text>
{{- end}}
{{- range .XTicks}}
<line x1="{{.At}}" x2="{{.At}}" y1="{{$.Bottom}}" y2="{{$.Bottom}}" stroke="#888888"/>
<text x="{{.At}}" y="{{$.Bottom}}" dy="14" text-anchor="middle">{{.Text}}</text>
{{- end}}
<text x="{{$.Right}}" y="{{$.Bottom}}" dy="28" text-anchor="end">arrived demand, % of the devices</text>
<text x="{{$.Right}}" y="20" text-anchor="end">allocated, %</text>
<polyline points="{{.Ideal}}" fill="none" stroke="#aaaaaa" stroke-dasharray="2 3"/>
{{- range .Lines}}
<polyline points="{{.Points}}" fill="none" stroke="{{.Colour}}" stroke-width="1.6" stroke-dasharray="{{.Dash}}">
<title>{{.Policy}}: {{.Last}}</title></polyline>
{{- end}}
</g>
{{- end}}
{{- range .Legend}}
<line x1="16" x2="46" y1="{{.LegendY}}" y2="{{.LegendY}}" stroke="{{.Colour}}" stroke-width="3" stroke-dasharray="{{.Dash}}"/>
<text x="54" y="{{.LegendY}}" dy="4">{{.Policy}}</text>
{{- end}}
</svg>
`))
