package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func findCondition(all []corev1.NodeCondition, of corev1.NodeConditionType) *corev1.NodeCondition {
	i := slices.IndexFunc(all, func(c corev1.NodeCondition) bool { return c.Type == of })
	if i < 0 {
		return nil
	}
	return &all[i]
}

// publishCondition makes a condition of the node what it should be but for its times; nil is
// none. node is the object as the watch has delivered it.
func (p *publisher) publishCondition(ctx context.Context, node *corev1.Node, of corev1.NodeConditionType, want *corev1.NodeCondition,
	now time.Time) error {
	patch := conditionPatch(of, want, findCondition(node.Status.Conditions, of), now)
	if patch == nil {
		return nil
	}
	if err := p.patch(ctx, "status", map[string]any{"status": map[string]any{"conditions": []any{patch}}}); err != nil {
		return fmt.Errorf("write the condition %s: %w", of, err)
	}
	return nil
}

// conditionPatch returns the element of a strategic merge patch that makes a condition
// what it should be, nil if it is; a nil condition is none. Kubelet leaves the conditions that are not its own alone.
func conditionPatch(of corev1.NodeConditionType, want, shown *corev1.NodeCondition, now time.Time) any {
	switch {
	case want == nil && shown == nil:
		return nil
	case want == nil:
		return map[string]string{"type": string(of), "$patch": "delete"}
	case shown != nil && shown.Status == want.Status && shown.Reason == want.Reason && shown.Message == want.Message:
		return nil
	}
	next := *want
	next.Type = of
	next.LastHeartbeatTime = metav1.NewTime(now)
	next.LastTransitionTime = next.LastHeartbeatTime
	if shown != nil && shown.Status == want.Status {
		next.LastTransitionTime = shown.LastTransitionTime
	}
	return next
}

// shortList joins texts for the message of a condition, and counts those that are too many.
func shortList(texts []string) string {
	const shown = 8
	list := texts[:min(len(texts), shown)]
	if more := len(texts) - shown; more > 0 {
		list = append(slices.Clone(list), fmt.Sprintf("%d more", more))
	}
	return strings.Join(list, ", ")
}
