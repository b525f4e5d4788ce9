package admission

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// The whole of section 4.3 of the guide, for the pod of section 4.1.
func TestGuidePodIsConvertedAsTheGuideShows(t *testing.T) {
	t.Parallel()
	converted, warnings := convert(t, guidePod())
	if len(warnings) > 0 {
		t.Errorf("warnings: %q", warnings)
	}
	empty := func(name string) corev1.Volume {
		return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}
	}
	secret := func(name, from, key, to string) corev1.Volume {
		return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
			SecretName: from, Items: []corev1.KeyToPath{{Key: key, Path: to, Mode: ptr.To[int32](0o444)}},
		}}}
	}
	want := guidePod()
	want.Annotations["auto-management/status"] = "injected"
	want.Labels = map[string]string{"divvy.dev/pool": "true"}
	want.Spec.Volumes = append(want.Spec.Volumes,
		empty("bitfusion-distro"), empty("bitfusion-opt"), empty("client-dir"),
		secret("ca", "bitfusion-client-secret-ca.crt", "ca.crt", "tls/ca.crt"),
		secret("client-from-secret", "bitfusion-client-secret-client.yml", "client.yaml", "client.yaml"),
		secret("servers-from-secret", "bitfusion-client-secret-servers.conf", "servers.conf", "servers.conf"))
	c := &want.Spec.Containers[0]
	c.Command = []string{"/bin/bash", "-c", binary450 + " run -n 1 -p 0.500000  -- python " +
		"/benchmark/scripts/tf_cnn_benchmarks/tf_cnn_benchmarks.py --local_parameter_device=gpu --batch_size=32 --model=inception3"}
	c.Resources = asking("bitfusion.io/gpu", "50")
	c.Env = []corev1.EnvVar{{Name: "LD_LIBRARY_PATH", Value: libraries450}, {Name: "DIVVY_POOL_CLIENT", Value: binary450}}
	c.VolumeMounts = append(c.VolumeMounts,
		corev1.VolumeMount{MountPath: "/etc/bitfusion/tls/ca.crt", Name: "ca", SubPath: "tls/ca.crt"},
		corev1.VolumeMount{MountPath: "/root/.bitfusion/client.yaml", Name: "client-dir", SubPath: "client.yaml"},
		corev1.VolumeMount{MountPath: "/etc/bitfusion/servers.conf", Name: "client-dir", SubPath: "servers.conf"},
		corev1.VolumeMount{MountPath: "/bitfusion", Name: "bitfusion-distro"},
		corev1.VolumeMount{MountPath: "/opt/bitfusion", Name: "bitfusion-opt"})
	want.Spec.InitContainers = []corev1.Container{{
		Name: "populate", Image: clientImage, ImagePullPolicy: corev1.PullIfNotPresent,
		Command: []string{"/bin/bash", "-c", " cp -rf " + root450 + " /bitfusion-distro/ && cp -f /root/.bitfusion/client.yaml /client" +
			" && (umask 0 && : > /client/servers.conf) && cp /root/.bitfusion/servers.conf /client" +
			" && cp -rf " + root450 + "/opt/bitfusion/* /workload-container-opt "},
		SecurityContext: &corev1.SecurityContext{
			AllowPrivilegeEscalation: ptr.To(false),
			Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
		VolumeMounts: []corev1.VolumeMount{
			{MountPath: "/bitfusion-distro", Name: "bitfusion-distro"},
			{MountPath: "/client", Name: "client-dir"},
			{MountPath: "/root/.bitfusion/client.yaml", Name: "client-from-secret", SubPath: "client.yaml"},
			{MountPath: "/root/.bitfusion/servers.conf", Name: "servers-from-secret", SubPath: "servers.conf"},
			{MountPath: "/workload-container-opt", Name: "bitfusion-opt"},
		},
	}}
	if diff := cmp.Diff(want, converted); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// Units of whole pods: W16 (all of the memory is allowed), W17 and W18 (exact
// arithmetic), W14 (a setting that is not there denies and no more).
func TestRequestsBecomeUnits(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		limits []string
		totals int64
		units  string
		denied []string
	}{
		"percent":                {limits: []string{pool.AmountResource, "1", pool.PercentResource, "50"}, units: "50"},
		"amount alone":           {limits: []string{pool.AmountResource, "2"}, units: "200"},
		"memory":                 {limits: []string{pool.AmountResource, "1", pool.MemoryResource, "8000M"}, units: "50"},
		"W16: all of the memory": {limits: []string{pool.AmountResource, "1", pool.MemoryResource, "16000M"}, units: "100"},
		"W17: exact":             {limits: []string{pool.AmountResource, "1", pool.MemoryResource, "1120M"}, units: "7"},
		"W18: a byte more":       {limits: []string{pool.AmountResource, "1", pool.MemoryResource, "1120000001"}, units: "8"},
		"W14: no setting": {limits: []string{pool.AmountResource, "1", pool.MemoryResource, "4000M"}, totals: -1,
			denied: []string{pool.MemoryResource, "4G", "TOTAL_GPU_MEMORY"}},
		"W19: a fraction of a GPU": {limits: []string{pool.AmountResource, "1500m"}, denied: []string{pool.AmountResource,
			"1500m", "whole"}},
		"W19: a fraction of a percent": {limits: []string{pool.AmountResource, "1", pool.PercentResource, "500m"},
			denied: []string{pool.PercentResource, "500m", "1 to 100"}},
		"W20: percent alone": {limits: []string{pool.PercentResource, "50"}, denied: []string{pool.AmountResource, "missing"}},
		"W20: memory alone":  {limits: []string{pool.MemoryResource, "1G"}, denied: []string{pool.AmountResource, "missing"}},
		"W20: no GPU":        {limits: []string{pool.AmountResource, "0"}, denied: []string{pool.AmountResource, "0"}},
		"W21: percent and memory": {limits: []string{pool.AmountResource, "1", pool.PercentResource, "10", pool.MemoryResource,
			"5001M"}, denied: []string{pool.PercentResource, pool.MemoryResource, "exclude"}},
		"V5: percent beyond": {limits: []string{pool.AmountResource, "1", pool.PercentResource, "101"},
			denied: []string{pool.PercentResource, "101", "1 to 100"}},
		"V5: memory beyond": {limits: []string{pool.AmountResource, "1", pool.MemoryResource, "16001M"},
			denied: []string{pool.MemoryResource, "16001M"}},
		"V5: a misspelt key": {limits: []string{pool.AmountResource, "1", "bitfusion.io/gpu-percnt", "10"},
			denied: []string{"bitfusion.io/gpu-percnt"}},
		"units by hand": {limits: []string{pool.AmountResource, "1", pool.Resource, "10"}, denied: []string{pool.Resource}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testSettings()
			if test.totals < 0 {
				s.TotalMemoryMB = 0
			}
			pod := poolPod(container("train", asking(test.limits...), pythonX))
			if test.denied != nil {
				denial := deniedWith(t, pod, pool.DefaultCatalog(), s, append(test.denied, `container "train"`)...)
				if denial.Forbidden {
					t.Error("what is wrong with the pod is no matter of permission")
				}
				return
			}
			converted, _ := convertWith(t, pod, pool.DefaultCatalog(), s)
			want := map[string]string{"limits.bitfusion.io/gpu": test.units, "requests.bitfusion.io/gpu": test.units}
			if diff := cmp.Diff(want, resourcesOf(converted.Spec.Containers[0])); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// W1: GPU containers anywhere and in any number are converted, each by its own
// request. W2: other containers, with a command or not, are not touched. W11:
// containers without a command are converted too when their entrypoint is told.
func TestContainersAreConvertedEachOnItsOwn(t *testing.T) {
	t.Parallel()
	none := corev1.ResourceRequirements{}
	tests := map[string]struct {
		pod  *corev1.Pod
		want map[string]string // units by container
	}{
		"one":          {poolPod(container("a", half(), pythonX)), map[string]string{"a": "50"}},
		"W1: the last": {poolPod(container("log", none, "tail", "-f"), container("a", half(), pythonX)), map[string]string{"a": "50"}},
		"W1: the middle": {poolPod(container("log", none), container("a", half(), pythonX), container("web", none, "httpd")),
			map[string]string{"a": "50"}},
		"W1: two": {poolPod(container("a", half(), pythonX), container("b", asking(pool.AmountResource, "2"), "python", "y.py")),
			map[string]string{"a": "50", "b": "200"}},
		"W2: with commands": {poolPod(container("a", half(), pythonX), container("log", none, "/bin/sh", "-c", "tail -f /log")),
			map[string]string{"a": "50"}},
		"W11: by entrypoint": {annotated(poolPod(container("a", half()), container("b", half(), pythonX)), pool.EntrypointAnnotation,
			`["/entrypoint.sh"]`),
			map[string]string{"a": "50", "b": "50"}},
		"a sidecar": {initsOf(poolPod(container("a", none)), sidecar(container("gpu", half(), "serve"))),
			map[string]string{"gpu": "50"}},
		"an init container": {initsOf(poolPod(container("a", half(), pythonX)), container("warm", asking(pool.AmountResource, "1"),
			"warm")), map[string]string{"a": "50", "warm": "100"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			converted, _ := convert(t, test.pod)
			got := map[string]string{}
			for _, c := range containers(converted) {
				if q, ok := c.Resources.Limits[pool.Resource]; ok {
					got[c.Name] = q.String()
					if !strings.Contains(strings.Join(c.Command, " "), binary450+" run -n ") {
						t.Errorf("%s does not call the client: %q", c.Name, c.Command)
					}
					if mountOf(*c, pool.MountPath) == nil {
						t.Errorf("%s has no client", c.Name)
					}
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if asks(converted) {
				t.Error("raw keys are left")
			}
		})
	}
}

// W11: a container without a command and without a known entrypoint is refused
// with what to add, in mode all; in mode injection nothing is needed.
func TestContainerWithoutCommand(t *testing.T) {
	t.Parallel()
	argsOnly := func() *corev1.Pod {
		pod := poolPod(container("train", half()))
		pod.Spec.Containers[0].Args = []string{"--epochs", "3"}
		return pod
	}
	denied(t, argsOnly(), `container "train"`, "no command", pool.EntrypointAnnotation)
	denied(t, annotated(argsOnly(), pool.EntrypointAnnotation, `{"other": ["/x"]}`), `container "train"`, pool.EntrypointAnnotation)

	converted, _ := convert(t, annotated(argsOnly(), pool.EntrypointAnnotation, `{"train": ["/entrypoint.sh", "-v"]}`))
	want := []string{"/bin/bash", "-c", binary450 + " run -n 1 -p 0.500000  -- /entrypoint.sh -v --epochs 3"}
	if c := converted.Spec.Containers[0]; !slices.Equal(c.Command, want) || len(c.Args) > 0 {
		t.Errorf("command %q, args %q, want %q", c.Command, c.Args, want)
	}

	converted, _ = convert(t, annotated(argsOnly(), pool.ModeAnnotation, "injection"))
	if c := converted.Spec.Containers[0]; len(c.Command) > 0 || !slices.Equal(c.Args, []string{"--epochs", "3"}) {
		t.Errorf("command %q, args %q: want them as they were", c.Command, c.Args)
	}

	for name, value := range map[string]string{
		"no JSON": "/entrypoint.sh", "null": "null", "a number": "[1]", "an empty list": "[]", "an empty word": `[""]`,
		"an empty object": `{"train": []}`, "text by container": `{"train": "x"}`, "cut off": `["x"`, "more behind": `["x"] y`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			denied(t, annotated(argsOnly(), pool.EntrypointAnnotation, value), pool.EntrypointAnnotation, "JSON list")
		})
	}
}

// W3: the init container is added to those that are there, before the first that
// uses the pool.
func TestPopulateStandsBeforeThoseThatNeedIt(t *testing.T) {
	t.Parallel()
	none := corev1.ResourceRequirements{}
	plain, mesh := container("fetch", none, "fetch"), sidecar(container("mesh", none))
	tests := map[string]struct {
		inits []corev1.Container
		want  []string
	}{
		"alone":            {nil, []string{"populate"}},
		"W3: after others": {[]corev1.Container{plain, mesh}, []string{"fetch", "mesh", "populate"}},
		"before an init container that asks": {[]corev1.Container{plain, container("warm", half(), "warm"), mesh},
			[]string{"fetch", "populate", "warm", "mesh"}},
		"before a sidecar that asks": {[]corev1.Container{sidecar(container("gpu", half(), "serve")), plain},
			[]string{"populate", "gpu", "fetch"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			converted, _ := convert(t, initsOf(poolPod(container("a", half(), pythonX)), test.inits...))
			if got := initNames(converted); !slices.Equal(got, test.want) {
				t.Errorf("init containers %q, want %q", got, test.want)
			}
		})
	}
}

// W4: everything that a user wrote stays. W23: another value of the status is
// replaced.
func TestAnnotationsAndLabelsAreKept(t *testing.T) {
	t.Parallel()
	pod := annotated(guidePod(), "example.com/a~b/c", "x", "sidecar.istio.io/inject", "true", pool.StatusAnnotation, "something")
	pod.Labels = map[string]string{"app": "share-gpu"}
	converted, _ := convert(t, pod)
	want := maps.Clone(pod.Annotations)
	want[pool.StatusAnnotation] = pool.StatusInjected
	if diff := cmp.Diff(want, converted.Annotations); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{"app": "share-gpu", pool.ConvertedLabel: "true"}, converted.Labels); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// W5: the mode is of one pod; W6: nothing is shared that is written. Run with the
// race detector.
func TestPodsAreConvertedAtTheSameTime(t *testing.T) {
	t.Parallel()
	catalog, settings := pool.DefaultCatalog(), testSettings()
	shared := annotated(guidePod(), pool.ModeAnnotation, "injection")
	shared.Spec.Containers[0].Resources = asking(pool.AmountResource, "1", "cpu", "1", "memory", "1Gi")
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for j := range 50 {
				cpu := fmt.Sprint(i*50 + j + 1)
				pod := poolPod(container("a", asking(pool.AmountResource, "1", "cpu", cpu), pythonX))
				converted, _, err := Mutate(pod, testNamespace, catalog, settings)
				if err != nil {
					t.Error(err)
					return
				}
				if c := converted.Spec.Containers[0]; c.Command[0] != "/bin/bash" {
					t.Errorf("mode all left command %q", c.Command)
				}
				if got := converted.Spec.InitContainers[0].Resources.Limits.Cpu().String(); got != cpu {
					t.Errorf("populate has the limit %s of another pod, want %s", got, cpu)
				}
				injected, _, err := Mutate(shared, testNamespace, catalog, settings)
				if err != nil {
					t.Error(err)
					return
				}
				if c := injected.Spec.Containers[0]; !slices.Equal(c.Command, shared.Spec.Containers[0].Command) {
					t.Errorf("mode injection changed the command to %q", c.Command)
				}
			}
		})
	}
	all.Wait()
}

