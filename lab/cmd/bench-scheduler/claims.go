package main

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// What is wanted of divvy-scheduler where pods have claims: how many times the pods per second of
// kube-scheduler, and on how many nodes at most, as a multiple of the fewest that have the memory.
const (
	wantedClaimRate = 5.0
	mostNodes       = 1.1
)

// freeWithin is how long claims may take to be freed.
const freeWithin = 2 * time.Minute

// template is the name of the one for claims of this shape.
func (s *shape) template() string { return fmt.Sprintf("memory-%d", s.units) }

// templates makes those of all shapes.
func (b *bench) templates(ctx context.Context) error {
	for i := range b.options.scenarios[0].pods {
		s := &b.options.scenarios[0].pods[i]
		if _, err := b.client.ResourceV1().ResourceClaimTemplates(namespace).Create(ctx,
			simnodes.Template(namespace, s.template(), fmt.Sprintf("%dGi", s.units)), metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("make ResourceClaimTemplate %s: %w", s.template(), err)
		}
	}
	return nil
}

// Packing is on how many nodes the pods of a phase are, those before the time was taken included, and
// the fewest that have the memory. It is zero where pods have no claims.
type Packing struct {
	Nodes, Fewest int
}

// packing checks that no device is given to more claims than have room on it.
func (b *bench) packing(ctx context.Context) (p Packing, err error) {
	claims, err := b.client.ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return p, fmt.Errorf("list claims: %w", err)
	}
	held, err := b.nodes.Claimed(claims.Items)
	if err != nil {
		return p, fmt.Errorf("claims are allocated wrongly: %w", err)
	}
	pods, err := b.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return p, fmt.Errorf("list pods: %w", err)
	}
	used := map[string]bool{}
	for i := range pods.Items {
		used[pods.Items[i].Spec.NodeName] = true
	}
	var bytes int64
	for _, amount := range held {
		bytes += amount
	}
	return Packing{Nodes: len(used), Fewest: fewest(bytes)}, nil
}

// fewest is how many nodes have so much memory.
func fewest(bytes int64) int {
	const node = int64(cardsPerNode) * claimUnits << 30
	return int((bytes + node - 1) / node)
}

// free deletes all claims, and returns when their controller has freed them.
func (b *bench) free(ctx context.Context, namespace string) error {
	claims := b.client.ResourceV1().ResourceClaims(namespace)
	if err := claims.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		return fmt.Errorf("delete claims: %w", err)
	}
	return poll.Until(ctx, freeWithin, "claims to be freed", func(ctx context.Context) error {
		left, err := claims.List(ctx, metav1.ListOptions{})
		if err == nil && len(left.Items) > 0 {
			err = fmt.Errorf("%d are left", len(left.Items))
		}
		return err
	})
}

// packed are the verdicts on a side where pods have claims.
func (m *Measurement) packed(c *Comparison) []verdict {
	what := fmt.Sprintf("%d nodes, %s", m.Nodes, c.Side)
	worst := Packing{}
	for i := range m.Phases {
		if p := m.Phases[i].Packing; m.Phases[i].Side == c.Side && p.Nodes >= worst.Nodes {
			worst = p
		}
	}
	return []verdict{
		{fmt.Sprintf("%s: %.2f times the pods per second of %s (median of %d rounds, %.2f to %.2f); at least %g is wanted", what,
			c.Rate.Median, c.Reference, len(c.Rate.Rounds), c.Rate.Low, c.Rate.High, wantedClaimRate), c.Rate.Median >= wantedClaimRate},
		{fmt.Sprintf("%s: pods on %d nodes, and %d have the memory; at most %g times as many are wanted", what, worst.Nodes,
			worst.Fewest, mostNodes), float64(worst.Nodes) <= mostNodes*float64(worst.Fewest)},
	}
}

// claimConditions are those that the numbers depend on.
var claimConditions = fmt.Sprintf("Each pod has a ResourceClaim of a template, which kube-controller-manager makes; it may send %d "+
	"requests to the API server in a second on both sides.", controlplane.ClaimQPS)
