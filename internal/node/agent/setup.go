package agent

import (
	"context"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/runtimesetup"
)

// publishSetup writes how the node's containers get NVIDIA's GPUs; report may be nil, and return
// nil.
func publishSetup(ctx context.Context, p *publisher, report func() *runtimesetup.Report) error {
	node, err := p.current()
	if err != nil {
		return err
	}
	var setup *wire.NodeSetup
	if report != nil {
		setup = report().Published()
	}
	value, err := wire.EncodeSetup(setup)
	if err != nil || value == node.Annotations[wire.SetupAnnotation] {
		return err
	}
	return p.annotate(ctx, wire.SetupAnnotation, value)
}
