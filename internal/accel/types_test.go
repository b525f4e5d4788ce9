package accel

import (
	"errors"
	"math"
	"math/big"
	"strings"
	"testing"
)

func TestPeak(t *testing.T) {
	app := func(u Units) ContainerRequest { return ContainerRequest{Kind: AppContainer, Units: u} }
	plain := func(u Units) ContainerRequest { return ContainerRequest{Kind: InitContainer, Units: u} }
	sidecar := func(u Units) ContainerRequest { return ContainerRequest{Kind: SidecarContainer, Units: u} }

	tests := map[string]struct {
		containers []ContainerRequest
		want       Units
	}{
		"nothing":                               {nil, 0},
		"one container":                         {[]ContainerRequest{app(4)}, 4},
		"app containers add up":                 {[]ContainerRequest{app(4), app(3)}, 7},
		"init containers do not":                {[]ContainerRequest{plain(4), plain(3)}, 4},
		"init larger than apps":                 {[]ContainerRequest{plain(9), app(4), app(3)}, 9},
		"init smaller than apps":                {[]ContainerRequest{plain(5), app(4), app(3)}, 7},
		"sidecar stays beside apps":             {[]ContainerRequest{sidecar(2), app(4)}, 6},
		"sidecar before init stays beside it":   {[]ContainerRequest{sidecar(2), plain(5), app(4)}, 7},
		"sidecar after init does not":           {[]ContainerRequest{plain(5), sidecar(2), app(1)}, 5},
		"two sidecars around an init":           {[]ContainerRequest{sidecar(2), plain(5), sidecar(3), app(1)}, 7},
		"all sidecars beside the apps":          {[]ContainerRequest{sidecar(2), plain(5), sidecar(3), app(4)}, 9},
		"a negative amount does not pay":        {[]ContainerRequest{app(4), app(-3), sidecar(-1), plain(-9)}, 4},
		"a sum beyond the range does not wrap":  {[]ContainerRequest{app(math.MaxInt64), app(math.MaxInt64)}, math.MaxInt64},
		"nor does an init beside its sidecars":  {[]ContainerRequest{sidecar(math.MaxInt64), plain(2)}, math.MaxInt64},
		"nor do sidecars beside app containers": {[]ContainerRequest{sidecar(math.MaxInt64), app(2)}, math.MaxInt64},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := (Request{Containers: tc.containers}).Peak(); got != tc.want {
				t.Errorf("Peak() = %d, want %d", got, tc.want)
			}
		})
	}
}

// naivePeak plays the pod's life through: it adds up, at the start of every
// container, all that run at that moment.
func naivePeak(containers []ContainerRequest) Units {
	peak := new(big.Int)
	at := func(running func(i int) bool) {
		sum := new(big.Int)
		for i, c := range containers {
			if running(i) {
				sum.Add(sum, big.NewInt(int64(max(c.Units, 0))))
			}
		}
		if sum.Cmp(peak) > 0 {
			peak = sum
		}
	}
	for now, c := range containers {
		if c.Kind != AppContainer {
			at(func(i int) bool { return i == now || i < now && containers[i].Kind == SidecarContainer })
		}
	}
	at(func(i int) bool { return containers[i].Kind != InitContainer })
	if !peak.IsInt64() {
		return math.MaxInt64
	}
	return Units(peak.Int64())
}

func FuzzPeak(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{2, 4, 2, 8})
	f.Add([]byte{1, 2, 0, 5, 1, 3, 2, 4})
	f.Add([]byte{0, 9, 1, 255, 1, 255, 2, 255, 0, 254, 2, 253})
	f.Fuzz(func(t *testing.T, data []byte) {
		var cs []ContainerRequest
		for ; len(data) >= 2; data = data[2:] {
			u := Units(data[1])
			switch {
			case u >= 254:
				u = math.MaxInt64 - (255 - u)
			case u >= 250:
				u = 251 - u // 1, 0, -1, -2
			}
			cs = append(cs, ContainerRequest{Kind: ContainerKind(data[0] % 3), Units: u})
		}
		// The list is in the order of kubelet: apps last. Peak does not depend
		// on that, naivePeak must not either.
		got, want := (Request{Containers: cs}).Peak(), naivePeak(cs)
		if got != want {
			t.Errorf("Peak(%v) = %d, want %d", cs, got, want)
		}
	})
}

func TestReasonCodeUnresolvable(t *testing.T) {
	tests := map[ReasonCode]bool{Fits: false, NodeUnknown: true, NoDeviceFits: false, LargerThanDevice: true}
	for code, want := range tests {
		if got := code.Unresolvable(); got != want {
			t.Errorf("ReasonCode(%d).Unresolvable() = %t, want %t", code, got, want)
		}
	}
}

func TestNoFitError(t *testing.T) {
	err := error(&NoFitError{Node: "n1", Resource: "enflame.com/gcu-memory", Need: 20, Largest: 16})
	if !errors.Is(err, ErrNoFit) {
		t.Error("errors.Is(NoFitError, ErrNoFit) = false")
	}
	for _, part := range []string{"n1", "enflame.com/gcu-memory", "20", "16"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not say %q", err, part)
		}
	}
}