// W15: requests without limits.
func TestRequestsWithoutLimits(t *testing.T) {
	t.Parallel()
	pod := poolPod(container("a", corev1.ResourceRequirements{Requests: quantities(pool.AmountResource, "1", "cpu", "1")}, pythonX))
	converted, _ := convert(t, pod)
	want := map[string]string{"limits.bitfusion.io/gpu": "100", "requests.bitfusion.io/gpu": "100", "requests.cpu": "1"}
	if diff := cmp.Diff(want, resourcesOf(converted.Spec.Containers[0])); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	different := poolPod(container("a", corev1.ResourceRequirements{
		Requests: quantities(pool.AmountResource, "1"), Limits: quantities(pool.AmountResource, "2"),
	}, pythonX))
	denied(t, different, `container "a"`, pool.AmountResource, "differ")
}

// W22: a pod that asks is never let through as it is, and learns what to add.
func TestPodWithoutVersionOrOS(t *testing.T) {
	t.Parallel()
	catalog := &pool.Catalog{Clients: pool.DefaultCatalog().Clients}
	s := testSettings()
	deniedWith(t, annotated(guidePod(), pool.OSAnnotation, "-"), catalog, s, pool.OSAnnotation)
	deniedWith(t, annotated(guidePod(), pool.VersionAnnotation, "-"), catalog, s, pool.VersionAnnotation)
	deniedWith(t, annotated(guidePod(), pool.VersionAnnotation, "999"), catalog, s, pool.VersionAnnotation, "999", "450")

	defaults := &pool.Catalog{Clients: catalog.Clients, DefaultOS: "ubuntu18", DefaultVersion: "450"}
	converted, _ := convertWith(t, annotated(guidePod(), pool.OSAnnotation, "-", pool.VersionAnnotation, "-"), defaults, s)
	mentions(t, converted.Spec.Containers[0].Command[2], binary450)
}

