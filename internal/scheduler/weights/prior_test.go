package weights

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/demand"
)

const (
	gcu accel.Resource = "enflame.com/gcu-memory"
	gpu accel.Resource = "nvidia.com/gpu-memory"
)

func TestParseDemand(t *testing.T) {
	kind := func(units accel.Units, devices int, cpu, memory int64, models *accel.Selection, pods float64) demand.Count {
		return demand.Count{Kind: demand.Kind{Units: units, Devices: devices, CPU: cpu, Models: models}, Memory: memory, Pods: pods}
	}
	got, err := ParsePrior(`[
		{"resource":"enflame.com/gcu-memory","units":8,"cpu":"500m","memory":"1.5Gi","share":3},
		{"resource":"enflame.com/gcu-memory","units":32,"devices":2,"cpu":4,"share":0.9},
		{"resource":"enflame.com/gcu-memory","cpu":"2","share":0.1},
		{"resource":"nvidia.com/gpu-memory","units":24,"models":["T4","A10*","T4"],"avoidModels":["A100"],"share":1}]`,
		[]accel.Resource{gcu, gpu})
	if err != nil {
		t.Fatal(err)
	}
	want := map[accel.Resource][]demand.Count{
		gcu: {kind(8, 1, 500, 1536, nil, 750), kind(16, 2, 4000, 0, nil, 225), kind(0, 0, 2000, 0, nil, 25)},
		gpu: {kind(24, 1, 0, 0, &accel.Selection{UseModels: []string{"A10*", "T4"}, AvoidModels: []string{"A100"}}, 1000)},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got, err := ParsePrior(`[{"units":4,"share":9}]`, []accel.Resource{gcu}); err != nil || len(got[gcu]) != 1 ||
		got[gcu][0].Pods != priorPods {
		t.Errorf("the only resource need not be named: %v, %v", got, err)
	}
	if got, err := ParsePrior("", nil); got != nil || err != nil {
		t.Errorf("none: %v, %v", got, err)
	}
}

// Each mistake says in which entry it is, at which key, and what would be right.
func TestParseDemandMistakes(t *testing.T) {
	both := []accel.Resource{gcu, gpu}
	tests := map[string]struct {
		text    string
		managed []accel.Resource // gcu alone when nil
		want    []string
	}{
		"no JSON":       {text: "16", want: []string{`must be a list in JSON, such as [{"units":16,"share":1}]: `}},
		"not an object": {text: `[7]`, want: []string{"entry 1: got number, want an object; valid keys are resource, units"}},
		"unknown key": {text: `[{"units":8,"share":1},{"unit":8}]`,
			want: []string{`entry 2: unknown field "unit"; valid keys are resource, units, devices,`}},
		"no number":  {text: `[{"units":"8","share":1}]`, want: []string{"entry 1: units: got string, want a whole number"}},
		"a fraction": {text: `[{"units":8.5,"share":1}]`, want: []string{"entry 1: units: got number 8.5, want a whole number"}},
		"no list": {text: `[{"units":8,"models":"T4","share":1}]`,
			want: []string{"entry 1: models: got string, want a list of names"}},
		"no share": {text: `[{"units":8}]`, want: []string{"entry 1: share: 0: must be above 0"}},
		"nothing":  {text: `[{"share":1}]`, want: []string{"entry 1: units: empty request; set units, or cpu or memory"}},
		"which resource": {text: `[{"units":8,"share":1}]`, managed: both, want: []string{"entry 1: resource: is required, because " +
			"several resources are managed: enflame.com/gcu-memory, nvidia.com/gpu-memory"}},
		"not managed": {text: `[{"resource":"a.example/b","units":8,"share":1}]`,
			want: []string{`entry 1: resource: "a.example/b" is not managed; managed: enflame.com/gcu-memory`}},
		"indivisible": {text: `[{"units":15,"devices":2,"share":1}]`,
			want: []string{"entry 1: units: 15 cannot be divided equally among 2 devices; use 16"}},
		"no units": {text: `[{"devices":2,"share":1}]`, want: []string{"entry 1: devices: 2 devices without units"}},
		"no amount": {text: `[{"units":8,"cpu":"four","memory":-1,"share":1}]`,
			want: []string{`entry 1: cpu: "four" is not a quantity such as 4 or 500m`,
				"entry 1: memory: -1 is not a quantity such as 16Gi"}},
		"contradiction": {text: `[{"units":8,"models":["T4"],"avoidModels":["t4"],"share":1}]`,
			want: []string{`entry 1: avoidModels: model "T4" is in models, too`}},
		"a bad name": {text: `[{"units":8,"models":["*4"],"share":1}]`,
			want: []string{`entry 1: models: "*4" contains a * that is not at its end`}},
		"several": {text: `[{"units":-1,"share":0},{"units":8,"devices":999,"share":1}]`,
			want: []string{"entry 1: share: 0: must be", "entry 1: units: -1: must be from 0", "entry 2: devices: 999: must be from 1 to"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if tc.managed == nil {
				tc.managed = []accel.Resource{gcu}
			}
			_, err := ParsePrior(tc.text, tc.managed)
			if err == nil {
				t.Fatal("taken")
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(tc.want) {
				t.Fatalf("%d mistakes, want %d:\n%v", len(lines), len(tc.want), err)
			}
			for i, want := range tc.want {
				if !strings.HasPrefix(lines[i], want) {
					t.Errorf("%s\nwant %s", lines[i], want)
				}
			}
		})
	}
}
