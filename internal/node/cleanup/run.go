package cleanup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/serve"
)

// cleanAgain is the pause after an attempt that failed.
const cleanAgain = 2 * time.Second

// Options are what Run needs.
type Options struct {
	Leftovers
	// Listen is the address of the probes; "" for a program that cleans once and
	// ends.
	Listen string
	// LockTimeout is how long one attempt waits for the daemon to end.
	LockTimeout time.Duration
}

// Run cleans once. With an address it tries again until that succeeds, and then stays
// ready until ctx ends.
func Run(ctx context.Context, o Options, out io.Writer) error {
	attempt := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, o.LockTimeout)
		defer cancel()
		return o.Clean(ctx, out)
	}
	if o.Listen == "" {
		return attempt(ctx)
	}
	var last atomic.Pointer[error]
	set := func(err error) { last.Store(&err) }
	set(errors.New("the host is not clean yet"))
	work := func(ctx context.Context) error {
		for {
			err := attempt(ctx)
			if ctx.Err() != nil {
				return nil //nolint:nilerr // it was stopped
			}
			set(err)
			if err == nil {
				fmt.Fprintln(out, "done: nothing of divvy-node is left on this host")
				return nil
			}
			fmt.Fprintf(out, "not done: %s; trying again\n", strings.ReplaceAll(err.Error(), "\n", "; "))
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(cleanAgain):
			}
		}
	}
	probes := serve.NewProbes(nil, func() error { return *last.Load() }, prometheus.NewRegistry())
	return serve.Program{
		Parts:   []func(context.Context) error{work},
		Servers: []serve.Server{{Name: serve.Probes, Address: o.Listen, For: "probes", HTTP: serve.NewServer(probes)}},
		Drain:   time.Second,
	}.Run(klog.NewContext(ctx, logr.Discard())) // what it does is printed to out
}
