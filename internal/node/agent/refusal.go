package agent

import (
	"context"
	"fmt"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// noteRefusal counts that a container was refused, and tells the users of the node
// once of each reason: the pod has an event of kubelet's with the text.
func (a *Agent) noteRefusal(ctx context.Context, resource accel.Resource, err error) {
	if err == nil || ctx.Err() != nil {
		return // kubelet does not wait any more
	}
	reason := string(alloc.ReasonOf(err))
	a.metrics.refused.WithLabelValues(string(resource), reason).Inc()
	a.events.Once(events.OnNode(a.o.Node), events.AllocationRefused, string(resource)+" "+reason,
		fmt.Sprintf("allocation of %s for a container was rejected: %v", resource, err))
}
