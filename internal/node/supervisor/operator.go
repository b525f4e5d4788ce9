package supervisor

import (
	"context"
	"sync"

	"k8s.io/client-go/kubernetes"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/gpuoperator"
)

// operator follows NVIDIA's GPU operator from the first configuration on that says that it
// manages the node. It outlives agents, since a process that waits for the node must leave the
// driver alone too.
type operator struct {
	pause  *backend.Pause
	want   sync.Once
	wanted chan struct{}
}

func newOperator() *operator {
	return &operator{pause: backend.NewPause(gpuoperator.Unknown()), wanted: make(chan struct{})}
}

// pauses returns the pauses of vendors, by vendor.
func (o *operator) pauses(c config.NodeConfig) map[string]*backend.Pause {
	if !c.GPUOperator {
		return nil
	}
	o.want.Do(func() { close(o.wanted) })
	return map[string]*backend.Pause{gpuoperator.Vendor: o.pause}
}

// run follows the operator until ctx ends.
func (o *operator) run(ctx context.Context, client kubernetes.Interface, node string) {
	select {
	case <-ctx.Done():
	case <-o.wanted:
		gpuoperator.Follow(ctx, client, node, o.pause)
	}
}
