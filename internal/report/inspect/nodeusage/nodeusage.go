// Package nodeusage gets the reports of measured use from the nodes and prints them: it runs
// "divvy-node usage" in the daemon's pod of each node. The reports say what pods of all
// namespaces use, so the daemons serve them to no one else; who may create pods/exec in the
// daemon's namespace may read them.
package nodeusage

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/usagereport"
)

const (
	// selector and container are those of the daemon in the chart.
	selector  = "app.kubernetes.io/name=divvy-node"
	container = "divvy-node"
	// parallel is how many nodes are asked at once, and nodeLimit how long one may take.
	parallel  = 8
	nodeLimit = 10 * time.Second
	// maxBytes bounds a node's answer.
	maxBytes = 8 << 20
)

// command is what is run on each node.
func command() []string { return []string{"/usr/bin/divvy-node", "usage", "--output", "json"} }

// Options say what is printed.
type Options struct {
	// JSON prints the reports instead of tables.
	JSON bool
	// Namespace is that of the daemons.
	Namespace string
	// Nodes are those to ask; none for all.
	Nodes []string
}

// Exec runs a command in a container and waits for it, at most until ctx ends.
type Exec func(ctx context.Context, pod *corev1.Pod, container string, command []string, stdout, stderr io.Writer) error

// Failure is why there is no report of a node.
type Failure struct {
	Node  string `json:"node"`
	Error string `json:"error"`
}

// Reports are those of some nodes, by name, and why others have none.
type Reports struct {
	Reports []wire.UsageReport `json:"reports"`
	Failed  []Failure          `json:"failed,omitempty"`
}

// Run prints the reports. A node that fails is a line with the reason; the error says that no
// node answered.
func Run(ctx context.Context, o Options, client kubernetes.Interface, exec Exec, out io.Writer) error {
	all, err := Gather(ctx, o, client, exec)
	if err != nil {
		return err
	}
	if err := write(out, all, o.JSON); err != nil {
		return err
	}
	if len(all.Reports) == 0 {
		return errors.New("no node reported what is in use")
	}
	return nil
}

// Gather asks the nodes. The error says that there is none to ask.
func Gather(ctx context.Context, o Options, client kubernetes.Interface, exec Exec) (Reports, error) {
	list, err := client.CoreV1().Pods(o.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return Reports{}, fmt.Errorf("list the pods of divvy-node: %w", err)
	}
	pods := byNode(list.Items)
	nodes := slices.Compact(slices.Sorted(slices.Values(o.Nodes)))
	if len(nodes) == 0 {
		nodes = slices.Sorted(maps.Keys(pods))
	}
	if len(nodes) == 0 {
		return Reports{}, fmt.Errorf("there is no pod of divvy-node in namespace %q; set --namespace to that of Divvy", o.Namespace)
	}
	return gather(ctx, nodes, pods, exec), nil
}

// byNode returns the pod to ask on each node: while a new one takes over from another, the one
// that is ready, or else the newest.
func byNode(pods []corev1.Pod) map[string]*corev1.Pod {
	out := map[string]*corev1.Pod{}
	for i := range pods {
		p := &pods[i]
		if p.Spec.NodeName == "" || p.Status.Phase != corev1.PodRunning {
			continue
		}
		if before := out[p.Spec.NodeName]; before == nil || better(p, before) > 0 {
			out[p.Spec.NodeName] = p
		}
	}
	return out
}

// better is above zero when a is to be asked rather than b.
func better(a, b *corev1.Pod) int {
	rank := func(p *corev1.Pod) int {
		switch {
		case p.DeletionTimestamp != nil:
			return 0
		case !kube.PodReady(p):
			return 1
		}
		return 2
	}
	return cmp.Or(cmp.Compare(rank(a), rank(b)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time))
}

// gather asks the nodes.
func gather(ctx context.Context, nodes []string, pods map[string]*corev1.Pod, exec Exec) Reports {
	reports, failed := make([]wire.UsageReport, len(nodes)), make([]error, len(nodes))
	var group errgroup.Group
	group.SetLimit(parallel)
	for i, node := range nodes {
		group.Go(func() error {
			reports[i], failed[i] = ask(ctx, node, pods[node], exec)
			return nil // the others go on
		})
	}
	_ = group.Wait()
	out := Reports{Reports: []wire.UsageReport{}}
	for i, node := range nodes {
		if failed[i] != nil {
			out.Failed = append(out.Failed, Failure{node, failed[i].Error()})
			continue
		}
		out.Reports = append(out.Reports, reports[i])
	}
	return out
}

// ask returns the report of a node, whose pod may be nil.
func ask(ctx context.Context, node string, pod *corev1.Pod, exec Exec) (wire.UsageReport, error) {
	if pod == nil {
		return wire.UsageReport{}, errors.New("no pod of divvy-node runs on the node")
	}
	bounded, cancel := context.WithTimeout(ctx, nodeLimit)
	defer cancel()
	var stdout, stderr bounding
	err := exec(bounded, pod, container, command(), &stdout, &stderr)
	if said := strings.TrimSpace(stderr.String()); err != nil && said != "" {
		// Its last line says why; the error says that it failed.
		return wire.UsageReport{}, errors.New(strings.TrimPrefix(said[strings.LastIndex(said, "\n")+1:], "divvy-node: "))
	}
	switch {
	case err != nil && errors.Is(bounded.Err(), context.DeadlineExceeded) && ctx.Err() == nil:
		return wire.UsageReport{}, fmt.Errorf("no answer within %v", nodeLimit)
	case err != nil:
		return wire.UsageReport{}, fmt.Errorf("run divvy-node usage in pod %s: %w", pod.Name, err)
	}
	var r wire.UsageReport
	if err := json.Unmarshal(stdout.Bytes(), &r); err != nil {
		return wire.UsageReport{}, fmt.Errorf("the answer of pod %s is not a report: %w", pod.Name, err)
	}
	r.Node = node // which is certain
	return r, nil
}

// bounding keeps what is written, up to a bound.
type bounding struct{ bytes.Buffer }

// Write implements io.Writer.
func (b *bounding) Write(p []byte) (int, error) {
	if b.Len()+len(p) > maxBytes {
		return 0, fmt.Errorf("more than %d bytes", maxBytes)
	}
	return b.Buffer.Write(p)
}

func write(out io.Writer, all Reports, asJSON bool) error {
	if asJSON {
		return usagereport.WriteJSON(out, all)
	}
	for i, r := range all.Reports {
		if i > 0 {
			if _, err := fmt.Fprintln(out); err != nil {
				return err
			}
		}
		if err := usagereport.WriteTable(out, r); err != nil {
			return err
		}
	}
	for _, f := range all.Failed {
		if _, err := fmt.Fprintf(out, "NODE %s: %s\n", f.Node, f.Error); err != nil {
			return err
		}
	}
	return nil
}
