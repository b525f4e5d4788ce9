package alloc

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// The claims of the model: kube-scheduler chooses devices, not always wisely, and kubelet
// prepares and unprepares claims beside the pods that it admits.

// startClaims makes the engine know the claims as the daemon does at its start: by the
// file, without those that kubelet has released meanwhile.
func (m *model) startClaims() {
	if m.byClaims {
		m.engine.Claims.Serve(modelVendor, m.configs...)
	}
	var s ClaimsState
	if m.claimsDisk != nil {
		if err := json.Unmarshal(m.claimsDisk, &s); err != nil {
			m.fail("state of claims: %v", err)
		}
		m.engine.Claims.Restore(s)
		m.collectClaims()
		return
	}
	s.Partial = len(m.claims) > 0
	m.engine.Claims.Restore(s)
}

// collectClaims forgets the claims that kubelet has not prepared: releasing them could not
// be saved.
func (m *model) collectClaims() {
	for _, one := range m.engine.Claims.All() {
		if _, there := m.claims[one.UID]; !there {
			m.engine.Claims.Release(one.Key())
		}
	}
}

// saveClaims reports whether the file has the claims.
func (m *model) saveClaims() bool {
	if m.full {
		return false
	}
	data, err := json.Marshal(m.engine.Claims.State())
	if err != nil {
		m.fail("state of claims: %v", err)
	}
	m.claimsDisk = data
	return true
}

// claim prepares a claim, the same one again, or releases one.
func (m *model) claim() {
	switch n := m.rng.IntN(12); {
	case n == 0 && m.claimsDisk != nil && !m.full && m.serving == nil && !m.partitionsGone():
		// The file is lost, and found again from the API server.
		m.claimsDisk = nil
		m.restart(m.mayCrash(), false)
	case n <= 2:
		if !m.engine.Claims.known {
			var found []Claim
			for _, one := range m.claims {
				one.Parts = slices.Clone(one.Parts)
				for i := range one.Parts {
					one.Parts[i].Type, one.Parts[i].Card = "", StoredCard{}
				}
				found = append(found, one)
			}
			m.note("claims are found again")
			m.engine.Claims.Recover(found)
			m.saveClaims()
			m.tally["claims found again"]++
		}
	case n <= 6:
		for uid, one := range m.claims {
			if m.rng.IntN(2) == 0 {
				m.note("claim %s is released", uid)
				m.engine.Claims.Release(ClaimKey{modelVendor, uid})
				m.saveClaims()
				m.tally["claims released"]++
			} else if !m.engine.Claims.known {
				return
			} else if again, err := m.engine.Claims.Hold(one); err != nil || !slices.EqualFunc(again.Parts, one.Parts,
				func(a, b ClaimPart) bool {
					return a.Device == b.Device && (a.Card.Chips == nil || slices.Equal(a.Card.Chips, b.Card.Chips))
				}) {
				m.fail("claim %s is prepared again: %+v, %v", uid, again, err)
				return
			} else {
				return
			}
			delete(m.claims, uid)
			return
		}
	default:
		m.prepare()
	}
}

// partitionsGone reports whether a claim holds a partition that does not exist any more: the
// file alone has its device.
func (m *model) partitionsGone() bool {
	there := map[accel.DeviceID]bool{}
	for _, d := range m.discovery().Devices {
		there[d.ID] = true
	}
	for _, c := range m.claims {
		for _, part := range c.Parts {
			if part.Card.Parent != "" && !there[part.Card.ID] {
				return true
			}
		}
	}
	return false
}

