package accel

import (
	"errors"
	"math"
	"math/big"
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

func TestSelection(t *testing.T) {
	tests := map[string]struct {
		s     *Selection
		id    DeviceID
		model string
		tier  Tier
		want  bool
	}{
		"no selection":                     {nil, "a", "S60", TierNone, true},
		"an empty one":                     {&Selection{}, "a", "", TierNone, true},
		"a model":                          {&Selection{UseModels: []string{"S60", "S90"}}, "a", "S90", TierNone, true},
		"case does not matter":             {&Selection{UseModels: []string{"nvidia a100"}}, "a", "NVIDIA A100", TierNone, true},
		"the whole name":                   {&Selection{UseModels: []string{"NVIDIA A100"}}, "a", "NVIDIA A100-SXM4", TierNone, false},
		"another model":                    {&Selection{UseModels: []string{"S60"}}, "a", "S90", TierNone, false},
		"a beginning":                      {&Selection{UseModels: []string{"nvidia a100*"}}, "a", "NVIDIA A100-SXM4", TierNone, true},
		"a beginning is longer":            {&Selection{UseModels: []string{"S60-plus*"}}, "a", "S60", TierNone, false},
		"any model":                        {&Selection{UseModels: []string{"*"}}, "a", "", TierNone, true},
		"a model that is not known":        {&Selection{UseModels: []string{"S60"}}, "a", "", TierNone, false},
		"an avoided model":                 {&Selection{AvoidModels: []string{"s6*"}}, "a", "S60", TierNone, false},
		"another one is avoided":           {&Selection{AvoidModels: []string{"S90"}}, "a", "S60", TierNone, true},
		"a device":                         {&Selection{UseIDs: []string{"a", "b"}}, "b", "S60", TierNone, true},
		"another device":                   {&Selection{UseIDs: []string{"a", "b"}}, "c", "S60", TierNone, false},
		"case matters in IDs":              {&Selection{UseIDs: []string{"GCU-a"}}, "gcu-a", "", TierNone, false},
		"an avoided device":                {&Selection{AvoidIDs: []string{"a", "b"}}, "b", "S60", TierNone, false},
		"a device of an avoided model":     {&Selection{UseIDs: []string{"a"}, AvoidModels: []string{"S60"}}, "a", "S60", TierNone, false},
		"a used model, an avoided device":  {&Selection{UseModels: []string{"S60"}, AvoidIDs: []string{"a"}}, "a", "S60", TierNone, false},
		"a used model, not a used device":  {&Selection{UseModels: []string{"S60"}, UseIDs: []string{"b"}}, "a", "S60", TierNone, false},
		"the beginning of a letter":        {&Selection{UseModels: []string{"\u00e9\u00e8*"}}, "a", "\u00e9\u00e9", TierNone, false},
		"a tier that is required":          {&Selection{Isolation: TierDriver}, "a", "S60", TierDriver, true},
		"a higher tier":                    {&Selection{Isolation: TierDriver}, "a", "S60", TierHardware, true},
		"a lower tier":                     {&Selection{Isolation: TierDriver}, "a", "S60", TierCooperative, false},
		"no tier":                          {&Selection{Isolation: TierCooperative}, "a", "S60", TierNone, false},
		"an avoided device of that tier":   {&Selection{AvoidIDs: []string{"a"}, Isolation: TierDriver}, "a", "", TierDriver, false},
		"the first half of another letter": {&Selection{UseModels: []string{"\u00e9*"}}, "a", "e\u00e9", TierNone, false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := tc.s.Allows(tc.id, tc.model, tc.tier); got != tc.want {
				t.Errorf("Allows(%q, %q, %v) = %t, want %t", tc.id, tc.model, tc.tier, got, tc.want)
			}
		})
	}
}

// Evicting pods helps where pods that end would.
func TestUnresolvable(t *testing.T) {
	for code, want := range map[ReasonCode]bool{
		Fits: false, NodeUnknown: true, NoDeviceFits: false, LargerThanDevice: true, TooFewDevices: true, NotSelected: true,
		NotIsolated: true, NoCapacity: false, Unservable: true,
	} {
		if got := code.Unresolvable(); got != want {
			t.Errorf("code %d: Unresolvable = %t, want %t", code, got, want)
		}
	}
}

func TestNoFitErrorSaysWhatIsShort(t *testing.T) {
	for _, tc := range []struct {
		err  NoFitError
		want string
	}{
		{NoFitError{Node: "n", Resource: "r", Devices: 1, Need: 4, Largest: 3},
			"node n: 4 units of r requested on one device, at most 3 are free on any: "},
		{NoFitError{Node: "n", Resource: "r", Devices: 2, Need: 4, Largest: 3},
			"node n: 2 devices with 4 units of r each requested, at most 3 are free on any: "},
		{NoFitError{Node: "n", Resource: "r", Code: NoCapacity, Devices: 2},
			"node n: insufficient CPU or memory for a pod with devices of r: "},
		{NoFitError{Node: "n", Resource: "r", Code: NotSelected, Devices: 1},
			"node n: no device of r is allowed by the pod's annotations: "},
		{NoFitError{Node: "n", Resource: "r", Code: NotIsolated, Required: TierDriver, Stated: 1},
			"node n: isolation driver required, device states none: "},
		{NoFitError{Node: "n", Resource: "r", Code: TooFewDevices, Devices: 3, Need: 4},
			"node n: fewer than 3 devices of r with 4 units are allowed for the pod: "},
	} {
		if got, want := tc.err.Error(), tc.want+ErrNoFit.Error(); got != want || !errors.Is(&tc.err, ErrNoFit) {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
