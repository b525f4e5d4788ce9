// Package usagereport prints reports of measured use: what is in use of each device of a node,
// and which containers use it beside what they hold.
package usagereport

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/report/grid"
)

// none stands for what is not known.
const none = "-"

// WriteJSON writes a value as JSON that people can read.
func WriteJSON(w io.Writer, value any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false) // names are shown as they are
	e.SetIndent("", "    ")
	if err := e.Encode(value); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// WriteTable prints the report of one node for people.
func WriteTable(w io.Writer, r wire.UsageReport) error {
	if _, err := fmt.Fprintf(w, "NODE %s: measured at %s\n", r.Node, r.Time.UTC().Format(time.RFC3339)); err != nil {
		return err
	}
	if len(r.Devices) == 0 {
		_, err := fmt.Fprintln(w, "  no device whose use can be measured")
		return err
	}
	for _, d := range r.Devices {
		if err := writeDevice(w, d); err != nil {
			return err
		}
	}
	return nil
}

func writeDevice(w io.Writer, d wire.DeviceUsage) error {
	name := fmt.Sprintf("%s %s %s", d.Vendor, accel.IndexText(d.Index), d.Device)
	if d.Problem != "" {
		_, err := fmt.Fprintf(w, "  %s: total %s, used %s: %s\n", name, size(&d.MemoryBytes), none, d.Problem)
		return err
	}
	if _, err := fmt.Fprintf(w, "  %s: total %s, used %s  %s %s\n", name, size(&d.MemoryBytes), size(&d.UsedBytes),
		grid.Bar(d.UsedBytes, d.MemoryBytes), percent(d.UsedBytes, d.MemoryBytes)); err != nil {
		return err
	}
	g := &grid.Grid{Columns: []grid.Column{{Title: "USED BY"}, {Title: "RESOURCE"}, {Title: "ALLOCATED", Right: true},
		{Title: "USED", Right: true}, {Title: "OF ALLOCATED"}, {Title: "UTILIZATION", Right: true}}}
	for _, c := range d.Containers {
		part := none
		if c.AllocatedBytes != nil && c.UsedBytes != nil {
			part = grid.Bar(*c.UsedBytes, *c.AllocatedBytes) + " " + percent(*c.UsedBytes, *c.AllocatedBytes)
			if *c.UsedBytes > *c.AllocatedBytes {
				part += " !"
			}
		}
		utilization := none
		if c.Utilization != nil {
			utilization = fmt.Sprintf("%.0f%%", *c.Utilization*100)
		}
		g.Add(fmt.Sprintf("%s/%s/%s", c.Namespace, c.Pod, cmp.Or(c.Container, none)), cmp.Or(string(c.Resource), none),
			size(c.AllocatedBytes), size(c.UsedBytes), part, utilization)
	}
	for _, rest := range []struct {
		kind  string
		bytes uint64
	}{{"system", d.SystemBytes}, {"foreign", d.ForeignBytes}, {"unknown", d.UnknownBytes}} {
		g.Add(rest.kind, "", "", size(&rest.bytes))
	}
	return g.Write(w, "    ")
}

// size writes an amount of memory.
func size(bytes *uint64) string {
	const mib, gib = 1 << 20, 1 << 30
	switch {
	case bytes == nil:
		return none
	case *bytes == 0:
		return "0"
	case *bytes < gib:
		return fmt.Sprintf("%.0f MiB", math.Ceil(float64(*bytes)/mib))
	}
	return fmt.Sprintf("%.2f GiB", float64(*bytes)/gib)
}

// percent is the part that is used of an amount.
func percent(used, of uint64) string {
	if of == 0 {
		return none
	}
	return fmt.Sprintf("%.0f%%", float64(used)/float64(of)*100)
}
