package claimreview

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"
)

// devices reads the spec.devices of a claim.
func devices(t testing.TB, text string) *resourceapi.DeviceClaim {
	t.Helper()
	var d resourceapi.DeviceClaim
	if err := yaml.UnmarshalStrict([]byte(text), &d); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return &d
}

func claim(t testing.TB, uid, text string) *resourceapi.ResourceClaim {
	t.Helper()
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: uid, UID: types.UID(uid)},
		Spec: resourceapi.ResourceClaimSpec{Devices: *devices(t, text)}}
}

func TestCheckDevices(t *testing.T) {
	amount := func(q string) string {
		return "requests: [{name: m, exactly: {deviceClassName: gcu.enflame.divvy.dev, capacity: {requests: {memory: " + q + "}}}}]"
	}
	tests := map[string]struct{ claim, want string }{
		"memory":                     {amount("10Gi"), ""},
		"one MiB":                    {amount("1Mi"), ""},
		"a whole device":             {"requests: [{name: m, exactly: {deviceClassName: gcu.enflame.divvy.dev}}]", ""},
		"another driver's class":     {strings.ReplaceAll(amount("1"), "gcu.enflame.divvy.dev", "gpu.nvidia.com"), ""},
		"another driver's parameter": {amount("1Gi") + "\nconfig: [{opaque: {driver: gpu.nvidia.com, parameters: {a: b}}}]", ""},
		"no memory": {amount("0"),
			`spec.devices.requests[0].exactly.capacity.requests[memory]: Invalid value: "0": must be at least 1Mi`},
		"less than nothing": {amount(`"-1Gi"`), "must be at least 1Mi"},
		"below the step": {amount("1000Ki"),
			`Invalid value: "1000Ki": must be a multiple of 1Mi (2^20 bytes); the next is 1Mi`},
		"no multiple of the step": {amount("10G"), `must be a multiple of 1Mi (2^20 bytes); the next is 9537Mi`},
		"a fraction of a byte":    {amount("1500m"), "a whole number of MiB"},
		"a number for bytes":      {amount(`"10"`), "the next is 1Mi"},
		"a capacity of no device": {strings.ReplaceAll(amount("1Gi"), "memory", "cores"),
			`requests[0].exactly.capacity.requests[cores]: Unsupported value: "cores": supported values: "memory", "slots"`},
		"the domain of the driver": {strings.ReplaceAll(amount("1"), "memory", "enflame.divvy.dev/memory"),
			`Unsupported value: "enflame.divvy.dev/memory"`},
		"half a slice": {"requests: [{name: m, exactly: {deviceClassName: gcu-slots.enflame.divvy.dev, capacity: {requests: " +
			"{slots: 500m}}}}]", "must be a whole number of time slices"},
		"an alternative": {"requests: [{name: m, firstAvailable: [{name: a, deviceClassName: gpu.nvidia.com}, {name: b, deviceClassName: " +
			"gpu.nvidia.divvy.dev, capacity: {requests: {memory: 1}}}]}]",
			"spec.devices.requests[0].firstAvailable[1].capacity.requests[memory]"},
		"parameters": {amount("1Gi") + "\nconfig: [{opaque: {driver: gpu.nvidia.com, parameters: {}}}, {requests: [m], opaque: {driver: " +
			"enflame.divvy.dev, parameters: {kind: Sharing}}}]",
			"spec.devices.config[1].opaque: Forbidden: driver enflame.divvy.dev takes no parameters; remove this entry"},
		"malformed parameters": {amount("1Gi") + "\nconfig: [{opaque: {driver: nvidia.divvy.dev, parameters: x}}]", "takes no parameters"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := CheckDevices(field.NewPath("spec", "devices"), devices(t, tt.claim))
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %s", err, tt.want)
			}
		})
	}
}

func TestCheckContainers(t *testing.T) {
	known := map[string]*resourceapi.DeviceClaim{
		"gcus": devices(t, "requests: [{name: a, exactly: {deviceClassName: gcu.enflame.divvy.dev}}, {name: b, exactly: {deviceClassName: "+
			"gpu.nvidia.divvy.dev}}]"),
		"either": devices(t,
			"requests: [{name: a, firstAvailable: [{name: x, deviceClassName: net.example.com}, {name: y, deviceClassName: "+
				"drs.enflame.divvy.dev}]}]"),
		"net": devices(t, "requests: [{name: a, exactly: {deviceClassName: net.example.com}}]"),
	}
	with := func(c corev1.Container, claims ...string) corev1.Container {
		for _, claim := range claims {
			name, request, _ := strings.Cut(claim, "/")
			c.Resources.Claims = append(c.Resources.Claims, corev1.ResourceClaim{Name: name, Request: request})
		}
		return c
	}
	units := container("u", string(gcu)+"=1")
	tests := map[string]struct {
		pod  *corev1.Pod
		want string
	}{
		"a claim and units": {podOf(nil, nil, container("log"), with(units, "net", "gcus")),
			"spec.containers[1].resources.claims[1]: Forbidden: container u has both a claim (gcus, class gcu.enflame.divvy.dev) and " +
				"units (enflame.com/gcu-memory) for one device of Enflame; remove one of the two"},
		"in an init container": {podOf(nil, []corev1.Container{with(units, "gcus/a")}, container("main")),
			"spec.initContainers[0].resources.claims[0]"},
		"an alternative":                  {podOf(nil, nil, with(units, "either")), "class drs.enflame.divvy.dev"},
		"a request for another vendor's":  {podOf(nil, nil, with(units, "gcus/b")), ""},
		"another driver's claim":          {podOf(nil, nil, with(units, "net")), ""},
		"in different containers":         {podOf(nil, nil, units, with(container("c"), "gcus")), ""},
		"a claim that does not exist yet": {podOf(nil, nil, with(units, "later")), ""},
		"a claim that the pod lacks":      {podOf(nil, nil, with(units, "absent")), ""},
		"no units":                        {podOf(nil, nil, with(container("u", string(gcu)+"=0"), "gcus")), ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			for _, name := range []string{"gcus", "either", "net", "later"} {
				tt.pod.Spec.ResourceClaims = append(tt.pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: name,
					ResourceClaimName: new(name)})
			}
			err := CheckContainers(tt.pod, testUnits(t),
				func(c corev1.PodResourceClaim) *resourceapi.DeviceClaim { return known[*c.ResourceClaimName] })
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %s", err, tt.want)
			}
		})
	}
}