// Nobody who asks for nothing is bothered, and nobody who mistypes the mode is
// left alone (V5).
func TestModes(t *testing.T) {
	t.Parallel()
	for _, value := range []string{"all", "ALL", "y", "yes", "true", "on", "On"} {
		converted, _ := convert(t, annotated(guidePod(), pool.ModeAnnotation, value))
		if c := converted.Spec.Containers[0]; c.Command[0] != "/bin/bash" {
			t.Errorf("mode %q: command %q", value, c.Command)
		}
	}
	for _, value := range []string{"injection", "INJECTION"} {
		pod := annotated(guidePod(), pool.ModeAnnotation, value)
		converted, _ := convert(t, pod)
		c := converted.Spec.Containers[0]
		if !slices.Equal(c.Command, pod.Spec.Containers[0].Command) {
			t.Errorf("mode %q: command %q", value, c.Command)
		}
		if !slices.Contains(c.Env, corev1.EnvVar{Name: pool.ClientVariable, Value: binary450}) { // W28: how else would users know?
			t.Errorf("mode %q: env %v does not tell where the client is", value, c.Env)
		}
	}
	for _, value := range []string{"none", "n", "no", "false", "off", "", "-"} {
		pod := annotated(guidePod(), pool.ModeAnnotation, value)
		converted, warnings, err := Mutate(pod, testNamespace, pool.DefaultCatalog(), testSettings())
		if converted != pod || len(warnings) > 0 || err != nil {
			t.Errorf("mode %q: %v, %q, %v", value, converted, warnings, err)
		}
	}
	for _, value := range []string{"injecton", "alle", "1"} {
		denied(t, annotated(guidePod(), pool.ModeAnnotation, value), pool.ModeAnnotation, value, "injection")
		denied(t, annotated(poolPod(container("a", corev1.ResourceRequirements{})), pool.ModeAnnotation, value), pool.ModeAnnotation, value)
	}
	for _, value := range []string{"all", "injection"} {
		pod := annotated(poolPod(container("a", asking("cpu", "1"), pythonX)), pool.ModeAnnotation, value)
		converted, warnings := convert(t, pod)
		if converted != pod || len(warnings) != 1 {
			t.Errorf("mode %q without a request: converted %v, warnings %q", value, converted != pod, warnings)
		}
	}
}

