package inspect

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/report/grid"
)

// writeTable prints the report, with details, for people.
func writeTable(w io.Writer, r Report, wide bool) error {
	var parts []func() error
	for _, n := range r.Nodes {
		parts = append(parts, func() error { return writeNode(w, n, wide) })
	}
	if last := len(parts) - 1; last > 0 {
		parts[last] = func() error { return errors.Join(writeNode(w, r.Nodes[last], wide), writeTotals(w, r.Nodes)) }
	}
	for _, n := range r.Claims {
		parts = append(parts, func() error { return writeClaims(w, n) })
	}
	if r.Pool != nil {
		parts = append(parts, func() error { return writePool(w, r.Pool, wide) })
	}
	if len(parts) == 0 {
		_, err := fmt.Fprintln(w, "no node shares devices")
		return err
	}
	for i, write := range parts {
		if i > 0 {
			if _, err := fmt.Fprintln(w); err != nil {
				return err
			}
		}
		if err := write(); err != nil {
			return err
		}
	}
	return nil
}

// writeTotals sums up every resource that several nodes offer, and names it
// when there are others.
func writeTotals(w io.Writer, nodes []Node) error {
	var order []accel.Resource
	byResource := map[accel.Resource][]Node{}
	for _, n := range nodes {
		if byResource[n.Resource] == nil {
			order = append(order, n.Resource)
		}
		byResource[n.Resource] = append(byResource[n.Resource], n)
	}
	slices.Sort(order)
	before := "\n"
	for _, resource := range order {
		some := byResource[resource]
		if len(some) == 1 {
			continue
		}
		if len(order) > 1 {
			before += string(resource) + ": "
		}
		if _, err := fmt.Fprintf(w, "%s%s\n", before, total(some)); err != nil {
			return err
		}
		before = ""
	}
	return nil
}

// Shared says how the resource shares devices: how its units are counted.
func (n Node) Shared() string {
	switch {
	case n.Unit != "":
		return "in " + unitName(n.Unit)
	case slices.ContainsFunc(n.Devices, func(d Device) bool { return d.Total > 1 }):
		return "in time slices"
	case slices.ContainsFunc(n.Devices, func(d Device) bool { return d.Profile != "" }):
		return "as partitions"
	}
	return "as whole devices"
}

