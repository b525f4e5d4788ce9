// Package sysfs reads what the kernel says about PCI devices and their drivers,
// for backends whose libraries do not say it.
package sysfs

import (
	"fmt"
	"os"
	"path"
	"regexp"
	"strconv"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Root is the folder that the kernel's sysfs is seen in. Symbolic links are
// followed inside it.
type Root string

// Read returns what a file says, without the space around it; "" for one that
// cannot be read.
func (r Root) Read(file string) string {
	full, err := securejoin.SecureJoin(string(r), file)
	if err != nil {
		return ""
	}
	data, err := os.ReadFile(full)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// OfDevice returns what a file of the PCI device at address says, "" when that
// cannot be known.
func (r Root) OfDevice(address, file string) string {
	if address == "" {
		return ""
	}
	return r.Read(path.Join("bus/pci/devices", address, file))
}

// NUMANode returns the NUMA node of the PCI device at address, accel.NoNUMA
// when the kernel says that there is none. known is false when its files do not
// show the device.
func (r Root) NUMANode(address string) (node int, known bool) {
	node, err := strconv.Atoi(r.OfDevice(address, "numa_node"))
	switch {
	case err != nil:
		return accel.NoNUMA, false
	case node < 0:
		return accel.NoNUMA, true
	default:
		return node, true
	}
}

// Machine returns the product name of the machine, "" when it has none.
func (r Root) Machine() string { return r.Read("class/dmi/id/product_name") }

// Bound returns the addresses of the PCI devices that a driver in the kernel
// has in its care, as one text; "" when that is not known.
func (r Root) Bound(driver string) string {
	folder, err := securejoin.SecureJoin(string(r), path.Join("bus/pci/drivers", driver))
	if err != nil {
		return ""
	}
	entries, err := os.ReadDir(folder) // in the order of the names
	if err != nil {
		return ""
	}
	var addresses []string
	for _, e := range entries {
		if a := Address(e.Name()); a != "" {
			addresses = append(addresses, a)
		}
	}
	return strings.Join(addresses, " ")
}

var addressSyntax = regexp.MustCompile(`^([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$`)

// Address returns a PCI address in the kernel's spelling, "" for a text that is
// none. Libraries write domains with eight digits, in capitals, and fill the
// rest of their room with NULs; the kernel has four digits for a domain unless
// it needs more.
func Address(text string) string {
	text, _, _ = strings.Cut(text, "\x00")
	m := addressSyntax.FindStringSubmatch(strings.ToLower(strings.TrimSpace(text)))
	if m == nil {
		return ""
	}
	domain, err := strconv.ParseUint(m[1], 16, 32)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%04x:%s:%s.%s", domain, m[2], m[3], m[4])
}

// Plug notices that devices of a driver came or went, for libraries that count
// their devices when they are initialised. The zero value has seen nothing.
type Plug struct {
	// last is the list of the discovery before, and served the one with which
	// the library was initialised.
	last, served string
}

// Changed takes the driver's list of devices as it is now (Root.Bound) and
// reports whether the library must be initialised anew. fresh is true when it
// was just initialised.
//
// The kernel lists a device before its driver is done with it. So a change
// counts twice, once when it is seen and once when nothing more has changed by
// the next discovery.
func (p *Plug) Changed(now string, fresh bool) bool {
	settled := now == p.last
	p.last = now
	if fresh && p.served == "" {
		p.served = now // the first time
	}
	if now == p.served {
		return false
	}
	if settled || fresh {
		p.served = now
	}
	return !fresh
}
