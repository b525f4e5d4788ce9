package nodeconfig

import (
	"slices"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// WithProfiles returns the configuration with a resource for each profile of MIG devices
// that it offers without naming it: the devices that are not shared otherwise, by
// migStrategy mixed. profiles are names as accel.ProfileName returns them. The original
// is not changed.
func WithProfiles(c config.NodeConfig, profiles []string) config.NodeConfig {
	if c.Vendors[nvidia].MigStrategy != config.MigMixed ||
		!slices.ContainsFunc(c.Resources, func(r config.Resource) bool { return r.Vendor == nvidia }) {
		return c
	}
	vendor, resources := accel.VendorNamed(nvidia), slices.Clone(c.Resources)
	for _, profile := range slices.Compact(slices.Sorted(slices.Values(profiles))) {
		name := string(vendor.PartitionResource(profile))
		if slices.ContainsFunc(resources, func(r config.Resource) bool {
			return r.Name == name || r.Vendor == nvidia && r.Profile != "" && accel.ProfileName(r.Profile) == profile
		}) {
			continue
		}
		resources = append(resources, config.Resource{Name: name, Vendor: nvidia, Mode: config.ModeExclusive, Profile: profile})
	}
	c.Resources = resources
	return c
}
