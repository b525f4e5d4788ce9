// Package vendors makes the backends of the vendors. What all programs know of a
// vendor is in the table of package accel.
package vendors

import (
	"fmt"
	"strings"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/enflame"
	"github.com/divvy-gpu/divvy/internal/node/backend/iluvatar"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia"
)

// Vendor is an entry of the list.
type Vendor struct {
	// Name is what the configuration calls the vendor.
	Name string
	// New makes the vendor's backend. It touches no library and no device.
	New func(backend.Options) (backend.Backend, error)
	// Causes are the causes that a device of the vendor can be unhealthy for,
	// as patterns with "*".
	Causes []string
	// Fatal are the causes, as patterns, after which a device of the vendor is put
	// into quarantine unless the configuration says otherwise.
	Fatal []string
}

// All returns the vendors, in the order of their names.
func All() []Vendor {
	return []Vendor{
		{enflame.Vendor, func(o backend.Options) (backend.Backend, error) { return enflame.New(o) }, enflame.Causes(),
			enflame.FatalByDefault},
		{iluvatar.Vendor, func(o backend.Options) (backend.Backend, error) { return iluvatar.New(o) }, iluvatar.Causes(),
			iluvatar.FatalByDefault},
		{nvidia.Vendor, func(o backend.Options) (backend.Backend, error) { return nvidia.New(o) }, nvidia.Causes(), nvidia.FatalByDefault},
	}
}

// Names returns the names of all vendors, in order.
func Names() []string {
	var names []string
	for _, v := range All() {
		names = append(names, v.Name)
	}
	return names
}

// Causes returns the causes that a device of the vendor with that name can be
// unhealthy for, as patterns with "*"; none for a vendor that there is not.
func Causes(name string) []string {
	for _, v := range All() {
		if v.Name == name {
			return v.Causes
		}
	}
	return nil
}

// Fatal returns the causes, as patterns, after which a device of the vendor with that
// name is put into quarantine unless the configuration says otherwise.
func Fatal(name string) []string {
	for _, v := range All() {
		if v.Name == name {
			return v.Fatal
		}
	}
	return nil
}

// New makes the backend of the vendor with that name.
func New(name string, o backend.Options) (backend.Backend, error) {
	for _, v := range All() {
		if v.Name == name {
			return v.New(o)
		}
	}
	return nil, fmt.Errorf("unknown vendor %q, known are: %s", name, strings.Join(Names(), ", "))
}