// A filter that is not used is told of.
func TestFilterInModeInjection(t *testing.T) {
	t.Parallel()
	_, warnings := convert(t, annotated(guidePod(), pool.ModeAnnotation, "injection", pool.FilterAnnotation, "server.hostname=bf"))
	if len(warnings) != 1 || !strings.Contains(warnings[0], pool.FilterAnnotation) {
		t.Errorf("warnings %q", warnings)
	}
	converted, warnings := convert(t, annotated(guidePod(), pool.FilterAnnotation, "server.hostname=bf"))
	if len(warnings) > 0 {
		t.Errorf("warnings %q", warnings)
	}
	mentions(t, converted.Spec.Containers[0].Command[2], " --filter server.hostname=bf ")
	denied(t, annotated(guidePod(), pool.FilterAnnotation, "a=b;id"), pool.FilterAnnotation, "a=b;id")
}

// W24: what counts is the namespace of the request.
func TestNamespaceIsThatOfTheRequest(t *testing.T) {
	t.Parallel()
	pod := guidePod()
	pod.Namespace = "kube-system"
	if converted, _, err := Mutate(pod, testNamespace, pool.DefaultCatalog(), testSettings()); err != nil || converted == pod {
		t.Errorf("the object's namespace counted: %v", err)
	}
	pod.Namespace = ""
	if converted, _, err := Mutate(pod, "kube-system", pool.DefaultCatalog(), testSettings()); err != nil || converted != pod {
		t.Errorf("the request's namespace did not count: %v", err)
	}
}

