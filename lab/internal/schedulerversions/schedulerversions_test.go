package schedulerversions

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	v1of37 "k8s.io/kube-scheduler/config/v1"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	podutil "k8s.io/kubernetes/pkg/api/pod"
	"k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install" // registers pods, their defaults and conversions
	corevalidation "k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/validation"
	v1of29 "scheduler.example/release-1.29/config/v1"
	v1of30 "scheduler.example/release-1.30/config/v1"
	v1of31 "scheduler.example/release-1.31/config/v1"
	v1of32 "scheduler.example/release-1.32/config/v1"
	v1of33 "scheduler.example/release-1.33/config/v1"
	v1of34 "scheduler.example/release-1.34/config/v1"
	v1of35 "scheduler.example/release-1.35/config/v1"
	v1of36 "scheduler.example/release-1.36/config/v1"
	"sigs.k8s.io/yaml"
)

// goldens are the files that internal/install/schedconf's own test compares.
const goldens = "../../../internal/install/schedconf/testdata/golden"

// What each golden file has to hold: the extender of somebody else, if there was
// one, and Divvy's.
const (
	others = "http://127.0.0.1:9998/storage"
	divvys = "https://10.96.0.77:32765/gcushare-scheduler"
)

// versions are the types of each version, by what its kube-scheduler registers.
var versions = map[string]func(*runtime.Scheme) error{
	"1.29": v1of29.AddToScheme,
	"1.30": v1of30.AddToScheme,
	"1.31": v1of31.AddToScheme,
	"1.32": v1of32.AddToScheme,
	"1.33": v1of33.AddToScheme,
	"1.34": v1of34.AddToScheme,
	"1.35": v1of35.AddToScheme,
	"1.36": v1of36.AddToScheme,
	"1.37": v1of37.AddToScheme,
}

// A configuration is what a version understood, by the names of the file's fields.
type configuration struct {
	LeaderElection           struct{ LeaderElect *bool }
	ClientConnection         struct{ Kubeconfig string }
	PercentageOfNodesToScore *int32
	Profiles                 []struct{ SchedulerName string }
	Extenders                []struct {
		URLPrefix, FilterVerb, PreemptVerb, PrioritizeVerb, BindVerb string
		Weight                                                       int64
		EnableHTTPS, NodeCacheCapable, Ignorable                     bool
		TLSConfig                                                    struct {
			ServerName                string
			CAData, CertData, KeyData []byte
		}
		HTTPTimeout      string
		ManagedResources []struct{ Name string }
	}
}

// decode reads a configuration strictly, with the types of a version.
func decode(t *testing.T, add func(*runtime.Scheme) error, data []byte) (configuration, error) {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := add(scheme); err != nil {
		t.Fatal(err)
	}
	var c configuration
	object, _, err := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer().Decode(data, nil, nil)
	if err != nil {
		return c, err
	}
	text, err := json.Marshal(object)
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c, nil
}

// TestEachVersionReadsItsConfiguration has every golden file read by every version.
func TestEachVersionReadsItsConfiguration(t *testing.T) {
	files, err := filepath.Glob(goldens + "/*.config.yaml")
	if err != nil || len(files) < 2 {
		t.Fatalf("golden files %q: %v", files, err)
	}
	for version, add := range versions {
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			t.Run(version+" "+filepath.Base(file), func(t *testing.T) {
				c, err := decode(t, add, data)
				if err != nil {
					t.Fatal(err)
				}
				c.check(t, strings.HasPrefix(filepath.Base(file), "existing."))
			})
			// The decoder would notice a field that is not known, and a version that is
			// not served.
			t.Run(version+" is strict about "+filepath.Base(file), func(t *testing.T) {
				for want, content := range map[string][]byte{
					"unheardOf": append(slices.Clone(data), "unheardOf: 1\n"...),
					"no kind":   bytes.Replace(data, []byte("kubescheduler.config.k8s.io/"), []byte("kubescheduler.config.k8s.io/x"), 1),
				} {
					if _, err := decode(t, add, content); err == nil || !strings.Contains(err.Error(), want) {
						t.Errorf("error %v, want one with %q", err, want)
					}
				}
			})
		}
	}
}

