package schedulerversions

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	podutil "k8s.io/kubernetes/pkg/api/pod"
	"k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install" // registers pods, their defaults and conversions
	corevalidation "k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"
	"k8s.io/kubernetes/pkg/scheduler/apis/config/validation"
	"sigs.k8s.io/yaml"
)

// goldens are the files that internal/schedconf's own test compares.
const goldens = "../../../internal/schedconf/testdata/golden"

// What each golden file has to hold: the extender of somebody else, if there was
// one, and Divvy's.
const (
	others = "http://127.0.0.1:9998/storage"
	divvys = "https://10.96.0.77:32765/gcushare-scheduler"
)

// generations are the modules, with the versions whose types they have.
var generations = map[string][]string{
	"v1.18": {"1.18"},
	"v1.22": {"1.19", "1.20", "1.21", "1.22"},
	"v1.28": {"1.23", "1.24", "1.25", "1.26", "1.27", "1.28"},
	"v1.37": {"1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37"},
}

// answer is what a program says of a file; see decode.Answer.
type answer struct {
	File, Kind, Error string
	Object            struct {
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
			HTTPTimeout      any
			ManagedResources []struct{ Name string }
		}
	}
}

// build compiles a generation's program. Nothing is added to its go.mod.
func build(t *testing.T, module string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), module)
	cmd := exec.CommandContext(t.Context(), "go", "build", "-mod=readonly", "-buildvcs=false", "-o", program, ".")
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=", "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v in %s: %v\n%s", cmd, module, err, out)
	}
	return program
}

// read lets a program read files as a version does.
func read(t *testing.T, program, version string, files ...string) []answer {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, append([]string{version}, files...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, &stderr)
	}
	var answers []answer
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var a answer
		if err := json.Unmarshal(lines.Bytes(), &a); err != nil {
			t.Fatalf("%v: %v: %s", cmd, err, lines.Text())
		}
		answers = append(answers, a)
	}
	if len(answers) != len(files) {
		t.Fatalf("%v: %d answers to %d files", cmd, len(answers), len(files))
	}
	return answers
}

// TestEachVersionReadsItsConfiguration has every golden file read by the version
// that it was written for.
func TestEachVersionReadsItsConfiguration(t *testing.T) {
	files, err := filepath.Glob(goldens + "/*.config.*")
	if err != nil {
		t.Fatal(err)
	}
	byVersion := map[string][]string{}
	for _, f := range files {
		version, _, _ := strings.Cut(filepath.Base(f), "-")
		byVersion[version] = append(byVersion[version], f)
	}
	for minor := 18; minor <= 37; minor++ {
		if version := fmt.Sprintf("1.%d", minor); byVersion[version] == nil {
			t.Errorf("there is no golden file for %s", version)
		}
	}
	for version := range byVersion {
		has := func(versions []string) bool { return slices.Contains(versions, version) }
		if !slices.ContainsFunc(slices.Collect(maps.Values(generations)), has) {
			t.Errorf("there is no decoder of %s, so that its golden files are not checked", version)
		}
	}
	for module, versions := range generations {
		t.Run(module, func(t *testing.T) {
			t.Parallel()
			program := build(t, module)
			for _, version := range versions {
				for _, a := range read(t, program, version, byVersion[version]...) {
					t.Run(filepath.Base(a.File), func(t *testing.T) { a.check(t, version) })
				}
				t.Run(version+" is strict", func(t *testing.T) { strict(t, program, version, byVersion[version][0]) })
			}
		})
	}
}

