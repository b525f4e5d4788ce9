package wire

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestClaimDrivers(t *testing.T) {
	for name, drivers := range map[string][]ClaimDriver{
		"none":             nil,
		"all is published": {{Driver: "enflame.divvy.dev"}, {Driver: "nvidia.divvy.dev"}},
		"reduced": {{Driver: "iluvatar.divvy.dev", Problem: "kubelet did not register it", GatesOff: []string{"DRAPartitionableDevices"},
			LeftOut: []string{"board-a"}}},
	} {
		t.Run(name, func(t *testing.T) {
			text, err := EncodeClaimDrivers(drivers)
			if err != nil {
				t.Fatal(err)
			}
			got, err := DecodeClaimDrivers(text)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(drivers, got); diff != "" {
				t.Errorf("decoded (-want +got):\n%s", diff)
			}
		})
	}
	long := ClaimDriver{Driver: "nvidia.divvy.dev", Problem: strings.Repeat("<", 4<<10)}
	for i := range 1000 {
		long.LeftOut = append(long.LeftOut, fmt.Sprintf("gpu-%063d", i))
	}
	text, err := EncodeClaimDrivers([]ClaimDriver{long, long, long})
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeClaimDrivers(text)
	if err != nil || len(got) != 3 || len(got[0].LeftOut) != maxLeftOut || len(got[0].Problem) > maxFinding {
		t.Errorf("too much: %v, %+v", err, got)
	}
	for _, bad := range []string{"{", `{"v":2,"drivers":[{"driver":"nvidia.divvy.dev"}]}`, `{"v":1,"drivers":[]}`,
		`{"v":1,"drivers":[{"driver":"gpu.nvidia.com"}]}`} {
		if _, err := DecodeClaimDrivers(bad); err == nil {
			t.Errorf("%s was read", bad)
		}
	}
}
