package devices

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// The states of a device.
const (
	healthy     = "healthy"
	unhealthy   = "unhealthy"
	quarantined = "quarantine"
	// gone is in quarantine and not on the node.
	gone = "quarantine, missing"
)

// device is a line of the list.
type device struct {
	Node  string         `json:"node"`
	Index int            `json:"index"`
	UUID  accel.DeviceID `json:"uuid"`
	Model string         `json:"model,omitempty"`
	State string         `json:"state"`
	// Since is when a device was put into quarantine.
	Since  time.Time `json:"since,omitzero"`
	Cause  string    `json:"cause,omitempty"`
	Reason string    `json:"reason,omitempty"`

	chips  int
	parent accel.DeviceID
	entry  bool // it can be released
}

// describe lists the devices of a node by what its object says.
func describe(node string, annotations map[string]string) ([]device, error) {
	var out []device
	if text, ok := annotations[wire.InventoryAnnotation]; ok {
		inventory, err := wire.DecodeInventory(text)
		if err != nil {
			return nil, fmt.Errorf("node %s: %w", node, err)
		}
		for _, in := range inventory {
			for _, s := range in.Shares {
				out = add(out, node, s)
			}
		}
	}
	status, err := wire.DecodeQuarantine(annotations[wire.QuarantineAnnotation])
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", node, err)
	}
	for _, q := range status.Devices {
		d := device{Node: node, Index: q.Index, UUID: q.Device, State: gone, Since: q.Since, Cause: q.Cause, Reason: q.Reason, entry: true}
		i := slices.IndexFunc(out, func(d device) bool { return d.UUID == q.Device })
		switch {
		case i >= 0:
			d.Index, d.Model, d.chips, d.parent, d.State = out[i].Index, out[i].Model, out[i].chips, out[i].parent, quarantined
			out[i] = d
			continue
		case slices.ContainsFunc(out, func(d device) bool { return d.chips > 1 && strings.Contains(d.Reason, string(q.Device)) }):
			d.State = quarantined // a chip of a board
		case slices.ContainsFunc(out, func(d device) bool { return d.parent == q.Device && q.Device != "" }):
			d.State = quarantined // its partitions are on the node
		}
		out = append(out, d)
	}
	slices.SortStableFunc(out, func(a, b device) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID)) })
	return out, nil
}

// add adds a device of an inventory. One that several resources are made of is in
// several inventories, and unhealthy if it is so in all of them.
func add(devices []device, node string, s accel.Share) []device {
	d := device{Node: node, Index: s.Index, UUID: s.ID, Model: s.Model, State: healthy, chips: s.Chips, parent: s.Parent}
	switch {
	case !s.Health.Unhealthy || strings.HasPrefix(s.Health.Reason, accel.ReasonGivenOut):
	case !s.Health.Quarantined.IsZero():
		d.State, d.Since, d.Reason = quarantined, s.Health.Quarantined, s.Health.Reason
	default:
		d.State, d.Reason = unhealthy, s.Health.Reason
	}
	if i := slices.IndexFunc(devices, func(other device) bool { return other.UUID == d.UUID }); i >= 0 {
		if d.State == healthy {
			devices[i] = d
		}
		return devices
	}
	return append(devices, d)
}

// List prints the devices of a node, or of all when it is "".
func List(ctx context.Context, client metadata.Interface, node, output string, out io.Writer) error {
	if output != "table" && output != "json" {
		return fmt.Errorf("output format %q: must be table or json", output)
	}
	nodes, err := client.Resource(corev1.SchemeGroupVersion.WithResource("nodes")).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	all, found, errs := []device{}, node == "", []error{}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if node != "" && n.Name != node {
			continue
		}
		found = true
		d, err := describe(n.Name, n.Annotations)
		all, errs = append(all, d...), append(errs, err)
	}
	if !found {
		return fmt.Errorf("node %s not found", node)
	}
	slices.SortStableFunc(all, func(a, b device) int { return cmp.Compare(a.Node, b.Node) })
	return errors.Join(append(errs, write(out, all, output))...)
}

func write(out io.Writer, devices []device, output string) error {
	if output == "json" {
		e := json.NewEncoder(out)
		e.SetIndent("", "    ")
		return e.Encode(devices)
	}
	if len(devices) == 0 {
		_, err := fmt.Fprintln(out, "no node shares devices")
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NODE\tINDEX\tUUID\tMODEL\tSTATE\tSINCE\tREASON")
	for _, d := range devices {
		since := "-"
		if !d.Since.IsZero() {
			since = d.Since.Format(time.RFC3339)
		}
		fmt.Fprintln(w, strings.Join([]string{
			d.Node, accel.IndexText(d.Index), string(d.UUID), cmp.Or(d.Model, "-"), d.State, since, printable(d.Reason),
		}, "\t"))
	}
	return w.Flush()
}

// printable is a text of a node's object that a terminal shows and does not obey.
func printable(text string) string {
	return cmp.Or(strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '?'
		}
		return r
	}, text), "-")
}
