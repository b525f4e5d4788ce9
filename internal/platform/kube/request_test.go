package kube

import (
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	resourcehelper "k8s.io/component-helpers/resource"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

const gcuMemory accel.Resource = "enflame.com/gcu-memory"

func container(name, amount string) v1.Container {
	c := v1.Container{Name: name}
	if amount != "" {
		list := v1.ResourceList{v1.ResourceName(gcuMemory): resource.MustParse(amount)}
		c.Resources = v1.ResourceRequirements{Limits: list, Requests: list.DeepCopy()}
	}
	return c
}

func sidecar(name, amount string) v1.Container {
	c := container(name, amount)
	c.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
	return c
}

func podSpec(inits, apps []v1.Container) *v1.Pod {
	return &v1.Pod{Spec: v1.PodSpec{InitContainers: inits, Containers: apps}}
}

func TestRequestOf(t *testing.T) {
	limitsOnly := container("c", "3")
	limitsOnly.Resources.Requests = nil
	tests := map[string]struct {
		pod   *v1.Pod
		want  []accel.ContainerRequest
		units accel.Units
	}{
		"nothing asked":      {pod: podSpec(nil, []v1.Container{container("a", "")})},
		"zero is nothing":    {pod: podSpec(nil, []v1.Container{container("a", "0")})},
		"a negative is none": {pod: podSpec(nil, []v1.Container{container("a", "-4")})},
		"containers add up": {
			pod: podSpec(nil, []v1.Container{container("a", "4"), container("idle", ""), container("b", "2")}),
			want: []accel.ContainerRequest{
				{Name: "a", Kind: accel.AppContainer, Units: 4}, {Name: "b", Kind: accel.AppContainer, Units: 2}},
			units: 6,
		},
		"init and sidecar count at their peak": {
			pod: podSpec([]v1.Container{container("i", "9"), sidecar("s", "2"), container("j", "8")}, []v1.Container{container("a", "5")}),
			want: []accel.ContainerRequest{
				{Name: "i", Kind: accel.InitContainer, Units: 9}, {Name: "s", Kind: accel.SidecarContainer, Units: 2},
				{Name: "j", Kind: accel.InitContainer, Units: 8}, {Name: "a", Kind: accel.AppContainer, Units: 5}},
			units: 10,
		},
		"a limit without a request": {
			pod:   podSpec(nil, []v1.Container{limitsOnly}),
			want:  []accel.ContainerRequest{{Name: "c", Kind: accel.AppContainer, Units: 3}},
			units: 3,
		},
		"suffixes": {
			pod:   podSpec(nil, []v1.Container{container("a", "4k")}),
			want:  []accel.ContainerRequest{{Name: "a", Kind: accel.AppContainer, Units: 4000}},
			units: 4000,
		},
		"a fraction is a whole unit": {
			pod:   podSpec(nil, []v1.Container{container("a", "1500m")}),
			want:  []accel.ContainerRequest{{Name: "a", Kind: accel.AppContainer, Units: 2}},
			units: 2,
		},
		"beyond any number": {
			pod: podSpec(nil, []v1.Container{container("a", "9223372036854775807"), container("b", "1e999999999")}),
			want: []accel.ContainerRequest{
				{Name: "a", Kind: accel.AppContainer, Units: accel.MaxUnits}, {Name: "b", Kind: accel.AppContainer, Units: accel.MaxUnits}},
			units: 2 * accel.MaxUnits,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := RequestOf(tt.pod, gcuMemory)
			if diff := cmp.Diff(accel.Request{Resource: gcuMemory, Containers: tt.want}, got); diff != "" {
				t.Errorf("RequestOf (-want +got):\n%s", diff)
			}
			if got.Peak() != tt.units {
				t.Errorf("Peak() = %d, want %d", got.Peak(), tt.units)
			}
			all, err := RequestsOf(tt.pod, []accel.Resource{"other.example/x", gcuMemory})
			if n := len(all); (n == 1) != (tt.units > 0) || n > 1 || err != nil {
				t.Errorf("RequestsOf gave %d requests for %d units, %v", n, tt.units, err)
			}
		})
	}
}

// The ledger and kube-scheduler must agree on every pod, or one of them lets a
// pod through that the other counts differently.
func TestPeakEqualsKubeScheduler(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	amount := func() string { return strconv.Itoa(rng.IntN(12)) }
	for range 2000 {
		var inits, apps []v1.Container
		for i := range rng.IntN(6) {
			if rng.IntN(2) == 0 {
				inits = append(inits, sidecar("s"+strconv.Itoa(i), amount()))
			} else {
				inits = append(inits, container("i"+strconv.Itoa(i), amount()))
			}
		}
		for i := range 1 + rng.IntN(4) {
			apps = append(apps, container("a"+strconv.Itoa(i), amount()))
		}
		pod := podSpec(inits, apps)
		theirs := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})[v1.ResourceName(gcuMemory)]
		if ours := RequestOf(pod, gcuMemory).Peak(); int64(ours) != theirs.Value() {
			t.Fatalf("peak %d, kube-scheduler counts %s for %+v", ours, theirs.String(), RequestOf(pod, gcuMemory))
		}
	}
}
