package alloc

import (
	"fmt"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// State is what a node remembers of a pool between restarts.
type State struct {
	// Vendor is whose devices they are; "" in files of before there were several.
	Vendor string `json:"vendor,omitempty"`
	// Unit is the memory unit that the ranges are counted in.
	Unit string `json:"unit,omitempty"`
	// Ranges say which ids belong to which device.
	Ranges []sharing.Range `json:"ranges,omitempty"`
	// Cards are those that are offered as slots, and those that are away or
	// offered no more while containers hold slots of them.
	Cards []StoredCard `json:"cards,omitempty"`
	// Boards are what sharing.Boards.Known returned.
	Boards []sharing.Board `json:"boards,omitempty"`
	// Held are the slots that containers hold, and Partial is true while there may be
	// others: kubelet was not asked since an earlier state was lost.
	Held    []HeldSlot `json:"held,omitempty"`
	Partial bool       `json:"partial,omitempty"`
}

// Check returns why a state that comes from outside cannot be used.
func (s *State) Check() error {
	for _, c := range s.Cards {
		if c.ID == "" || len(c.Chips) == 0 {
			return fmt.Errorf("a card has no id or no chips: %+v", c)
		}
	}
	_, err := sharing.NewLayout(s.Ranges)
	return err
}

// StoredCard describes a card while it is away.
type StoredCard struct {
	ID          accel.DeviceID   `json:"id"`
	Index       int              `json:"index"`
	Model       string           `json:"model,omitempty"`
	MemoryBytes int64            `json:"memoryBytes"`
	NUMANode    int              `json:"numaNode"`
	NUMANodes   []int            `json:"numaNodes,omitempty"`
	Board       string           `json:"board,omitempty"`
	Chips       []accel.DeviceID `json:"chips"`
	// Parent and Profile are those of a partition.
	Parent  accel.DeviceID `json:"parent,omitempty"`
	Profile string         `json:"profile,omitempty"`
}

// HeldSlot is a slot that was given to a container.
type HeldSlot struct {
	ID string `json:"id"`
	// Chips are those that the container got with it: the same id may mean
	// others after a change of the configuration. None when that is not known.
	Chips []accel.DeviceID `json:"chips,omitempty"`
	// Inits are the pods, as namespace/name/UID, one of whose plain init
	// containers may be the holder; kubelet does not list what those hold.
	Inits []string `json:"inits,omitempty"`
	// Unasked is true while it is not known whether Inits are the right pods:
	// kubelet chose the slot by itself.
	Unasked bool `json:"unasked,omitempty"`
	// Pod is the one for which kubelet listed it, as namespace/name/UID; "" when that is not known.
	Pod string `json:"pod,omitempty"`
}

// storeCard returns what is remembered of a card.
func storeCard(c sharing.Card) StoredCard {
	return StoredCard{
		ID: c.ID, Index: c.Index, Model: c.Model, MemoryBytes: c.MemoryBytes, NUMANode: c.NUMANode,
		NUMANodes: c.NUMANodes, Board: c.Board, Chips: c.Chips, Parent: c.Parent, Profile: c.Profile,
	}
}

// card returns the card that was remembered.
func (s *StoredCard) card() sharing.Card {
	return sharing.Card{Chips: s.Chips, NUMANodes: s.NUMANodes, Device: accel.Device{
		ID: s.ID, Index: s.Index, Model: s.Model, MemoryBytes: s.MemoryBytes, NUMANode: s.NUMANode, Board: s.Board,
		Parent: s.Parent, Profile: s.Profile,
	}}
}
