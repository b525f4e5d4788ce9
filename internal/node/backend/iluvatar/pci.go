package iluvatar

import "github.com/divvy-gpu/divvy/internal/node/backend/sysfs"

// address returns the PCI address in the kernel's spelling, "" when the library
// gave none that can be. The shorter of the two texts has no room for domains
// above ffff.
func (p pciInfo) address() string {
	for _, field := range [][]byte{p.BusID[:], p.BusIDLegacy[:]} {
		if a := sysfs.Address(string(field)); a != "" {
			return a
		}
	}
	return ""
}
