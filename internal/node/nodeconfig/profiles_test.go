package nodeconfig

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

func TestWithProfiles(t *testing.T) {
	gpu := config.Resource{Name: "nvidia.com/gpu", Vendor: "nvidia", Mode: config.ModeExclusive}
	of := func(profile string) config.Resource {
		return config.Resource{Name: "nvidia.com/mig-" + profile, Vendor: "nvidia", Mode: config.ModeExclusive, Profile: profile}
	}
	slicedMIG := config.Resource{Name: "nvidia.com/small", Vendor: "nvidia", Mode: config.ModeTimeSlicing, Replicas: 4,
		Profile: "1g.5gb+me"}
	gcu := config.Resource{Name: "enflame.com/gcu", Vendor: "enflame", Mode: config.ModeExclusive}
	taken := config.Resource{Name: "nvidia.com/mig-1g.5gb", Vendor: "iluvatar", Mode: config.ModeExclusive}
	for name, tt := range map[string]struct {
		strategy  config.MigStrategy
		resources []config.Resource
		profiles  []string
		want      []config.Resource
	}{
		"one each, sorted": {config.MigMixed, []config.Resource{gpu}, []string{"2g.10gb", "1g.5gb", "2g.10gb"},
			[]config.Resource{gpu, of("1g.5gb"), of("2g.10gb")}},
		"named with another sign": {config.MigMixed, []config.Resource{gpu, slicedMIG}, []string{"1g.5gb.me", "1g.5gb"},
			[]config.Resource{gpu, slicedMIG, of("1g.5gb")}},
		"a name that is taken":   {config.MigMixed, []config.Resource{gpu, taken}, []string{"1g.5gb"}, []config.Resource{gpu, taken}},
		"no profiles":            {config.MigMixed, []config.Resource{gpu}, nil, []config.Resource{gpu}},
		"strategy single":        {config.MigSingle, []config.Resource{gpu}, []string{"1g.5gb"}, []config.Resource{gpu}},
		"no strategy":            {"", []config.Resource{gpu}, []string{"1g.5gb"}, []config.Resource{gpu}},
		"no devices of NVIDIA's": {config.MigMixed, []config.Resource{gcu}, []string{"1g.5gb"}, []config.Resource{gcu}},
	} {
		t.Run(name, func(t *testing.T) {
			before := config.Default()
			before.Resources, before.Vendors = slices.Clone(tt.resources), map[string]config.Vendor{"nvidia": {MigStrategy: tt.strategy}}
			got := WithProfiles(before, map[string][]string{"nvidia": tt.profiles, "enflame": {"9g.9gb"}})
			if diff := cmp.Diff(tt.want, got.Resources); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
			if mistakes := config.Validate(got, vendors); len(mistakes) > 0 {
				t.Errorf("the configuration is not valid: %q", mistakes)
			}
			if !cmp.Equal(before.Resources, tt.resources) {
				t.Error("the original was changed")
			}
		})
	}
}

// TestWithProfilesOfTwoVendors: each vendor's profiles are its own.
func TestWithProfilesOfTwoVendors(t *testing.T) {
	c := config.Default()
	c.Vendors = map[string]config.Vendor{"nvidia": {MigStrategy: config.MigMixed}, "enflame": {DRS: true}}
	c.Resources = []config.Resource{
		{Name: "nvidia.com/gpu", Vendor: "nvidia", Mode: config.ModeExclusive},
		{Name: "enflame.com/drs-gcu", Vendor: "enflame", Mode: config.ModeExclusive, Profile: "1g.6gb"},
	}
	got := WithProfiles(c, map[string][]string{"nvidia": {"1g.6gb"}, "enflame": {"1g.6gb", "3g.24gb"}})
	want := append(slices.Clone(c.Resources),
		config.Resource{Name: "enflame.com/drs-gcu-3g.24gb", Vendor: "enflame", Mode: config.ModeExclusive, Profile: "3g.24gb"},
		config.Resource{Name: "nvidia.com/mig-1g.6gb", Vendor: "nvidia", Mode: config.ModeExclusive, Profile: "1g.6gb"})
	if diff := cmp.Diff(want, got.Resources); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
	if mistakes := config.Validate(got, vendors); len(mistakes) > 0 {
		t.Errorf("the configuration is not valid: %q", mistakes)
	}
}
