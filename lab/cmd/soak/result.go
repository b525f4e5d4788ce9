package main

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/progress"
)

// What a run must have done to say anything.
const (
	minPodsPerMinute = 15
	// maxRefused is the part of all pods that kubelet may refuse: many only,
	// and something else is wrong.
	maxRefused  = 0.25
	minFill     = 0.9
	minRestarts = 4
)

// result is what a run found.
type result struct {
	duration     time.Duration
	created, ran int
	// refused are pods that kubelet did not admit or could not start, in its
	// words: while its device plugin is away it cannot, and it does not try
	// again.
	refused  []string
	died     []string
	restarts map[string]int
	watch    audit.Summary
	// pods and containers are those whose records were compared.
	pods, containers int
	mismatches       []string
	converged        time.Duration
	claims           *claimsResult // nil without claims
}

// add takes what became of the pods of a churn.
func (r *result) add(c *churn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r.created, r.ran = r.created+c.created, r.ran+len(c.ran)
	r.refused, r.died = append(r.refused, sorted(c.refused)...), append(r.died, sorted(c.died)...)
}

func sorted(texts map[types.UID]string) []string { return slices.Sorted(maps.Values(texts)) }

func (r result) restarted() int {
	n := 0
	for _, times := range r.restarts {
		n += times
	}
	return n
}

// String is the summary.
func (r result) String() string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(r.restarts)) {
		fmt.Fprintf(&b, "  %-24s %d times\n", name, r.restarts[name])
	}
	if len(r.refused) > 0 {
		fmt.Fprintf(&b, "  %d of %d pods were not started by kubelet, which itself or whose device plugin was being restarted. It said:\n",
			len(r.refused), r.created)
		for _, reason := range reasons(r.refused) {
			fmt.Fprintf(&b, "    %s\n", reason)
		}
	}
	fmt.Fprintf(&b, "  looked at the cards %d times through the extender, %d times through kubelet\n", r.watch.Extender, r.watch.Kubelet)
	fmt.Fprintf(&b, "  compared environment, /dev, kubelet's units, annotations and inspect of %d containers in %d pods; they agreed "+
		"after %s\n",
		r.containers, r.pods, progress.Elapsed(r.converged))
	mismatches := len(r.mismatches)
	if r.claims != nil {
		fmt.Fprintf(&b, "%s\n", r.claims)
		mismatches += len(r.claims.mismatches())
	}
	fmt.Fprintf(&b, "soak: %d pods run, %d restarts done, %d mismatches, largest use of any card %d of %d units, fullest %.0f %% of all "+
		"cards",
		r.ran, r.restarted(), mismatches, r.watch.Largest, r.watch.Size, 100*r.watch.Fill)
	return b.String()
}

// varying matches what differs between two refusals of one kind.
var varying = regexp.MustCompile(namespace + `(-claims)?/[a-z0-9-]+|\d+`)

// reasons counts refusals of one kind together.
func reasons(refused []string) []string {
	times := map[string]int{}
	for _, words := range refused {
		times[varying.ReplaceAllString(words, "N")]++
	}
	var out []string
	for _, words := range slices.Sorted(maps.Keys(times)) {
		out = append(out, fmt.Sprintf("%d times: %s", times[words], words))
	}
	return out
}

// faults returns everything that must not be, or nil.
func (r result) faults() error {
	var errs []error
	fault := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for _, text := range r.mismatches {
		fault("mismatch: %s", text)
	}
	for _, text := range r.watch.Violations {
		fault("a card was used beyond its size: %s", text)
	}
	for _, text := range r.died {
		fault("a running pod ended by itself: %s", text)
	}
	if wanted := int(r.duration.Minutes() * minPodsPerMinute); r.ran < wanted {
		fault("only %d pods ran, expected %d or more in %v", r.ran, wanted, r.duration)
	}
	if float64(len(r.refused)) > maxRefused*float64(r.created) {
		fault("kubelet refused %d of %d pods, such as: %s", len(r.refused), r.created, r.refused[0])
	}
	if r.watch.Fill < minFill {
		fault("the cards were filled to %.0f %% only, expected %.0f %%", 100*r.watch.Fill, 100*minFill)
	}
	if r.restarted() < minRestarts {
		fault("only %d restarts were done, expected %d or more", r.restarted(), minRestarts)
	}
	if r.pods == 0 {
		fault("no pod was left whose records could be compared")
	}
	if r.claims != nil {
		errs = append(errs, r.claims.faults())
	}
	return errors.Join(errs...)
}
