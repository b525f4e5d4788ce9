package dra

import (
	"slices"

	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// Report returns how the devices are published, for the node's object.
func (s *Server) Report() wire.ClaimDriver {
	out := wire.ClaimDriver{Driver: wire.Driver(s.o.Vendor), GatesOff: s.gates.missing()}
	if err := s.Ready(); err != nil {
		out.Problem = err.Error()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if out.LeftOut = s.leftOut; out.Problem == "" && !s.probed {
		out.Problem = "the API server did not answer which fields of ResourceSlices it keeps, and one form of each device is published"
	}
	return out
}

// leftOut returns the names of devices that a pool does not have, in their order.
func leftOut(devices []alloc.ClaimDevice, pool resourceslice.Pool) []string {
	published := map[string]bool{}
	for _, slice := range pool.Slices {
		for i := range slice.Devices {
			published[slice.Devices[i].Name] = true
		}
	}
	var out []string
	for i := range devices {
		if !published[devices[i].Name] {
			out = append(out, devices[i].Name)
		}
	}
	slices.Sort(out)
	return out
}