// W25: catalogs of any shape.
func TestClientWithoutLibrariesOrOpt(t *testing.T) {
	t.Parallel()
	catalog := &pool.Catalog{Clients: []pool.Client{{
		Version: "1", OS: "any", Image: "example.com/client:1", Root: "/bitfusion/other/it's 1",
		Binary:  "/bitfusion/other/it's 1/bin/100%/run",
		Command: pool.CommandForm{Percent: []string{"-g", "${amount}"}, Separator: []string{"--"}},
	}}}
	pod := annotated(guidePod(), pool.VersionAnnotation, "1", pool.OSAnnotation, "any")
	pod.Spec.Containers[0].Command = []string{"python", "x.py"}
	converted, _ := convertWith(t, pod, catalog, testSettings())
	populate, c := converted.Spec.InitContainers[0], converted.Spec.Containers[0]
	if populate.Image != "example.com/client:1" {
		t.Errorf("image %q", populate.Image)
	}
	mentions(t, populate.Command[2],
		" mkdir -p /bitfusion-distro/other && cp -rf '/bitfusion/other/it'\\''s 1' /bitfusion-distro/other/ && ")
	if strings.Contains(populate.Command[2], "opt") || mountOf(c, pool.OptPath) != nil || findVolume(converted, optVolume) != nil {
		t.Error("a client without OptSource has /opt/bitfusion")
	}
	// W26: a path is no format.
	if want := []string{"/bitfusion/other/it's 1/bin/100%/run", "-g", "1", "--", "python", "x.py"}; !slices.Equal(c.Command, want) {
		t.Errorf("command %q, want %q", c.Command, want)
	}
	if slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == libraryPathVariable }) {
		t.Errorf("env %v", c.Env)
	}
}

