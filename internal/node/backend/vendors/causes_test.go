package vendors

import (
	"strings"
	"testing"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

func TestMisspeltCausesAreNamed(t *testing.T) {
	got := UnknownCauses(config.NodeConfig{Vendors: map[string]config.Vendor{
		"nvidia": {Health: config.Health{
			Ignore: []string{"default", "all", "xid-94", "xid-7*", "xid79"}, Heed: []string{"*", "ecc-*"},
			NeverRecover: []string{"default", "xid48"},
		}},
		"iluvatar": {Health: config.Health{Ignore: []string{"over-temperature", "health-bit-9", "overTemperature"}}},
	}})
	want := []string{
		`vendors.iluvatar.health.ignore: "overTemperature" names no cause`,
		`vendors.nvidia.health.ignore: "xid79" names no cause`,
		`vendors.nvidia.health.neverRecover: "xid48" names no cause`,
	}
	if len(got) != len(want) {
		t.Fatalf("got %q", got)
	}
	for i := range want {
		if !strings.HasPrefix(got[i], want[i]) {
			t.Errorf("warning %d is %q, want %s...", i, got[i], want[i])
		}
	}
}

// TestFatalCausesByDefault: what means that a device must be reset or replaced is fatal
// unless the configuration says otherwise.
func TestFatalCausesByDefault(t *testing.T) {
	fatal := func(never []string, vendor, cause string) bool {
		c := config.Default()
		if never != nil {
			c.Vendors = map[string]config.Vendor{vendor: {Health: config.Health{NeverRecover: never}}}
		}
		return backend.Matches(WithFatalCauses(c).Vendors[vendor].Health.NeverRecover, cause)
	}
	for _, tt := range []struct {
		never         []string
		vendor, cause string
		want          bool
	}{
		{nil, "nvidia", "xid-79", true},
		{nil, "nvidia", "xid-48", true},
		{nil, "nvidia", "ecc-double-bit", true},
		{nil, "nvidia", "row-remap-failure", true},
		{nil, "nvidia", "xid-94", false}, // contained: NVIDIA has the application started again
		{nil, "nvidia", "xid-63", false}, // a row was replaced
		{nil, "nvidia", "lost", false},
		{nil, "nvidia", "unreachable", false},
		{nil, "iluvatar", "ecc", true},
		{nil, "iluvatar", "over-temperature", false},
		{nil, "enflame", "library", false},
		{[]string{}, "nvidia", "xid-79", false},
		{[]string{"xid-94"}, "nvidia", "xid-79", false},
		{[]string{"default", "xid-94"}, "nvidia", "xid-79", true},
		{[]string{"default", "xid-94"}, "nvidia", "xid-94", true},
		{[]string{"default"}, "enflame", "library", false},
	} {
		if got := fatal(tt.never, tt.vendor, tt.cause); got != tt.want {
			t.Errorf("neverRecover %q: %s of %s is fatal: %v, want %v", tt.never, tt.cause, tt.vendor, got, tt.want)
		}
	}
}