// prepare lets kubelet prepare a claim of random devices.
func (m *model) prepare() {
	devices := m.engine.Claims.Devices(modelVendor)
	if len(devices) == 0 {
		return
	}
	m.serial++
	c := Claim{Vendor: modelVendor, UID: fmt.Sprint("c", m.serial), Namespace: "ns", Name: fmt.Sprint("claim", m.serial)}
	for i := range 1 + m.rng.IntN(2) {
		d := devices[m.rng.IntN(len(devices))]
		part := ClaimPart{Request: fmt.Sprint("r", i), Device: d.Name}
		switch {
		case d.Slots > 0:
			part.Slots = 1 + m.rng.IntN(d.Slots)
		case m.rng.IntN(4) > 0:
			part.Bytes = int64(1+m.rng.IntN(5)) << 30 // of a device that may not be shared
		}
		c.Parts = append(c.Parts, part)
	}
	// The shell asks kubelet where the rejection is in doubt.
	held, err := m.engine.Claims.Hold(c)
	if InDoubt(err) {
		m.take(false, RecordedBefore)
		held, err = m.engine.Claims.Hold(c)
	}
	if err != nil {
		m.tally["claims rejected"]++
		m.note("claim %s with %+v is rejected: %v", c.UID, c.Parts, err)
		if _, there := m.engine.Claims.Get(c.Key()); there {
			m.fail("claim %s was rejected and is recorded", c.UID)
		}
		return
	}
	m.note("claim %s holds %+v", c.UID, held.Parts)
	if !m.saveClaims() {
		m.engine.Claims.Release(c.Key())
		return
	}
	m.engine.Claims.Prepared(c.Key(), nil)
	m.claims[c.UID] = held
	m.tally["claims held"]++
	for _, d := range devices {
		slots := 0
		for _, one := range m.claims {
			for _, part := range one.Parts {
				if part.Device == d.Name {
					slots += part.Slots
				}
			}
		}
		if slots > d.Slots && slices.ContainsFunc(held.Parts, func(p ClaimPart) bool { return p.Device == d.Name }) {
			m.fail("claims hold %d of the %d slots of %s", slots, d.Slots, d.Name)
		}
	}
}

// checkClaims recounts what claims hold, and that no chip is held as a whole and by a
// partition. It adds to the chips in use and to how they are.
func (m *model) checkClaims(inUse map[accel.DeviceID]bool, how map[accel.DeviceID]string) {
	held := map[string]int64{} // bytes or slots, by device
	shares := map[string]int{}
	for _, c := range m.claims {
		for _, part := range c.Parts {
			use := "device " + part.Device
			switch {
			case part.Bytes > 0:
				held[part.Device] += part.Bytes
				if held[part.Device] > part.Card.MemoryBytes {
					m.fail("claims hold %d bytes of %s, which has %d", held[part.Device], part.Device, part.Card.MemoryBytes)
				}
				shares[part.Device]++
			case part.Slots > 0:
				held[part.Device] += int64(part.Slots)
				shares[part.Device]++
			default:
				use = "whole, by claim " + c.UID + " request " + part.Request
			}
			if shares[part.Device] > 1 {
				m.tally["claims shared"]++
			}
			for _, chip := range part.Card.Chips {
				inUse[chip] = true
				if how[chip] != "" && how[chip] != use {
					m.fail("chip %s is used as %s and as %s", chip, how[chip], use)
				}
				how[chip] = use
			}
		}
	}
	for chip, used := range inUse {
		if used && inUse[m.parents[chip]] {
			m.fail("chip %s is used as a whole, and its partition %s too", m.parents[chip], chip)
		}
	}
}

// endClaims releases all claims.
func (m *model) endClaims() {
	for uid := range m.claims {
		m.engine.Claims.Release(ClaimKey{modelVendor, uid})
		delete(m.claims, uid)
	}
	m.full = false
	m.engine.Claims.Recover(nil)
	m.collectClaims()
	m.saveClaims()
}

// expectClaims expects that a claim can have any device, as nothing is held.
func (m *model) expectClaims() {
	devices := m.engine.Claims.Devices(modelVendor)
	if m.byClaims && len(devices) == 0 && slices.ContainsFunc(m.configs, func(c Config) bool {
		return c.Kind == Slots && c.Resource == modelShared && c.Chooses == nil
	}) {
		m.fail("claims get no device")
	}
	for _, d := range devices {
		if d.Elsewhere != "" {
			m.fail("device %s is held as %s while no container holds any", d.Name, d.Elsewhere)
		}
		c := Claim{Vendor: modelVendor, UID: "all", Parts: []ClaimPart{{Device: d.Name}}}
		switch {
		case d.Slots > 0:
			c.Parts[0].Slots = d.Slots
		case d.Shared:
			c.Parts[0].Bytes = d.Card.MemoryBytes
		}
		if _, err := m.engine.Claims.Hold(c); err != nil {
			m.fail("a claim cannot have device %s while nothing is held: %v", d.Name, err)
		}
		m.engine.Claims.Release(c.Key())
		m.tally["claims of free devices"]++
	}
}
