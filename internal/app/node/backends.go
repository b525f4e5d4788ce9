package node

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
)

// backends are the vendors' backends that a configuration uses, by vendor.
type backends map[string]backend.Backend

// openBackends makes the backends that the resources name. It touches no
// library, so it also answers while another configuration is in use.
func openBackends(c config.NodeConfig, observer func(vendor string) func(call string, took time.Duration, hung bool)) (backends, error) {
	out := backends{}
	for _, r := range c.Resources {
		if _, ok := out[r.Vendor]; ok {
			continue
		}
		options := backendOptions(c, r.Vendor)
		options.Observe = observer(r.Vendor)
		b, err := vendors.New(r.Vendor, options)
		if err != nil {
			return nil, errors.Join(err, out.close())
		}
		out[r.Vendor] = b
	}
	return out, nil
}

// withFatalCauses returns the configuration with the causes named that "default" stands
// for in neverRecover, which is the vendors' to say.
func withFatalCauses(c config.NodeConfig) config.NodeConfig {
	all := map[string]config.Vendor{}
	for _, name := range vendors.Names() {
		v := c.Vendors[name]
		v.Health.NeverRecover = backend.FatalCauses(v.Health.NeverRecover, vendors.Fatal(name))
		all[name] = v
	}
	c.Vendors = all
	return c
}

// close lets go of the vendors' libraries.
func (b backends) close() error {
	var errs []error
	for vendor, one := range b {
		if err := one.Close(); err != nil {
			errs = append(errs, fmt.Errorf("close the library of %s: %w", vendor, err))
		}
	}
	return errors.Join(errs...)
}

// backendOptions are what the configuration says of one vendor's devices.
func backendOptions(c config.NodeConfig, vendor string) backend.Options {
	v := c.Vendors[vendor]
	o := backend.Options{
		DriverRoot:     c.DriverRoot,
		HostDriverRoot: v.DevRoot,
		LibraryPath:    c.Libraries[vendor],
		// A driver that was installed into a folder of its own brings no sysfs.
		SysfsRoot:    filepath.Join(c.DriverRoot, "sys"),
		IndexInEnv:   v.DeviceIDs == "index",
		CDIKind:      v.CDIKind,
		Ignore:       v.Health.Ignore,
		Heed:         v.Health.Heed,
		NeverRecover: v.Health.NeverRecover,
	}
	if v.DriverRoot != "" {
		o.DriverRoot = filepath.Join(c.DriverRoot, v.DriverRoot)
		if o.HostDriverRoot == "" {
			o.HostDriverRoot = v.DriverRoot
		}
	}
	return o
}
