package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

// PrintStatus writes a table of the components. The error says how many are
// not ready.
func (c *Cluster) PrintStatus(ctx context.Context, out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "COMPONENT\tPID\tRUNNING FOR\tSTATE")
	bad := 0
	for _, component := range Components() {
		pid, age, state := "-", "-", "ready"
		id, running := c.Running(component)
		if running {
			pid = fmt.Sprint(id.PID)
		}
		if d := c.daemon(component); d != nil && !d.Since().IsZero() {
			age = time.Since(d.Since()).Round(time.Second).String()
		}
		if err := c.Healthy(ctx, component); !running {
			state = "stopped"
		} else if err != nil {
			state = "not ready: " + firstLine(err)
		}
		if state != "ready" {
			bad++
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", component, pid, age, state)
	}
	state := "ready"
	if err := nodeReady(ctx); err != nil {
		state = "not ready: " + firstLine(err)
		bad++
	}
	fmt.Fprintf(w, "node %s\t\t\t%s\n", layout.NodeName, state)
	if err := w.Flush(); err != nil {
		return fmt.Errorf("write status: %w", err)
	}
	fmt.Fprintf(out, "export KUBECONFIG=%s\n", layout.AdminKubeconfig)
	if bad > 0 {
		return errors.New(plural(bad, "part is", "parts are") + " not ready")
	}
	return nil
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	const width = 100
	if len(line) > width {
		line = line[:width] + "..."
	}
	return line
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
