package vendors

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/cdispec"
)

// Set holds the backends that a configuration uses, by vendor.
type Set map[string]backend.Backend

// Open makes the backends that the resources name, with their pauses by vendor. It touches no
// library, so it also answers while another configuration is in use.
func Open(c config.NodeConfig, observer func(vendor string) func(call string, took time.Duration, hung bool),
	pauses map[string]*backend.Pause) (Set, error) {
	out := Set{}
	for _, r := range c.Resources {
		if _, ok := out[r.Vendor]; ok {
			continue
		}
		options := Options(c, r.Vendor)
		options.Observe, options.Pause = observer(r.Vendor), pauses[r.Vendor]
		b, err := New(r.Vendor, options)
		if err != nil {
			return nil, errors.Join(err, out.Close())
		}
		out[r.Vendor] = b
	}
	return out, nil
}

// WithFatalCauses returns the configuration with the causes named that "default" stands
// for in neverRecover, which is the vendors' to say.
func WithFatalCauses(c config.NodeConfig) config.NodeConfig {
	all := map[string]config.Vendor{}
	for _, name := range Names() {
		v := c.Vendors[name]
		v.Health.NeverRecover = backend.FatalCauses(v.Health.NeverRecover, Fatal(name))
		all[name] = v
	}
	c.Vendors = all
	return c
}

// Close releases the vendors' libraries.
func (s Set) Close() error {
	var errs []error
	for vendor, one := range s {
		if err := one.Close(); err != nil {
			errs = append(errs, fmt.Errorf("close the library of %s: %w", vendor, err))
		}
	}
	return errors.Join(errs...)
}

// generator returns the command that generates CDI specifications: this program once
// more, since the vendor's library must not run in this process.
func generator(vendor string) []string {
	if vendor != nvidia.Vendor {
		return nil
	}
	return []string{"/proc/self/exe", cdispec.Command}
}

// Options are what the configuration says of one vendor's devices.
func Options(c config.NodeConfig, vendor string) backend.Options {
	v := c.Vendors[vendor]
	o := backend.Options{
		DriverRoot:     c.DriverRoot,
		HostDriverRoot: v.DevRoot,
		LibraryPath:    c.Libraries[vendor],
		// A driver that was installed into a folder of its own has no sysfs or proc.
		SysfsRoot:  filepath.Join(c.DriverRoot, "sys"),
		ProcRoot:   filepath.Join(c.DriverRoot, "proc"),
		MIG:        string(v.MigStrategy),
		DRS:        v.DRS,
		IndexInEnv: v.DeviceIDs == "index",
		CDIKind:    v.CDIKind,
		HostRoot:   c.DriverRoot,
		CDI: backend.CDIOptions{
			Generator: generator(vendor), HookPath: v.CDIHookPath, DisabledHooks: v.CDIDisableHooks, FeatureFlags: v.CDIFeatureFlags,
		},
		Ignore:       v.Health.Ignore,
		Heed:         v.Health.Heed,
		NeverRecover: v.Health.NeverRecover,
	}
	if v.DevRoot != "" {
		o.DevRoot = filepath.Join(c.DriverRoot, v.DevRoot)
	}
	if v.DriverRoot != "" {
		o.DriverRoot = filepath.Join(c.DriverRoot, v.DriverRoot)
		if o.HostDriverRoot == "" {
			o.HostDriverRoot = v.DriverRoot
		}
	}
	return o
}
