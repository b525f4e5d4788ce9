package nodeagent

import (
	"context"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/podresources"
)

// part is one way in which a resource of the node gives out devices: memoryPool
// by units of memory, slotPool as a whole or by time slices. A resource has one
// part, and a second one while containers hold what it gave out in the other
// way before the configuration changed. It decides for kubelet and is safe for
// concurrent use.
type part interface {
	deviceplugin.Allocator

	// update takes the outcome of a discovery.
	update(ctx context.Context, found backend.Found, err error)
	// take takes kubelet's list. The caller holds records.turn.
	take(pods []podresources.Pod, grace time.Duration)
	// sync derives units and inventory from devices, configuration and what
	// containers hold, and tells kubelet. It must not wake the agent's loop.
	sync(ctx context.Context)

	// owns reports whether a unit id is one of this part's.
	owns(id string) bool
	// holders returns the pods that hold something of a chip.
	holders(chip accel.DeviceID) []podKey
	// chips returns the devices that the part is made of as they are, whoever
	// holds them, those that were lost as well.
	chips() []accel.Device

	// inventory is what the node publishes.
	inventory() accel.Inventory
	// observe sets the gauges of the devices.
	observe()
	// ready returns why the part is not offered as configured, or nil.
	ready() error
	// known reports whether the inventory is worth publishing.
	known() bool
	// absent reports whether this node has nothing that it could be made of.
	absent() bool
	// drained reports whether a part that takes no new pods is held by nobody
	// any more; false for others.
	drained() bool
	// idle reports whether it is certain that nobody holds anything.
	idle() bool
	// forget removes the part's state file.
	forget() error
}

// unitSink is the part of deviceplugin.Server that a part needs.
type unitSink interface {
	SetUnits([]deviceplugin.Unit) error
}