// check compares what a version understood with what was meant.
func (c configuration) check(t *testing.T, existing bool) {
	t.Helper()
	wantURLs, wantProfiles := []string{divvys}, []string(nil)
	if existing {
		wantURLs, wantProfiles = []string{others, divvys}, []string{"default-scheduler", "packed"}
		if p := c.PercentageOfNodesToScore; p == nil || *p != 60 {
			t.Errorf("percentageOfNodesToScore is %v, want 60", p)
		}
	}
	var urls, profiles []string
	for _, e := range c.Extenders {
		urls = append(urls, e.URLPrefix)
	}
	for _, p := range c.Profiles {
		profiles = append(profiles, p.SchedulerName)
	}
	if diff := cmp.Diff(wantURLs, urls); diff != "" {
		t.Fatalf("extenders (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(wantProfiles, profiles); diff != "" {
		t.Errorf("profiles (-want +got):\n%s", diff)
	}
	if le := c.LeaderElection.LeaderElect; le == nil || !*le {
		t.Error("leader election is off")
	}
	if got := c.ClientConnection.Kubeconfig; got != "/etc/kubernetes/scheduler.conf" {
		t.Errorf("kubeconfig is %q", got)
	}
	e := c.Extenders[len(urls)-1]
	if e.FilterVerb != "filter" || e.PreemptVerb != "preempt" || e.PrioritizeVerb != "prioritize" || e.BindVerb != "bind" ||
		e.Weight != 1 ||
		!e.EnableHTTPS || !e.NodeCacheCapable || e.Ignorable {
		t.Errorf("the extender is %+v", e)
	}
	if tls := e.TLSConfig; tls.ServerName != "divvy-extender.divvy-system.svc" ||
		!bytes.Contains(tls.CAData, []byte("BEGIN CERTIFICATE")) ||
		!bytes.Contains(tls.CertData, []byte("BEGIN CERTIFICATE")) || !bytes.Contains(tls.KeyData, []byte("PRIVATE KEY")) {
		t.Errorf("the extender's TLS is %+v", tls)
	}
	if e.HTTPTimeout != "10s" {
		t.Errorf("the extender's timeout is %q", e.HTTPTimeout)
	}
	if len(e.ManagedResources) != 2 || e.ManagedResources[0].Name != "enflame.com/gcu-memory" ||
		e.ManagedResources[1].Name != "nvidia.com/gpu-memory" {
		t.Errorf("the extender's resources are %+v", e.ManagedResources)
	}
}

// TestTheNewestTakesItsConfiguration goes all the way in the newest version:
// strict decoding, defaults and validation, as its kube-scheduler does at its
// start.
func TestTheNewestTakesItsConfiguration(t *testing.T) {
	for _, name := range []string{"plain.config.yaml", "existing.config.yaml"} {
		t.Run(name, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join(goldens, name))
			if err != nil {
				t.Fatal(err)
			}
			object, gvk, err := scheme.Codecs.UniversalDecoder().Decode(data, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			cfg, ok := object.(*config.KubeSchedulerConfiguration)
			if !ok {
				t.Fatalf("decoded as %T", object)
			}
			cfg.APIVersion = gvk.GroupVersion().String()
			if err := validation.ValidateKubeSchedulerConfiguration(cfg); err != nil {
				t.Error(err)
			}
			// The validation would notice an extender that was put in twice.
			cfg.Extenders = append(cfg.Extenders, cfg.Extenders[len(cfg.Extenders)-1])
			if err := validation.ValidateKubeSchedulerConfiguration(cfg); err == nil ||
				!strings.Contains(err.Error(), "only one extender can implement bind") {
				t.Errorf("two binding extenders: %v", err)
			}
		})
	}
}

// TestKubernetesTakesTheManifests has every manifest decoded strictly, given its
// defaults and validated as a pod, and looks up the file that the scheduler is
// told to read through its mounts.
func TestKubernetesTakesTheManifests(t *testing.T) {
	files, err := filepath.Glob(goldens + "/*.manifest.yaml")
	replaced, errReplaced := filepath.Glob(goldens + "/../replaced/*.manifest.yaml")
	if err := errors.Join(err, errReplaced); err != nil || len(files) < 2 || len(replaced) < 6 {
		t.Fatalf("%d and %d manifests: %v", len(files), len(replaced), err)
	}
	files = append(files, replaced...)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var pod corev1.Pod
			if err := yaml.UnmarshalStrict(data, &pod); err != nil {
				t.Fatal(err)
			}
			legacyscheme.Scheme.Default(&pod)
			var internal core.Pod
			if err := legacyscheme.Scheme.Convert(&pod, &internal, nil); err != nil {
				t.Fatal(err)
			}
			options := podutil.GetValidationOptionsFromPodSpecAndMeta(&internal.Spec, nil, &internal.ObjectMeta, nil)
			for _, err := range corevalidation.ValidatePodCreate(&internal, options) {
				t.Error(err)
			}
			var path string
			for _, word := range slices.Concat(pod.Spec.Containers[0].Command, pod.Spec.Containers[0].Args) {
				for _, flag := range []string{"--config=", "--scheduler-config="} {
					if p, ok := strings.CutPrefix(word, flag); ok {
						path = p
					}
				}
			}
			mounted := slices.ContainsFunc(pod.Spec.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.MountPath == path && m.ReadOnly && slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
					return v.Name == m.Name && v.HostPath != nil && v.HostPath.Path == path && *v.HostPath.Type == corev1.HostPathFile
				})
			})
			if !strings.HasPrefix(path, "/etc/kubernetes/scheduler-extender-config") || !mounted {
				t.Errorf("the scheduler reads %q, mounted: %v", path, mounted)
			}
			if pod.Annotations["divvy.dev/scheduler-config-hash"] == "" {
				t.Error("nothing would make kubelet restart the scheduler")
			}
		})
	}
}