func writeNode(w io.Writer, n Node, wide bool) error {
	if _, err := fmt.Fprintf(w, "NODE %s: %s, %s %s\n", n.Name, count(len(n.Devices), "card"), n.Resource, n.Shared()); err != nil {
		return err
	}
	g := &grid.Grid{Columns: []grid.Column{{Title: "CARD"}}}
	boards := slices.ContainsFunc(n.Devices, func(d Device) bool { return d.Chips > 1 })
	if boards {
		g.Columns = append(g.Columns, grid.Column{Title: "CHIPS", Right: true})
	}
	profiles := slices.ContainsFunc(n.Devices, func(d Device) bool { return d.Profile != "" })
	if profiles {
		g.Columns = append(g.Columns, grid.Column{Title: "PROFILE"})
	}
	if wide {
		g.Columns = append(g.Columns, grid.Column{Title: "UUID"}, grid.Column{Title: "NUMA"}, grid.Column{Title: "BOARD"})
	}
	g.Columns = append(g.Columns, grid.Column{Title: "MODEL"}, grid.Column{Title: "HEALTH"})
	if wide {
		g.Columns = append(g.Columns, grid.Column{Title: "TIER"})
	}
	g.Columns = append(g.Columns,
		grid.Column{Title: "TOTAL", Right: true}, grid.Column{Title: "USED", Right: true})
	withheld := slices.ContainsFunc(n.Devices, func(d Device) bool { return d.Withheld > 0 })
	if withheld {
		g.Columns = append(g.Columns, grid.Column{Title: "WITHHELD", Right: true})
	}
	g.Columns = append(g.Columns, grid.Column{Title: "FREE", Right: true}, grid.Column{Title: "USE"}, grid.Column{Title: "POD"},
		grid.Column{Title: "HOLDS", Right: true})
	if wide {
		g.Columns = append(g.Columns, grid.Column{Title: "CONFIRMED"}, grid.Column{Title: "CREATED"}, grid.Column{Title: "POD UID"})
	}
	// device begins the row of a device.
	device := func(card, chips, profile, uuid, numa, board, model, health, tier string, amounts ...string) []string {
		row := []string{card}
		if boards {
			row = append(row, chips)
		}
		if profiles {
			row = append(row, profile)
		}
		if wide {
			row = append(row, uuid, numa, board)
		}
		if row = append(row, model, health); wide {
			row = append(row, tier)
		}
		return append(row, amounts...)
	}
	amounts := func(total, used, kept, free, use string) []string {
		if !withheld {
			return []string{total, used, free, use}
		}
		return []string{total, used, kept, free, use}
	}
	var notes []string
	var kept accel.Units
	for _, d := range n.Devices {
		health, about := n.health(d)
		notes = append(notes, about...)
		kept += d.Withheld
		numa := "-"
		if d.NUMANode != nil {
			numa = strconv.Itoa(*d.NUMANode)
		}
		addPods(g, d.Pods, wide, device(accel.IndexText(d.ID), strconv.Itoa(max(d.Chips, 1)), cmp.Or(d.Profile, "-"), string(d.UUID), numa,
			place(d), cmp.Or(d.Model, "-"), health, d.tier(),
			amounts(number(d.Total), number(d.Used), number(d.Withheld), number(d.Available), grid.Bar(d.Used, d.Total))...))
	}
	if len(n.Unplaced) > 0 {
		var used accel.Units
		for _, p := range n.Unplaced {
			used += p.Used
		}
		addPods(g, n.Unplaced, wide, device("?", "", "", "", "", "", "", "", "", amounts("", number(used), "", "", "")...))
		notes = append(notes, "?: the node has not reported the card of these pods yet, or the card is lost")
	}
	g.Add(device("sum", "", "", "", "", "", "", "", "",
		amounts(number(n.Total), number(n.Used), number(kept), number(n.Available), grid.Bar(n.Used, n.Total))...)...)
	if err := g.Write(w, "  "); err != nil {
		return err
	}
	for _, note := range notes {
		if _, err := fmt.Fprintln(w, "  "+note); err != nil {
			return err
		}
	}
	return nil
}

// tier is what isolates the device's memory and compute time.
func (d *Device) tier() string {
	if d.Isolation == nil {
		return accel.TierNone.String()
	}
	return accel.Isolation(*d.Isolation).String()
}

// health returns the state of a device, and the lines about it below the table.
func (n Node) health(d Device) (state string, notes []string) {
	card := accel.IndexText(d.ID)
	state = "healthy"
	switch {
	case !d.Quarantined.IsZero():
		state = "QUARANTINE"
		notes = append(notes, fmt.Sprintf("card %s is in quarantine since %s: %s; %s", card, d.Quarantined.Format(time.RFC3339),
			cmp.Or(d.Reason, "-"), n.release(d)))
	case d.Unhealthy:
		state = "UNHEALTHY"
		if strings.HasPrefix(d.Reason, accel.ReasonGivenOut) {
			state = "given out" // nothing is wrong with it
		}
		notes = append(notes, fmt.Sprintf("no new pods are placed on card %s: %s", card, cmp.Or(d.Reason, "-")))
	}
	if d.Withheld > 0 {
		notes = append(notes, fmt.Sprintf("%s of card %s withheld from new pods: containers use more of its memory than their "+
			"allocations; to see which, run: kubectl divvy inspect --usage %s", count(int(d.Withheld), "unit"), card, n.Name))
	}
	return state, notes
}