// check compares what a version understood with what was meant.
func (a answer) check(t *testing.T, version string) {
	t.Helper()
	if a.Error != "" {
		t.Fatal(a.Error)
	}
	policy := strings.Contains(a.File, "-policy.")
	wantURLs, wantProfiles := []string{divvys}, []string(nil)
	if !strings.Contains(a.File, "-plain.") {
		wantURLs = []string{others, divvys}
	}
	if strings.Contains(a.File, "-existing.") {
		wantProfiles = []string{"default-scheduler", "packed"}
		if p := a.Object.PercentageOfNodesToScore; p == nil || *p != 60 {
			t.Errorf("percentageOfNodesToScore is %v, want 60", p)
		}
	}
	var urls, profiles []string
	for _, e := range a.Object.Extenders {
		urls = append(urls, e.URLPrefix)
	}
	for _, p := range a.Object.Profiles {
		profiles = append(profiles, p.SchedulerName)
	}
	if diff := cmp.Diff(wantURLs, urls); diff != "" {
		t.Fatalf("extenders (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(wantProfiles, profiles); diff != "" {
		t.Errorf("profiles (-want +got):\n%s", diff)
	}
	if le := a.Object.LeaderElection.LeaderElect; !policy && (le == nil || !*le) {
		t.Error("leader election is off")
	}
	if got := a.Object.ClientConnection.Kubeconfig; !policy && got != "/etc/kubernetes/scheduler.conf" {
		t.Errorf("kubeconfig is %q", got)
	}
	e := a.Object.Extenders[len(urls)-1]
	if e.FilterVerb != "filter" || e.PreemptVerb != "preempt" || e.PrioritizeVerb != "prioritize" || e.BindVerb != "bind" || e.Weight != 1 ||
		!e.EnableHTTPS || !e.NodeCacheCapable || e.Ignorable {
		t.Errorf("the extender is %+v", e)
	}
	if tls := e.TLSConfig; tls.ServerName != "divvy-extender.divvy-system.svc" || !bytes.Contains(tls.CAData, []byte("BEGIN CERTIFICATE")) ||
		!bytes.Contains(tls.CertData, []byte("BEGIN CERTIFICATE")) || !bytes.Contains(tls.KeyData, []byte("PRIVATE KEY")) {
		t.Errorf("the extender's TLS is %+v", tls)
	}
	if timeout := fmt.Sprint(e.HTTPTimeout); timeout != "10s" && timeout != "1e+10" {
		t.Errorf("the extender's timeout is %s", timeout)
	}
	if len(e.ManagedResources) != 2 || e.ManagedResources[0].Name != "enflame.com/gcu-memory" || e.ManagedResources[1].Name != "nvidia.com/gpu-memory" {
		t.Errorf("the extender's resources are %+v", e.ManagedResources)
	}
	t.Logf("kube-scheduler %s reads it as %s", version, a.Kind)
}

// strict makes sure that the decoder would notice: a field that is not known, and
// a version that is not served.
func strict(t *testing.T, program, version, golden string) {
	t.Helper()
	data, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	unknown, foreign := filepath.Join(t.TempDir(), "unknown.yaml"), filepath.Join(t.TempDir(), "foreign.yaml")
	for name, content := range map[string][]byte{
		unknown: append(slices.Clone(data), "unheardOf: 1\n"...),
		foreign: bytes.Replace(data, []byte("kubescheduler.config.k8s.io/"), []byte("kubescheduler.config.k8s.io/x"), 1),
	} {
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	answers := read(t, program, version, unknown, foreign)
	for i, want := range []string{"unheardOf", "no kind"} {
		if !strings.Contains(answers[i].Error, want) {
			t.Errorf("%s: error %q, want one with %q", filepath.Base(answers[i].File), answers[i].Error, want)
		}
	}
}

// TestTheNewestTakesItsConfiguration goes all the way in the newest version:
// strict decoding, defaults and validation, as its kube-scheduler does at its
// start.
func TestTheNewestTakesItsConfiguration(t *testing.T) {
	for _, name := range []string{"1.37-plain.config.yaml", "1.37-existing.config.yaml"} {
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
			if err := validation.ValidateKubeSchedulerConfiguration(cfg); err == nil || !strings.Contains(err.Error(), "only one extender can implement bind") {
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
	if err != nil || len(files) < 40 {
		t.Fatalf("%d manifests: %v", len(files), err)
	}
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
			want := "--config="
			if strings.Contains(file, "-policy.") {
				want = "--policy-config-file="
			}
			var path string
			for _, word := range pod.Spec.Containers[0].Command {
				if p, ok := strings.CutPrefix(word, want); ok {
					path = p
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
