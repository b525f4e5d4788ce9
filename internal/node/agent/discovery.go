package agent

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// discoveries are what is known of each vendor's devices. It is safe for concurrent use.
type discoveries struct {
	mu      sync.Mutex
	vendors map[string]*discovery
}

// discovery is what is known of one vendor's devices.
type discovery struct {
	found backend.Found // of the last discovery that succeeded
	err   error         // of the last one
	// since is when err came up.
	since  time.Time
	looked bool
	// told is true once the parts have the result of the first discovery.
	told bool
}

func newDiscoveries(backends map[string]backend.Backend) *discoveries {
	d := &discoveries{vendors: map[string]*discovery{}}
	for vendor := range backends {
		d.vendors[vendor] = &discovery{}
	}
	return d
}

// note takes the outcome of a discovery.
func (d *discoveries) note(vendor string, found backend.Found, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v := d.vendors[vendor]
	switch {
	case err == nil:
		v.found = found
	case v.err == nil:
		v.since = time.Now()
	}
	v.err, v.looked = err, true
}

// told notes that the parts have the outcome.
func (d *discoveries) told(vendor string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.vendors[vendor].told = true
}

// untold returns an error until the parts have the outcome of each vendor's first
// discovery.
func (d *discoveries) untold() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for vendor, v := range d.vendors {
		if !v.told {
			return fmt.Errorf("%s: the first discovery of devices has not ended", vendor)
		}
	}
	return nil
}

// restart returns the error of a vendor's library that asks for a restart.
func (d *discoveries) restart() (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for vendor, v := range d.vendors {
		var needed *backend.RestartNeededError
		if errors.As(v.err, &needed) {
			err = fmt.Errorf("%s: %w", vendor, v.err)
		}
	}
	return err
}

// all returns what is known by vendor, in the order of their names; false until the devices of
// all were looked for.
func (d *discoveries) all() (names []string, of map[string]discovery, complete bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	of, complete = map[string]discovery{}, true
	for vendor, v := range d.vendors {
		of[vendor] = *v
		complete = complete && v.looked
	}
	return slices.Sorted(maps.Keys(of)), of, complete
}

// devices are the node's devices that are known, also those that cannot be used; false until
// those of all vendors were looked for.
func (d *discoveries) devices() (map[accel.DeviceID]accel.Quarantine, bool) {
	out := map[accel.DeviceID]accel.Quarantine{}
	_, all, complete := d.all()
	for vendor, v := range all {
		for _, d := range v.found.Devices {
			out[d.ID] = accel.Quarantine{Device: d.ID, Vendor: vendor, Index: d.Index}
		}
		for _, f := range v.found.Faults {
			if f.ID != "" {
				out[f.ID] = accel.Quarantine{Device: f.ID, Vendor: vendor, Index: f.Index}
			}
		}
	}
	return out, complete
}
