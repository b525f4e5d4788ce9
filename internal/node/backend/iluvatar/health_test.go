package iluvatar

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

func TestEveryHealthBitHasACause(t *testing.T) {
	want := []string{
		"syshub", "memory-controller", "over-temperature", "over-voltage", "ecc", "memory", "pcie",
		"health-bit-7", "health-bit-63",
	}
	if diff := cmp.Diff(want, causesOf(0xff|1<<63)); diff != "" {
		t.Errorf("causes (-want +got):\n%s", diff)
	}
	if got := causesOf(0); got != nil {
		t.Errorf("causes of no bit are %v", got)
	}
}

func TestHealthBits(t *testing.T) {
	tests := map[string]struct {
		bits    uint64
		options backend.Options
		want    accel.Health
	}{
		"well": {},
		"one": {bits: 0x4, want: accel.Health{
			Unhealthy: true, Cause: "over-temperature",
			Reason: "ixmlDeviceGetHealth reports over-temperature (0x4)",
		}},
		"several, the lowest is the cause": {bits: 0x52, want: accel.Health{
			Unhealthy: true, Cause: "memory-controller",
			Reason: "ixmlDeviceGetHealth reports memory-controller, ecc, pcie (0x52)",
		}},
		"several, one of which is never to recover": {
			bits: 0x52, options: backend.Options{NeverRecover: []string{"ecc"}},
			want: accel.Health{Unhealthy: true, Cause: "ecc", Reason: "ixmlDeviceGetHealth reports memory-controller, ecc, pcie (0x52)"},
		},
		"one that nobody knows": {bits: 0x80, want: accel.Health{
			Unhealthy: true, Cause: "health-bit-7", Reason: "ixmlDeviceGetHealth reports health-bit-7 (0x80)",
		}},
		"ignored": {bits: 0xc, options: backend.Options{Ignore: []string{"over-*"}}},
		"ignored, and one that counts": {
			bits: 0x44, options: backend.Options{Ignore: []string{"over-temperature"}},
			want: accel.Health{Unhealthy: true, Cause: "pcie", Reason: "ixmlDeviceGetHealth reports pcie (0x44)"},
		},
		"all ignored but one": {
			bits: 0x44, options: backend.Options{Ignore: []string{"all"}, Heed: []string{"over-temperature"}},
			want: accel.Health{Unhealthy: true, Cause: "over-temperature", Reason: "ixmlDeviceGetHealth reports over-temperature (0x44)"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := start(t, boards(1, 2), tt.options)
			n.found()
			n.change(func(topology *vendorsim.Topology) { topology.Cards[1].HealthBits = tt.bits })
			found := n.found()
			if found.Devices[0].Health.Unhealthy {
				t.Errorf("the other chip of the board is unhealthy: %+v", found.Devices[0].Health)
			}
			if diff := cmp.Diff(tt.want, found.Devices[1].Health); diff != "" {
				t.Errorf("health (-want +got):\n%s", diff)
			}
			n.change(func(topology *vendorsim.Topology) { topology.Cards[1].HealthBits = 0 })
			if h := n.found().Devices[1].Health; h.Unhealthy {
				t.Errorf("after recovery, health is %+v", h)
			}
		})
	}
}

func TestHealthThatCannotBeAsked(t *testing.T) {
	for name, tt := range map[string]struct {
		code int
		want accel.Health
	}{
		"not supported": {code: codeNotSupported},
		"fails": {codeUnknown, accel.Health{
			Unhealthy: true, Cause: "unreachable", Reason: "ixmlDeviceGetHealth(0): unknown error (999)",
		}},
		"lost": {codeLost, accel.Health{Unhealthy: true, Cause: "lost", Reason: "ixmlDeviceGetHealth(0): the GPU is lost (15)"}},
	} {
		t.Run(name, func(t *testing.T) {
			topology := boards(1, 1)
			fails(&topology.Cards[0], "ixmlDeviceGetHealth", tt.code)
			got := start(t, topology, backend.Options{}).found().Devices[0].Health
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("health (-want +got):\n%s", diff)
			}
		})
	}
}