func TestClientWithoutImage(t *testing.T) {
	t.Parallel()
	s := testSettings()
	s.ClientImage = ""
	if denial := deniedWith(t, guidePod(), pool.DefaultCatalog(), s, "administrator", "pool.client.image"); !denial.Forbidden {
		t.Error("this is not the user's mistake")
	}
}

// The client of the first guide has its token in one secret.
func TestSingleSecret(t *testing.T) {
	t.Parallel()
	converted, _ := convert(t, annotated(guidePod(), pool.VersionAnnotation, "250"))
	if diff := cmp.Diff([]string{pool.SingleSecret}, Secrets(converted)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	var keys []string
	for _, v := range converted.Spec.Volumes {
		if v.Secret != nil {
			keys = append(keys, v.Secret.Items[0].Key)
		}
	}
	if diff := cmp.Diff([]string{"ca.crt", "client.yaml", "servers.conf"}, keys); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// W27: other members of resources are not dropped.
func TestOtherResourcesAreKept(t *testing.T) {
	t.Parallel()
	r := asking(pool.AmountResource, "1", "cpu", "2", "example.com/nic", "1")
	r.Claims = []corev1.ResourceClaim{{Name: "claim"}}
	converted, _ := convert(t, poolPod(container("a", r, pythonX)))
	got := converted.Spec.Containers[0].Resources
	if diff := cmp.Diff(r.Claims, got.Claims); diff != "" {
		t.Errorf("claims:\n%s", diff)
	}
	want := asking(pool.Resource, "100", "cpu", "2", "example.com/nic", "1")
	if diff := cmp.Diff(want.Limits, got.Limits); diff != "" {
		t.Errorf("limits:\n%s", diff)
	}
}

// W28: no value is lost and no working directory comes in.
func TestLibraryPath(t *testing.T) {
	t.Parallel()
	from := &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{
		LocalObjectReference: corev1.LocalObjectReference{Name: "paths"}, Key: "lib"}}
	entry := func(value string) corev1.EnvVar { return corev1.EnvVar{Name: "LD_LIBRARY_PATH", Value: value} }
	fromEntry := corev1.EnvVar{Name: "LD_LIBRARY_PATH", ValueFrom: from}
	client := corev1.EnvVar{Name: "DIVVY_POOL_CLIENT", Value: binary450}
	other := corev1.EnvVar{Name: "A", Value: "b"}
	tests := map[string]struct{ env, want []corev1.EnvVar }{
		"none":   {nil, []corev1.EnvVar{entry(libraries450), client}},
		"others": {[]corev1.EnvVar{other}, []corev1.EnvVar{other, entry(libraries450), client}},
		"a value": {[]corev1.EnvVar{entry("/usr/local/lib"), other}, []corev1.EnvVar{entry(libraries450 + ":/usr/local/lib"), other,
			client}},
		"an empty one": {[]corev1.EnvVar{entry("")}, []corev1.EnvVar{entry(libraries450), client}},
		"twice":        {[]corev1.EnvVar{entry("/a"), entry("/b")}, []corev1.EnvVar{entry("/a"), entry(libraries450 + ":/b"), client}},
		"ours already": {[]corev1.EnvVar{entry(libraries450 + ":/b")}, []corev1.EnvVar{entry(libraries450 + ":/b"), client}},
		"by a source": {[]corev1.EnvVar{fromEntry, other}, []corev1.EnvVar{fromEntry, other, entry(libraries450 + ":$(LD_LIBRARY_PATH)"),
			client}},
		"the variable": {[]corev1.EnvVar{{Name: "DIVVY_POOL_CLIENT", Value: "own"}},
			[]corev1.EnvVar{{Name: "DIVVY_POOL_CLIENT", Value: "own"}, entry(libraries450)}},
		"value, source": {[]corev1.EnvVar{entry("/a"), fromEntry}, []corev1.EnvVar{entry("/a"), fromEntry,
			entry(libraries450 + ":$(LD_LIBRARY_PATH)"), client}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pod := guidePod()
			pod.Spec.Containers[0].Env = test.env
			converted, _ := convert(t, pod)
			if diff := cmp.Diff(test.want, converted.Spec.Containers[0].Env); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// W30: the status, written by a user, is no way round.
func TestStatusWrittenByUserIsNoWayRound(t *testing.T) {
	t.Parallel()
	for _, value := range []string{"injected", "INJECTED"} {
		converted, _ := convert(t, annotated(guidePod(), pool.StatusAnnotation, value))
		if asks(converted) {
			t.Errorf("status %q: the pod was not converted", value)
		}
	}
}

// A container that another webhook adds after the first run is converted, and
// nothing else is changed.
func TestReinvocation(t *testing.T) {
	t.Parallel()
	first, _ := convert(t, initsOf(guidePod(), container("fetch", corev1.ResourceRequirements{}, "fetch")))
	// What the API server fills in between, and another webhook's doings.
	first.Spec.Volumes[2].Secret = nil
	for i := range first.Spec.Volumes {
		if s := first.Spec.Volumes[i].Secret; s != nil {
			s.DefaultMode = ptr.To[int32](0o644)
		}
	}
	first.Spec.InitContainers[1].TerminationMessagePath = "/dev/termination-log"
	first.Spec.InitContainers[1].Image = "mirror.example/" + first.Spec.InitContainers[1].Image
	second := first.DeepCopy()
	second.Spec.Containers = append(second.Spec.Containers, container("added", asking(pool.AmountResource, "1"), "python", "y.py"))
	second.Spec.InitContainers = append([]corev1.Container{sidecar(container("proxy", half(), "proxy"))}, second.Spec.InitContainers...)

	converted, _ := convert(t, second)
	if got, want := initNames(converted), []string{"populate", "proxy", "fetch"}; !slices.Equal(got, want) {
		t.Errorf("init containers %q, want %q", got, want)
	}
	if diff := cmp.Diff(first.Spec.InitContainers[1], converted.Spec.InitContainers[0]); diff != "" {
		t.Errorf("populate was changed:\n%s", diff)
	}
	if diff := cmp.Diff(first.Spec.Containers[0], converted.Spec.Containers[0]); diff != "" {
		t.Errorf("the container of the first run was changed:\n%s", diff)
	}
	if diff := cmp.Diff(first.Spec.Volumes, converted.Spec.Volumes); diff != "" {
		t.Errorf("volumes were changed:\n%s", diff)
	}
	if q := converted.Spec.Containers[1].Resources.Limits[pool.Resource]; q.Value() != 100 {
		t.Errorf("the added container takes %s", q.String())
	}
	if m := mountOf(converted.Spec.Containers[1], pool.MountPath); m == nil || m.Name != distroVolume {
		t.Errorf("the added container has mount %v", m)
	}
}

// All problems are told at once, each with its container.
func TestAllProblemsAreTold(t *testing.T) {
	t.Parallel()
	pod := annotated(poolPod(
		container("a", asking(pool.AmountResource, "0"), pythonX),
		container("b", asking(pool.AmountResource, "1", pool.PercentResource, "0"), pythonX),
	), pool.VersionAnnotation, "999", pool.FilterAnnotation, "nonsense")
	denial := denied(t, pod, `container "a": `+pool.AmountResource, `container "b": `+pool.PercentResource, "999", "nonsense")
	if len(denial.Problems) != 4 {
		t.Errorf("%d problems: %q", len(denial.Problems), denial.Problems)
	}
	many := &Denial{Problems: slices.Repeat([]string{"x"}, 1000)}
	if text := many.Error(); len(text) > 100 || !strings.Contains(text, "990 more") {
		t.Errorf("1000 problems: %q", text)
	}
}

func TestPodsThatCannotUseThePool(t *testing.T) {
	t.Parallel()
	windows := guidePod()
	windows.Spec.OS = &corev1.PodOS{Name: corev1.Windows}
	denied(t, windows, "Windows")
	selected := guidePod()
	selected.Spec.NodeSelector = map[string]string{"kubernetes.io/os": "windows"}
	denied(t, selected, "Windows")
	for _, shared := range []bool{true, false} {
		hostProcess := guidePod()
		options := &corev1.WindowsSecurityContextOptions{HostProcess: ptr.To(true)}
		if shared {
			hostProcess.Spec.SecurityContext = &corev1.PodSecurityContext{WindowsOptions: options}
		} else {
			hostProcess.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{WindowsOptions: options}
		}
		denied(t, hostProcess, "Windows")
	}
	denied(t, annotated(guidePod(), corev1.MirrorPodAnnotationKey, "x"), "static")
}

// A command that calls the client is left alone and told of.
func TestCommandThatCallsTheClient(t *testing.T) {
	t.Parallel()
	pod := guidePod()
	pod.Spec.Containers[0].Command = []string{"bitfusion run -n 1 -p 0.5 -- python x.py"}
	converted, warnings := convert(t, pod)
	if !slices.Equal(converted.Spec.Containers[0].Command, pod.Spec.Containers[0].Command) {
		t.Errorf("command %q", converted.Spec.Containers[0].Command)
	}
	if len(warnings) != 1 || !strings.Contains(warnings[0], `container "bf-pkgs"`) {
		t.Errorf("warnings %q", warnings)
	}
}

// An object of a template has no name yet.
func TestPodWithGeneratedName(t *testing.T) {
	t.Parallel()
	pod := guidePod()
	pod.ObjectMeta = metav1.ObjectMeta{GenerateName: "bf-job-", Annotations: pod.Annotations}
	if converted, _ := convert(t, pod); converted.Name != "" || converted.GenerateName != "bf-job-" {
		t.Errorf("names %q %q", converted.Name, converted.GenerateName)
	}
}
