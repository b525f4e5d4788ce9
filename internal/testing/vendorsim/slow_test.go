package vendorsim_test

import (
	"testing"
	"time"

	"github.com/ebitengine/purego"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// askCard is one call about a card of a stand-in.
type askCard func(card uint32) int32

// nvmlAsk initialises a stand-in with NVML's functions and asks for minor numbers.
func nvmlAsk(t *testing.T, vendor string, topology vendorsim.Topology) (standIn, askCard) {
	t.Helper()
	var start func() int32
	var at func(uint32, *uintptr) int32
	var minor func(uintptr, *uint32) int32
	s := loadStandIn(t, vendor, purego.RTLD_LAZY|purego.RTLD_LOCAL, topology, map[string]any{
		"nvmlInit_v2": &start, "nvmlDeviceGetHandleByIndex_v2": &at, "nvmlDeviceGetMinorNumber": &minor,
	})
	wantCode(t, "nvmlInit_v2", start(), 0)
	return s, func(card uint32) int32 {
		var handle uintptr
		if code := at(card, &handle); code != 0 {
			return code
		}
		var number uint32
		return minor(handle, &number)
	}
}

// slow has for each vendor how a card is asked, and the function that is called last.
var slow = map[string]struct {
	cards    []vendorsim.Card
	function string
	load     func(*testing.T, vendorsim.Topology) (standIn, askCard)
}{
	vendorsim.Enflame: {vendorsim.GCUs(2, 1024), "EfmlGetDevHealth", func(t *testing.T, topology vendorsim.Topology) (standIn, askCard) {
		t.Helper()
		var start func(bool) int32
		var health func(uint32, *byte) int32
		s := loadStandIn(t, vendorsim.Enflame, purego.RTLD_LAZY|purego.RTLD_LOCAL, topology, map[string]any{
			"EfmlInit": &start, "EfmlGetDevHealth": &health,
		})
		wantCode(t, "EfmlInit", start(false), 0)
		return s, func(card uint32) int32 {
			var ok byte
			return health(card, &ok)
		}
	}},
	vendorsim.NVIDIA: {vendorsim.GPUs(2, 1024), "nvmlDeviceGetMinorNumber", func(t *testing.T, topology vendorsim.Topology) (standIn,
		askCard) {
		t.Helper()
		return nvmlAsk(t, vendorsim.NVIDIA, topology)
	}},
	vendorsim.Iluvatar: {vendorsim.IXBoards(1, 2, 1024), "nvmlDeviceGetMinorNumber",
		func(t *testing.T, topology vendorsim.Topology) (standIn, askCard) {
			t.Helper()
			return nvmlAsk(t, vendorsim.Iluvatar, topology)
		}},
}

// returns reports whether a call is over soon.
func (ask askCard) returns(t *testing.T, card uint32) (done <-chan int32, over bool) {
	t.Helper()
	answer := make(chan int32, 1)
	go func() { answer <- ask(card) }()
	select {
	case code := <-answer:
		wantCode(t, "the call", code, 0)
		return answer, true
	case <-time.After(200 * time.Millisecond):
		return answer, false
	}
}

func TestOneCardHangs(t *testing.T) {
	for vendor, v := range slow {
		for name, hang := range map[string]func(*vendorsim.Topology){
			"every call": func(topology *vendorsim.Topology) { topology.Cards[1].Calls.Delay = time.Hour },
			"one function": func(topology *vendorsim.Topology) {
				topology.Cards[1].Calls.Slow = vendorsim.Delays{v.function: time.Hour}
			},
		} {
			t.Run(vendor+", "+name, func(t *testing.T) {
				topology := vendorsim.Topology{Cards: v.cards}.Clone()
				s, ask := v.load(t, topology)
				hang(&topology)
				s.write(t, topology)
				hung, over := ask.returns(t, 1)
				if over {
					t.Fatal("a call that takes an hour is over")
				}
				if _, over := ask.returns(t, 0); !over {
					t.Error("a call about another card is held up")
				}
				topology.Library.OneLock = true
				s.write(t, topology)
				behind, over := ask.returns(t, 0)
				if over {
					t.Error("a library with one lock answers while a call hangs")
				}
				topology.Cards = v.cards
				s.write(t, topology)
				for _, done := range []<-chan int32{hung, behind} {
					select {
					case code := <-done:
						wantCode(t, "the call that hung", code, 0)
					case <-time.After(2 * time.Minute):
						t.Fatal("a waiting call did not notice that the delay is gone")
					}
				}
			})
		}
	}
}
