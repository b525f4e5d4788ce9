package alloc

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// memoryOfUnits is what a pool of memory remembers, as JSON.
type memoryOfUnits struct {
	Inits          map[string]rememberedInits `json:"inits,omitempty"` // by pod's UID
	Asked          *rememberedQuestion        `json:"asked,omitempty"`
	Strangers      []string                   `json:"strangers,omitempty"` // as unknownHolder
	StrangerDevice accel.DeviceID             `json:"strangerDevice,omitempty"`
	Given          map[string]rememberedUnit  `json:"given,omitempty"` // by id
}

type rememberedInits struct {
	Request accel.Request               `json:"request"`
	Next    int                         `json:"next"`
	Devices []accel.DeviceID            `json:"devices"`
	Units   accel.Units                 `json:"units"`
	IDs     map[accel.DeviceID][]string `json:"ids"`
	At      time.Time                   `json:"at"`
}

type rememberedQuestion struct {
	UID       string           `json:"uid,omitempty"`
	Stranger  bool             `json:"stranger,omitempty"`
	Request   accel.Request    `json:"request"`
	Container int              `json:"container"`
	Devices   []accel.DeviceID `json:"devices"`
	IDs       []string         `json:"ids"`
}

type rememberedUnit struct {
	Device accel.DeviceID `json:"device"`
	At     time.Time      `json:"at"`
}

func (c *byPlan) memory() any {
	out := memoryOfUnits{StrangerDevice: c.device, Inits: map[string]rememberedInits{}, Given: map[string]rememberedUnit{}}
	for uid, s := range c.held.inits {
		out.Inits[uid] = rememberedInits{Request: s.request, Next: s.next, Devices: s.devices, Units: s.units, IDs: s.ids, At: s.at}
	}
	if q := c.asked; len(q.ids) > 0 {
		out.Asked = &rememberedQuestion{UID: q.uid, Stranger: q.unknown, Request: q.request, Container: q.container,
			Devices: q.devices, IDs: q.ids}
	}
	for key := range c.unknown {
		out.Strangers = append(out.Strangers, unknownHolder(key))
	}
	for id, one := range c.held.given {
		out.Given[id] = rememberedUnit{Device: one.device, At: one.at}
	}
	return out
}

func (c *byPlan) recall(data []byte) error {
	var before memoryOfUnits
	if err := json.Unmarshal(data, &before); err != nil {
		return err
	}
	if q := before.Asked; q != nil {
		if q.UID != "" && (q.Container < 0 || q.Container >= len(q.Request.Containers)) {
			return fmt.Errorf("container %d of %d", q.Container, len(q.Request.Containers))
		}
		if q.Stranger && len(q.Devices) == 0 {
			return fmt.Errorf("a question that was answered without a device")
		}
		c.asked = question{uid: q.UID, unknown: q.Stranger, request: q.Request, container: q.Container, devices: q.Devices, ids: q.IDs}
	}
	for uid, s := range before.Inits {
		c.held.inits[uid] = initServed{request: s.Request, next: s.Next, devices: s.Devices, units: s.Units, ids: s.IDs, at: s.At}
	}
	c.unknown, c.device = map[PodKey]bool{}, before.StrangerDevice
	for _, holder := range before.Strangers {
		c.unknown[initKey(holder)] = true
	}
	for id, one := range before.Given {
		c.held.given[id] = givenUnit{device: one.Device, at: one.At}
		c.pool.taken.give(one.At, one.Device)
	}
	return nil
}

// memoryOfSlots is what a pool of slots remembers, as JSON.
type memoryOfSlots struct {
	Admitting []string                  `json:"admitting,omitempty"`
	Preferred []string                  `json:"preferred,omitempty"`
	Given     map[string]rememberedSlot `json:"given,omitempty"` // by id, those that kubelet has not listed or the state file has not
}

type rememberedSlot struct {
	Chips   []accel.DeviceID `json:"chips"`
	Inits   []string         `json:"inits,omitempty"`
	Unasked bool             `json:"unasked,omitempty"`
	Guessed bool             `json:"guessed,omitempty"`
	At      time.Time        `json:"at"`
}

func (c *byPolicy) memory() any {
	out := memoryOfSlots{Admitting: c.admitting, Preferred: c.preferred, Given: map[string]rememberedSlot{}}
	saved := map[string]bool{} // what could not be written has to be told
	for _, h := range c.ids.stored.Held {
		saved[h.ID] = true
	}
	for id, h := range c.held.holds {
		if !h.seen || !saved[id] {
			out.Given[id] = rememberedSlot{Chips: h.chips, Inits: h.inits, Unasked: h.unasked, Guessed: h.guessed, At: h.at}
		}
	}
	return out
}

func (c *byPolicy) recall(data []byte) error {
	var before memoryOfSlots
	if err := json.Unmarshal(data, &before); err != nil {
		return err
	}
	c.admitting, c.preferred = before.Admitting, before.Preferred
	for id, one := range before.Given {
		c.held.holds[id] = &slotHold{chips: one.Chips, inits: one.Inits, unasked: one.Unasked, guessed: one.Guessed, at: one.At}
		c.pool.taken.give(one.At, one.Chips...)
	}
	return nil
}
