package nodeconfig

import (
	"slices"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// WithProfiles returns the configuration with a resource for each profile of partitions
// that it offers without naming it: the MIG devices and DRS instances that are not shared
// otherwise, by migStrategy mixed and drs. profiles are names as accel.ProfileName returns
// them, by vendor. The original is not changed.
func WithProfiles(c config.NodeConfig, profiles map[string][]string) config.NodeConfig {
	for i := range accel.Vendors {
		c.Resources = withProfiles(c, &accel.Vendors[i], profiles[accel.Vendors[i].Name])
	}
	return c
}

func withProfiles(c config.NodeConfig, vendor *accel.Vendor, profiles []string) []config.Resource {
	of := func(r config.Resource) bool { return r.Vendor == vendor.Name }
	if c.Vendors[vendor.Name].Partitions() != config.MigMixed || !slices.ContainsFunc(c.Resources, of) {
		return c.Resources
	}
	resources := slices.Clone(c.Resources)
	for _, profile := range slices.Compact(slices.Sorted(slices.Values(profiles))) {
		name := string(vendor.PartitionResource(profile))
		if slices.ContainsFunc(resources, func(r config.Resource) bool {
			return r.Name == name || of(r) && r.Profile != "" && accel.ProfileName(r.Profile) == profile
		}) {
			continue
		}
		resources = append(resources, config.Resource{Name: name, Vendor: vendor.Name, Mode: config.ModeExclusive, Profile: profile})
	}
	return resources
}
