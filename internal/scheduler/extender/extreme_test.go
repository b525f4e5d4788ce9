package extender

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// enough bounds the wait for what comes at once unless something hangs; the tests leave the
// processors to others.
const enough = 3 * time.Minute

// The API server is slow and 500 binds wait for it, all of them on one node. None of
// them holds a lock: they all wait beside each other, and whatever else is asked
// meanwhile is answered: other questions, other binds on the same node, and what the
// watches bring.
func TestSlowServerStopsNobody(t *testing.T) {
	const inFlight = 500
	w := newWorld(t, func(c *Config) { c.BindTimeout = 2 * enough })
	w.server.Client().Transport.(*http.Transport).MaxIdleConnsPerHost = inFlight //nolint:forcetypeassert // that of a test server
	var big []accel.Units
	for range 64 {
		big = append(big, 8)
	}
	w.ledger.SetNode("big", []accel.Inventory{cards(gcuMemory, "g", big...)})

	var mu sync.Mutex
	waiting, all, release := 0, make(chan struct{}), make(chan struct{})
	w.cluster.BindError = func(_ context.Context, ref accel.PodRef, _ string) error {
		if !strings.HasPrefix(ref.Name, "slow") {
			return nil
		}
		mu.Lock()
		if waiting++; waiting == inFlight {
			close(all)
		}
		mu.Unlock()
		<-release
		return nil
	}
	texts := make([]string, inFlight)
	var group sync.WaitGroup
	for i := range inFlight {
		pod := w.add(newPod(fmt.Sprintf("slow%d", i), 1))
		group.Go(func() { texts[i] = w.bind(pod, "big") })
	}
	let := sync.OnceFunc(func() { close(release) })
	defer group.Wait()
	defer let()
	select {
	case <-all:
	case <-time.After(enough):
		mu.Lock()
		defer mu.Unlock()
		t.Fatalf("%d of %d binds reached the API server: the others wait for them", waiting, inFlight)
	}

	others := make(chan string, 1)
	go func() {
		names := []string{"big", "node-a"}
		result := w.filter(extenderv1.ExtenderArgs{Pod: newPod("p", 8), NodeNames: &names})
		if result.Error != "" || len(*result.NodeNames) != 2 {
			others <- fmt.Sprintf("filter answered %+v", result)
			return
		}
		w.ledger.SetNode("new", []accel.Inventory{cards(gcuMemory, "n", 16)})
		w.ledger.Observe(ledger.Holding{Pod: accel.PodRef{UID: "seen"}, Node: "new", Resource: gcuMemory, Units: 2, Device: "n0"})
		if status, _ := w.get(Prefix + "/inspect"); status != http.StatusOK {
			others <- fmt.Sprintf("inspect answered with status %d", status)
			return
		}
		others <- w.bind(w.add(newPod("quick", 8)), "big")
	}()
	select {
	case text := <-others:
		if text != "" {
			t.Error(text)
		}
	case <-time.After(enough):
		t.Fatal("nothing else is answered while binds wait for the API server")
	}
	let()
	group.Wait()
	if i := slices.IndexFunc(texts, func(text string) bool { return text != "" }); i >= 0 {
		t.Errorf("bind %d answered %s", i, texts[i])
	}
	var held accel.Units
	for _, units := range w.used("big") {
		held += units
		if units > 8 {
			t.Errorf("a card of 8 units holds %d", units)
		}
	}
	if held != inFlight+8 {
		t.Errorf("%d units are held, %d were granted", held, inFlight+8)
	}
}

// The clock of the machine is set back, and then far ahead. Nothing that is booked
// is lost, and grants keep the order in which they were made, by which a node tells
// them apart.
func TestClockJumps(t *testing.T) {
	w := newWorld(t)
	at := func(name string) time.Time {
		t.Helper()
		grant, err := w.keys.DecodeGrant("uid-"+name, w.cluster.Annotations["team/"+name][wire.GrantAnnotation])
		if err != nil {
			t.Fatal(err)
		}
		return grant.At
	}
	bind := func(name string) {
		t.Helper()
		if text := w.bind(w.add(newPod(name, 4)), "node-a"); text != "" {
			t.Fatalf("bind of %s: %s", name, text)
		}
	}
	bind("first")
	w.clock = w.clock.Add(-2 * time.Hour)
	bind("second")
	if n := w.ledger.Expire(); n != 0 {
		t.Errorf("%d reservations went when the clock was set back", n)
	}
	w.show(newPod("first", 4))
	w.show(newPod("second", 4))
	w.clock = w.clock.Add(30 * 24 * time.Hour)
	bind("third")
	if n := w.ledger.Expire(); n != 0 {
		t.Errorf("%d bookings went when the clock was set ahead: pods that were seen bound stay, and the third is new", n)
	}
	if !at("first").Before(at("second")) || !at("second").Before(at("third")) {
		t.Errorf("grants of %s, %s and %s are not in the order in which they were made", at("first"), at("second"), at("third"))
	}
	if got := w.used("node-a"); !slices.Equal(got, []accel.Units{12, 0}) {
		t.Errorf("used %v, want 12 on card 0", got)
	}
}