// release says how a device gets out of quarantine. A board has the id of its first
// chip, which need not be the one that is in quarantine, and a partition may be so with
// its parent.
func (n Node) release(d Device) string {
	switch {
	case d.Chips > 1:
		return "to find the chip and how to release it, run: kubectl divvy device list " + n.Name
	case d.Parent != "":
		return "to find out whether it or its device is to be released, run: kubectl divvy device list " + n.Name
	}
	return fmt.Sprintf("to release it, run: kubectl divvy device release %s %s", n.Name, d.UUID)
}

// addPods adds one row for each pod; the first begins with the device.
func addPods(g *grid.Grid, pods []Pod, wide bool, device []string) {
	if len(pods) == 0 {
		g.Add(append(device, "-")...)
		return
	}
	for i, p := range pods {
		row := make([]string, len(device), len(g.Columns))
		if i == 0 {
			copy(row, device)
		}
		row = append(row, p.Namespace+"/"+p.Name, p.Holds())
		if wide {
			confirmed := "no"
			if p.Confirmed {
				confirmed = "yes"
			}
			row = append(row, confirmed, p.CreateTime.Format(time.RFC3339), p.UID)
		}
		g.Add(row...)
	}
}

// place is the device's board and, of a chip, its position there.
func place(d Device) string {
	if d.Board == "" || d.Chips > 1 {
		return cmp.Or(d.Board, "-")
	}
	return d.Board + "/" + strconv.Itoa(d.Chip)
}

// Holds says what a pod holds of a device: how many units, or that it has the
// whole device, or which of its slices.
func (p Pod) Holds() string {
	if len(p.IDs) == 0 {
		if p.Cards > 1 {
			return number(p.Used) + " of " + number(p.Of)
		}
		return number(p.Used)
	}
	slots := make([]string, len(p.IDs))
	for i, id := range p.IDs {
		slots[i] = "whole"
		if cut := strings.LastIndex(id, "::"); cut >= 0 {
			slots[i] = id[cut:]
		}
	}
	return strings.Join(slots, " ")
}

// total is the last line of a resource that several nodes offer. Nodes may
// count in different units, so then it counts in GB.
func total(nodes []Node) string {
	var all, used, available, cards int64
	unit, mixed, how := nodes[0].Unit, false, nodes[0].Shared()
	for _, n := range nodes {
		mixed = mixed || n.Unit != unit
		if n.Shared() != how {
			how = "as whole devices or slices"
		}
		cards += int64(len(n.Devices))
	}
	per := func(Node) int64 { return 1 }
	format := func(n int64) string { return strconv.FormatInt(n, 10) }
	switch {
	case mixed && slices.ContainsFunc(nodes, func(n Node) bool { return milliGB(n.Unit) == 0 }):
		how = "in units of different sizes"
	case mixed:
		per, format, how = func(n Node) int64 { return milliGB(n.Unit) }, fromMilli, "in GB"
	}
	for _, n := range nodes {
		all += int64(n.Total) * per(n)
		used += int64(n.Used) * per(n)
		available += int64(n.Available) * per(n)
	}
	return fmt.Sprintf("%s, %s: total %s, used %s, free %s, %s  %s",
		count(len(nodes), "node"), count(int(cards), "card"), format(all), format(used), format(available), how,
		grid.Bar(accel.Units(used), accel.Units(all)))
}

// unitName says what is counted in memory.
func unitName(unit string) string { return "units of " + accel.UnitName(unit) }

// milliGB is the size of a unit in thousandths of a GB, 0 when unknown and for a part of a card.
func milliGB(unit string) int64 {
	f, err := strconv.ParseFloat(unit, 64)
	if err != nil || f <= 0 || f > 1e6 {
		return 0
	}
	return int64(f*1000 + 0.5)
}

// fromMilli writes thousandths without trailing zeros.
func fromMilli(n int64) string { return strconv.FormatFloat(float64(n)/1000, 'f', -1, 64) }

func number(n accel.Units) string { return strconv.FormatInt(int64(n), 10) }

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}
