package inspect

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/report/grid"
)

// ClaimNode is a node with the devices that it offers to ResourceClaims.
type ClaimNode struct {
	Name string `json:"name"`
	// Devices are in the order in which kube-scheduler tries them.
	Devices []ClaimDevice `json:"devices"`
}

// ClaimDevice is a device that claims get. Several may be made of the same hardware, such as a
// board and its chips; one of them is allocated at a time.
type ClaimDevice struct {
	Driver string `json:"driver"`
	Name   string `json:"name"`
	// Type, UUID and Model are empty where claims hold a device that is not published any more.
	Type  string         `json:"type,omitempty"`
	UUID  accel.DeviceID `json:"uuid,omitempty"`
	Model string         `json:"model,omitempty"`
	// MemoryBytes is the memory that claims share; Slots is how many time slices there are, 0
	// for a device that is not sliced.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	Slots       int64 `json:"slots,omitempty"`
	// Taints are why it is not allocated: keys, with a value after "=".
	Taints []string `json:"taints,omitempty"`
	// Claims are sorted by namespace and name.
	Claims []Claim `json:"claims"`
}

// Claim is what a ResourceClaim holds of a device.
type Claim struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
	// Pods are the names of those that the claim is reserved for.
	Pods        []string `json:"pods,omitempty"`
	MemoryBytes int64    `json:"memoryBytes,omitempty"`
	Slots       int64    `json:"slots,omitempty"`
	// Units are what the pod requested, where the claim is in the place of units.
	Units *wire.ClaimedUnits `json:"units,omitempty"`
	// Admin is true for a claim with admin access, which holds nothing.
	Admin bool `json:"adminAccess,omitempty"`
}

// writeClaims prints what claims hold of the devices of a node, for people.
func writeClaims(w io.Writer, n ClaimNode) error {
	if _, err := fmt.Fprintf(w, "NODE %s: %s for claims\n", n.Name, count(len(n.Devices), "device")); err != nil {
		return err
	}
	g := &grid.Grid{Columns: []grid.Column{
		{Title: "DEVICE"}, {Title: "MODEL"}, {Title: "HEALTH"}, {Title: "TOTAL", Right: true}, {Title: "USED", Right: true},
		{Title: "CLAIM"}, {Title: "HOLDS", Right: true}, {Title: "POD"},
	}}
	if n.fromUnits() {
		g.Columns = append(g.Columns, grid.Column{Title: "IN PLACE OF UNITS"})
	}
	for i := range n.Devices {
		d := &n.Devices[i]
		var used int64
		for _, c := range d.Claims {
			used += c.MemoryBytes + c.Slots
		}
		row := []string{d.Name, d.Model, d.health(), d.amount(d.MemoryBytes + d.Slots), d.amount(used)}
		if len(d.Claims) == 0 {
			g.Add(append(row, "-", "", "")...)
		}
		for _, c := range d.Claims {
			holds := d.amount(c.MemoryBytes + c.Slots)
			if c.Admin {
				holds = "admin"
			}
			row = append(row, c.Namespace+"/"+c.Name, holds, strings.Join(c.Pods, ", "))
			if c.Units != nil {
				row = append(row, c.Units.String())
			}
			g.Add(row...)
			row = []string{"", "", "", "", ""}
		}
	}
	return g.Write(w, "  ")
}

// fromUnits reports whether some claim is in the place of units.
func (n *ClaimNode) fromUnits() bool {
	return slices.ContainsFunc(n.Devices, func(d ClaimDevice) bool {
		return slices.ContainsFunc(d.Claims, func(c Claim) bool { return c.Units != nil })
	})
}

// health is whether the device is allocated to further claims, in a word or with the reasons.
func (d *ClaimDevice) health() string {
	switch {
	case d.Type == "":
		return "not published"
	case len(d.Taints) == 0:
		return "healthy"
	}
	return strings.ReplaceAll(strings.Join(d.Taints, ", "), "divvy.dev/", "")
}

// amount is a number of bytes, or of time slices.
func (d *ClaimDevice) amount(n int64) string {
	const gib = 1 << 30
	if d.Slots > 0 {
		return strconv.FormatInt(n, 10) + " slots"
	}
	return strconv.FormatFloat(float64(n*100/gib)/100, 'f', -1, 64) + " GiB"
}
