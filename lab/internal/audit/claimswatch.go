package audit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// claimInterval is the pause between two samples.
	claimInterval = 500 * time.Millisecond
	// absentFor is how long kubelet may not list a container that runs: when it starts, it lists none
	// before the API server has said which pods are its.
	absentFor = 20 * time.Second
)

// ClaimWatch takes samples all the time. Its methods are safe for concurrent use.
type ClaimWatch struct {
	auditor *Auditor
	chips   []Chip
	// running are what containers have that were seen in a sample, by their IDs, and absent is since
	// when kubelet does not list one. The samples alone use them.
	running map[string][]hold
	absent  map[string]time.Time

	mu      sync.Mutex // guards what follows
	summary ClaimSummary
	broken  violations
	claims  map[string]bool // by UID
}

// ClaimSummary is what a ClaimWatch has seen.
type ClaimSummary struct {
	// Samples are all, and Full those in which every source answered.
	Samples, Full int
	// Containers are how often one was compared. Claims are the distinct claims of these, Shared how
	// often a claim of two pods or more was among them, and Both how often a container had devices
	// by both ways.
	Containers, Claims, Shared, Both int
	// Largest are the most bytes that claims had at a time.
	Largest    int64
	Violations []string
}

// NewClaimWatch returns a watch over the auditor's node with these devices.
func NewClaimWatch(a *Auditor, chips []Chip) *ClaimWatch {
	return &ClaimWatch{
		auditor: a, chips: chips, running: map[string][]hold{}, absent: map[string]time.Time{},
		broken: violations{}, claims: map[string]bool{},
	}
}

// Run takes samples until ctx ends.
func (w *ClaimWatch) Run(ctx context.Context) {
	wait.NonSlidingUntilWithContext(ctx, func(ctx context.Context) {
		s, err := w.auditor.Sample(ctx, w.chips)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			w.note(err.Error(), err.Error())
		default:
			w.take(s, time.Now(), alive)
		}
	}, claimInterval)
}

// Summary returns what was seen so far.
func (w *ClaimWatch) Summary() ClaimSummary {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.summary
	s.Claims = len(w.claims)
	s.Violations = w.broken.list()
	return s
}

// take compares a sample. alive reports whether a container runs.
func (w *ClaimWatch) take(s Sample, now time.Time, alive func(id string) bool) {
	wrong, absent := CompareClaims(s)
	for _, text := range slices.Concat(wrong, w.together(s, alive)) {
		w.note(subject(text), text)
	}
	if s.API != nil && s.Kubelet != nil {
		w.missing(absent, now)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.summary.Samples++
	if s.API == nil || s.Kubelet == nil {
		return
	}
	w.summary.Full++
	w.summary.Largest = max(w.summary.Largest, used(s.Chips, holdsOf(s.Chips, s.API)))
	api := byName(s.API)
	for _, u := range s.Users {
		w.summary.Containers++
		if len(u.Uses) > 0 && len(u.Asks) > 0 {
			w.summary.Both++
		}
		for _, use := range u.Uses {
			w.claims[api[use.Claim].UID] = true
			if api[use.Claim].Users > 1 {
				w.summary.Shared++
			}
		}
	}
}

// subject is what a text is about; the same wrong in later samples is counted with it.
func subject(text string) string {
	about, _, _ := strings.Cut(text, " (")
	return about
}

// note records what is wrong.
func (w *ClaimWatch) note(key, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken.note(key, text)
}

// missing records what is absent for too long.
func (w *ClaimWatch) missing(absent []string, now time.Time) {
	still := map[string]time.Time{}
	for _, text := range absent {
		since, known := w.absent[subject(text)]
		if !known {
			since = now
		}
		still[subject(text)] = since
		if now.Sub(since) > absentFor {
			w.note(subject(text), fmt.Sprintf("%s, for %v", text, absentFor))
		}
	}
	w.absent = still
}

// together adds up what the containers have that run at the same moment, whatever the sources say of
// their pods: also those that were deleted by force and have not ended yet.
func (w *ClaimWatch) together(s Sample, alive func(id string) bool) []string {
	api := byName(s.API)
	for i := range s.Users {
		u := &s.Users[i]
		var holds []hold
		for _, use := range u.Uses {
			holds = append(holds, holdsOf(s.Chips, []Claim{api[use.Claim]})...)
		}
		if _, listed := s.Kubelet[u.Name]; len(u.Asks) > 0 && !listed {
			continue
		}
		w.running[u.ID] = append(holds, s.unitHolds(u.Name)...)
	}
	for id := range w.running {
		if !alive(id) {
			delete(w.running, id)
		}
	}
	// Those that run now ran together at the end of the first look.
	seen := map[hold]bool{}
	var all []hold
	for id, holds := range w.running {
		if !alive(id) {
			delete(w.running, id)
			continue
		}
		for _, h := range holds {
			if claim := strings.HasPrefix(h.owner, "claim "); !claim || !seen[h] {
				all = append(all, h)
			}
		}
		for _, h := range holds {
			seen[h] = true // containers with one claim share it
		}
	}
	return beyond(s.Chips, "the running containers", all)
}

// CheckClaims takes a sample and returns an error that lists where the sources differ or have what
// no pod uses. It is for times at which no pod is being started or ended. It returns how many
// containers were compared.
func (a *Auditor) CheckClaims(ctx context.Context, chips []Chip) (containers int, err error) {
	s, err := a.Sample(ctx, chips)
	if err != nil {
		return 0, err
	}
	if s.API == nil || s.Kubelet == nil {
		return 0, errors.New("the API server or kubelet does not answer")
	}
	wrong, absent := CompareClaims(s)
	return len(s.Users), differences(slices.Concat(wrong, absent, Leftovers(s)))
}
