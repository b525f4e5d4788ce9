package wire

import (
	"slices"
	"testing"
)

func TestOwnedLabels(t *testing.T) {
	tests := map[string]struct {
		annotation string
		want       []string
	}{
		"none": {"", nil},
		"some": {"divvy.dev/nvidia.count,nvidia.com/gpu.present",
			[]string{"divvy.dev/nvidia.count", "nvidia.com/gpu.present"}},
		"empty entries":              {",a,,b,", []string{"a", "b"}},
		"labels of Kubernetes":       {"kubernetes.io/hostname,node-role.kubernetes.io/control-plane,k8s.io/x,a.k8s.io/y,a", []string{"a"}},
		"a name that sounds like it": {"notkubernetes.io/x", []string{"notkubernetes.io/x"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := OwnedLabels(tc.annotation); !slices.Equal(got, tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestCountedResources(t *testing.T) {
	if got, want := CountedResources("enflame.com/gcu-count,,nvidia.com/n"),
		[]string{"enflame.com/gcu-count", "nvidia.com/n"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := CountedResources(""); got != nil {
		t.Errorf("got %q of nothing", got)
	}
}
