package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/progress"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const (
	namespace = "divvy-soak"
	// convergeWithin is how long the records may take to agree once everything
	// is up and no pod starts or ends.
	convergeWithin = 5 * time.Second
	// fillTime is the part of the end in which pods only come.
	fillTime = 20 * time.Second
)

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	o, err := parse(args, out)
	if err != nil {
		return err
	}
	environment, play := testenv.Options{Topology: testenv.Guide, MemoryUnit: "1"}, playBooks
	switch {
	case o.limits:
		environment, play = limitsEnvironment, playLimits
	case o.claims:
		environment, play = claimsEnvironment, playClaims
	}
	environment.Namespace, environment.Undo, environment.Out = namespace, !o.keep, out
	s, err := testenv.SetUp(ctx, environment)
	if err != nil {
		return err
	}
	defer func() {
		if !o.keep {
			err = errors.Join(err, s.Restore(context.WithoutCancel(ctx), out))
		}
		err = errors.Join(err, s.Close())
	}()
	return play(ctx, s, o, out)
}

// playBooks compares all records at the end.
func playBooks(ctx context.Context, s *testenv.Env, o options, out io.Writer) error {
	return playPods(ctx, s, o, 8, nil, out)
}

// playPods lets pods with units come and go on so many cards, beside pods with claims where there
// are any, and prints and judges what was seen.
func playPods(ctx context.Context, s *testenv.Env, o options, cards int64, beside *claimants, out io.Writer) error {
	capacity := cards * cardUnits
	if _, err := s.Node.WaitAllocatable(ctx, time.Minute, product.Resource, capacity); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nFor %s pods come and go on %d cards of %d units, and parts of the cluster are restarted. Seed %d.\n", o.duration,
		cards, cardUnits, o.seed)
	r, err := soak(ctx, s, o, capacity, beside, out)
	if err != nil {
		return errors.Join(err, r.faults())
	}
	if table, err := s.CLI.Kubectl(ctx, "divvy", "inspect"); err == nil {
		fmt.Fprintf(out, "\n%s\n", table)
	}
	fmt.Fprintf(out, "\n%s\n", r)
	return r.faults()
}

// soak lets pods come and go, and compares the records at the end. beside may be nil.
func soak(ctx context.Context, s *testenv.Env, o options, capacity int64, beside *claimants, out io.Writer) (result, error) {
	auditor := audit.New(s)
	watch := audit.NewWatch(auditor)
	units := kind{make: newPod, units: testenv.Units}
	churns := []*churn{newChurn(s, rand.New(rand.NewPCG(o.seed, 1)), capacity, units)} //nolint:gosec // chance, not secrecy
	restarts := s.Restarts

	var work, watching sync.WaitGroup
	watchCtx, stopWatch := context.WithCancel(ctx)
	defer watching.Wait()
	defer stopWatch()
	watching.Go(func() { watch.Run(watchCtx) })
	if beside != nil {
		churns = append(churns, beside.churn)
		restarts = func() []testenv.Restart { return append(s.Restarts(), s.ControllerManagerKilled()) }
		watching.Go(func() { beside.watch.Run(watchCtx) })
	}

	running, stop := context.WithTimeout(ctx, o.duration-fillTime)
	defer stop()
	r := result{duration: o.duration}
	var disturbed error
	for _, c := range churns {
		work.Go(func() { c.run(running) })
	}
	work.Go(func() {
		defer stop()                            // without all parts there is nothing more to see
		rng := rand.New(rand.NewPCG(o.seed, 2)) //nolint:gosec // chance, not secrecy
		r.restarts, disturbed = disturb(running, restarts, rng, out)
	})
	work.Go(func() { report(running, churns, watch, out) })
	work.Wait()
	collect := func() result {
		r.watch = watch.Summary()
		for _, c := range churns {
			r.add(c)
		}
		if beside != nil {
			r.claims = beside.result()
		}
		return r
	}
	if err := errors.Join(ctx.Err(), disturbed); err != nil {
		return collect(), err
	}

	until := time.Now().Add(fillTime)
	for _, c := range churns {
		work.Go(func() { c.fill(ctx, until) })
	}
	work.Wait()
	for _, c := range churns {
		if err := c.settle(ctx); err != nil {
			return collect(), err
		}
	}
	if beside != nil {
		if err := beside.settle(ctx); err != nil {
			return collect(), err
		}
	}
	settled := time.Now()
	var books audit.Books
	compared := poll.Until(ctx, convergeWithin, "all records to agree", func(ctx context.Context) (err error) {
		books, err = auditor.Check(ctx, audit.DeviceNodes)
		return err
	})
	r.converged = time.Since(settled)
	r.pods = len(books.Pods)
	for _, pod := range books.Pods {
		r.containers += len(pod.Containers)
	}
	if compared != nil {
		// All of them, not the bounded list of the error.
		if r.mismatches = audit.Compare(books, audit.DeviceNodes); len(r.mismatches) == 0 {
			return collect(), compared
		}
	}
	return collect(), ctx.Err()
}

func report(ctx context.Context, churns []*churn, w *audit.Watch, out io.Writer) {
	started := time.Now()
	ticker := time.NewTicker(15 * time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		ran, refused := 0, 0
		for _, c := range churns {
			c.mu.Lock()
			ran, refused = ran+len(c.ran), refused+len(c.refused)
			c.mu.Unlock()
		}
		s := w.Summary()
		fmt.Fprintf(out, "  %6s  %d pods ran, %d were refused by kubelet; fullest so far: %.0f %% of all cards, %d of %d units of one\n",
			progress.Elapsed(time.Since(started)), ran, refused, 100*s.Fill, s.Largest, s.Size)
	}
}
