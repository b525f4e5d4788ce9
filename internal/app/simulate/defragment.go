package simulate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/simulate/live"
	"github.com/divvy-gpu/divvy/internal/report/why"
)

// Exit codes with --defragment, besides 0: every waiting pod is admitted, or the node is empty.
const (
	// ExitNotReached: the plan leaves a pod waiting or on the node, or there is none.
	ExitNotReached = 1
	// ExitUsage: the command line is wrong, or names a node that does not exist.
	ExitUsage = 2
	// ExitUnknown: rights, the API server or the dump do not allow an answer.
	ExitUnknown = 3
)

// defragment prints a plan. Its error is a *kubectl.ExitError, nil where the plan reaches
// its goal.
func (o *Options) defragment(ctx context.Context, connect func() (kube.Clients, error), in io.Reader, out io.Writer) error {
	s, err := o.snapshot(ctx, connect, in)
	if err != nil {
		return &kubectl.ExitError{Code: ExitUnknown, Err: err}
	}
	x := why.New(s)
	var p why.Plan
	if o.EmptyNode == "" {
		p = x.Admit()
	} else if p, err = x.Empty(o.EmptyNode); err != nil {
		return &kubectl.ExitError{Code: ExitUsage, Err: fmt.Errorf("--empty-node: %w", err)}
	}
	write := p.Print
	if o.Output == formatJSON {
		write = p.PrintJSON
	}
	switch err := write(out); {
	case err != nil:
		return &kubectl.ExitError{Code: ExitUnknown, Err: err}
	case !p.Reached:
		return &kubectl.ExitError{Code: ExitNotReached}
	}
	return nil
}

// snapshot reads nodes, pods and PodDisruptionBudgets.
func (o *Options) snapshot(ctx context.Context, connect func() (kube.Clients, error), in io.Reader) (*why.Snapshot, error) {
	if o.FromCluster {
		clients, err := connect()
		if err != nil {
			return nil, err
		}
		return readSnapshot(ctx, clients)
	}
	f, name, err := live.Open(o.FromDump, in)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	s := &why.Snapshot{}
	items, err := live.ReadList(f, name, func(kind string) runtime.Object {
		switch kind {
		case "Node":
			return &v1.Node{}
		case "Pod":
			return &v1.Pod{}
		case "PodDisruptionBudget":
			return &policyv1.PodDisruptionBudget{}
		}
		return nil
	}, s.Add)
	const how = "kubectl get nodes,pods,poddisruptionbudgets -A -o json"
	switch {
	case err != nil:
		return nil, err
	case len(s.Nodes) == 0:
		return nil, fmt.Errorf("%s: no nodes among its %d items", name, items)
	case !slices.ContainsFunc(s.Nodes, func(n v1.Node) bool { return len(n.Status.Conditions) > 0 }):
		return nil, fmt.Errorf("%s: its nodes have no conditions, as in a file of --dump; for --defragment, write it with %q", name, how)
	case len(s.Budgets) == 0:
		s.Failed = []why.Failure{{Source: why.SourceBudgets, Reason: "the dump contains none; \"" + how + "\" includes them"}}
	}
	s.Taken = s.Newest()
	return s, nil
}

func readSnapshot(ctx context.Context, clients kube.Clients) (*why.Snapshot, error) {
	s := &why.Snapshot{}
	core, policy := clients.Kubernetes.CoreV1(), clients.Kubernetes.PolicyV1()
	if err := kube.EachItem(ctx, "nodes", metav1.ListOptions{}, core.Nodes().List, s.Add); err != nil {
		return nil, err
	}
	if err := kube.EachItem(ctx, "pods", metav1.ListOptions{}, core.Pods(metav1.NamespaceAll).List, s.Add); err != nil {
		return nil, err
	}
	budgets := policy.PodDisruptionBudgets(metav1.NamespaceAll).List
	if err := kube.EachItem(ctx, why.SourceBudgets, metav1.ListOptions{}, budgets, s.Add); apierrors.IsForbidden(err) {
		// The note names the source itself.
		s.Failed = append(s.Failed, why.Failure{Source: why.SourceBudgets, Reason: errors.Unwrap(err).Error()})
	} else if err != nil {
		return nil, err
	}
	s.Taken = time.Now()
	return s, nil
}
