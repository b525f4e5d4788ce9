package enflame

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// idPrefixDRS makes an instance's identity out of its uuid. The vendor's software knows it by
// the same text.
const idPrefixDRS = "DRS-"

// visibleInstances is the variable in which the vendor's libraries expect the container's DRS
// instance.
const visibleInstances = "TOPS_VISIBLE_DEVICES"

// listing is what a discovery lists.
type listing = devicelist.Listing[*devicelist.Device]

// drs adds the DRS instances of cards in DRS mode to what the library lists.
type drs struct {
	tool *tool

	mu sync.Mutex // guards what follows
	// places are where the instances were when they were listed last.
	places map[accel.DeviceID]drsPlace
}

// drsPlace is an instance's card, and its Index.
type drsPlace struct {
	card  accel.DeviceID
	index int
}

// add asks the program efsmi in which mode each card is, and for the instances of those in DRS
// mode. A card of which that cannot be found out is a fault: offered as a whole, it might be in
// use by instances. The error is one of the program as a whole.
func (d *drs) add(ctx context.Context, l listing) (listing, error) {
	var cards []drsCard
	if len(l.Devices) > 0 {
		table, err := d.tool.run(ctx, callqueue.Library)
		if err != nil {
			return listing{}, err
		}
		if cards, err = parseCards(table); err != nil {
			return listing{}, err
		}
	}
	instances, errs := map[accel.DeviceID][]drsInstance{}, map[accel.DeviceID]error{}
	for _, card := range l.Devices {
		shown, err := cardAt(cards, card.PCI)
		switch {
		case err != nil:
		case shown.mode == modeDRS:
			instances[card.ID], err = d.ofCard(ctx, shown.index)
		case shown.mode != modeOff:
			err = fmt.Errorf("efsmi reports virtualization mode %q, which is not known", shown.mode)
		}
		if libloader.Hung(err) != nil || ctx.Err() != nil {
			return listing{}, cmp.Or(err, ctx.Err())
		}
		if err != nil {
			errs[card.ID] = err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	l, d.places = withInstances(l, instances, errs, d.places)
	return l, nil
}

// ofCard asks for the instances of a card in DRS mode; the result is not nil.
func (d *drs) ofCard(ctx context.Context, index int) ([]drsInstance, error) {
	list, err := d.tool.run(ctx, index, "-i", strconv.Itoa(index), "-L")
	if err != nil {
		return nil, err
	}
	found, err := parseInstances(list)
	if found == nil {
		found = []drsInstance{}
	}
	return found, err
}

// withInstances adds the instances to a listing: by card, not nil for a card in DRS mode. A card
// with an error becomes a fault, and with it the instances that it had. It returns the places
// of the instances too. An instance keeps its number on the card for as long as it is listed.
func withInstances(l listing, instances map[accel.DeviceID][]drsInstance, errs map[accel.DeviceID]error,
	before map[accel.DeviceID]drsPlace,
) (listing, map[accel.DeviceID]drsPlace) {
	l.Devices, l.Faults, l.Unasked = slices.Clone(l.Devices), slices.Clone(l.Faults), slices.Clone(l.Unasked)
	l.Devices = slices.DeleteFunc(l.Devices, func(card *devicelist.Device) bool {
		err := errs[card.ID]
		if err != nil {
			l.Faults = append(l.Faults, backend.Fault{Index: card.Index, ID: card.ID, Cause: accel.CauseUnreachable,
				Err: fmt.Errorf("card %d: %w", card.Index, err)})
		}
		return err != nil
	})
	places, count := map[accel.DeviceID]drsPlace{}, map[string]int{}
	for _, list := range []*[]backend.Fault{&l.Faults, &l.Unasked} {
		for _, f := range *list {
			for id, at := range before {
				if card, _, _ := accel.SplitIndex(at.index); at.card == f.ID || f.ID == "" && card == f.Index {
					places[id] = at
					*list = append(*list, backend.Fault{Index: at.index, ID: id, Err: f.Err, Cause: f.Cause})
				}
			}
		}
	}
	for _, all := range instances {
		for _, one := range all {
			count[one.uuid]++
		}
	}
	for _, card := range slices.Clone(l.Devices) {
		all := instances[card.ID]
		if all == nil {
			continue
		}
		card.Partitioned = true
		numbers := numbersOf(card.ID, all, before)
		for i, one := range all {
			part, err := instanceOf(card, one, numbers[i])
			if err == nil && count[one.uuid] > 1 {
				err = fmt.Errorf("several DRS instances have its uuid %s", one.uuid)
			}
			if err != nil {
				l.Faults = append(l.Faults, backend.Fault{Index: part.Index, ID: part.ID,
					Err: fmt.Errorf("DRS instance %s: %w", accel.IndexText(part.Index), err)})
				continue
			}
			places[part.ID] = drsPlace{card.ID, part.Index}
			l.Devices = append(l.Devices, part)
		}
	}
	for _, list := range [][]backend.Fault{l.Faults, l.Unasked} {
		slices.SortFunc(list, func(a, b backend.Fault) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID, b.ID)) })
	}
	slices.SortFunc(l.Devices, func(a, b *devicelist.Device) int { return cmp.Compare(a.Index, b.Index) })
	return l, places
}

// numbersOf numbers the instances of a card: as before, and the others from the lowest number
// that is free.
func numbersOf(card accel.DeviceID, all []drsInstance, before map[accel.DeviceID]drsPlace) []int {
	numbers, taken := make([]int, len(all)), map[int]bool{}
	for i, one := range all {
		numbers[i] = -1
		if at, ok := before[accel.DeviceID(idPrefixDRS+one.uuid)]; ok && at.card == card {
			if _, n, _ := accel.SplitIndex(at.index); !taken[n] {
				numbers[i], taken[n] = n, true
			}
		}
	}
	next := 0
	for i := range numbers {
		if numbers[i] >= 0 {
			continue
		}
		for taken[next] {
			next++
		}
		numbers[i], taken[next] = next, true
	}
	return numbers
}

// instanceOf is an instance as the entry of a listing. With an error, it has what a fault needs.
func instanceOf(card *devicelist.Device, one drsInstance, number int) (*devicelist.Device, error) {
	part := &devicelist.Device{Device: card.Device, Minor: card.Minor, Owner: card.ID}
	part.Index = accel.PartitionIndex(card.Index, min(number, accel.MaxPartitions-1))
	part.ID, part.Parent, part.Profile, part.Partitioned = "", card.ID, one.profile, false
	part.MemoryBytes = one.memoryBytes()
	if err := devicelist.CheckUUID(one.uuid, idMarks); err != nil {
		return part, err
	}
	part.ID = accel.DeviceID(idPrefixDRS + one.uuid)
	if number >= accel.MaxPartitions {
		return part, fmt.Errorf("the card has more than %d instances", accel.MaxPartitions)
	}
	return part, nil
}

// instanceEnv is what a container with that instance gets in its environment.
func instanceEnv(id accel.DeviceID, index int) map[string]string {
	card, _, _ := accel.SplitIndex(index)
	return map[string]string{visibleDevices: strconv.Itoa(card), visibleInstances: string(id)}
}

// errSeveralInstances rejects a container that requests more than one.
var errSeveralInstances = errors.New("a container gets one DRS instance; request a larger profile instead of several instances")
