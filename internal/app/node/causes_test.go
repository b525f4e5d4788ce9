package node

import (
	"strings"
	"testing"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

func TestMisspeltCausesAreNamed(t *testing.T) {
	got := unknownCauses(config.NodeConfig{Vendors: map[string]config.Vendor{
		"nvidia": {Health: config.Health{
			Ignore: []string{"default", "all", "xid-94", "xid-7*", "xid79"}, Heed: []string{"*", "ecc-*"}, NeverRecover: []string{"default", "xid48"},
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
