package cluster

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pelletier/go-toml/v2"
	"k8s.io/apiserver/pkg/apis/audit"
	auditpolicy "k8s.io/apiserver/pkg/audit/policy"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/tools/clientcmd"
	proxyv1alpha1 "k8s.io/kube-proxy/config/v1alpha1"
	kubeletv1beta1 "k8s.io/kubelet/config/v1beta1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/image"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/pki"
)

const (
	testBin = "/cache/bin"
	testIP  = "192.0.2.2"
)

func rendered(t *testing.T, name string) []byte {
	t.Helper()
	files, err := renderAll(newValues(testBin, testIP))
	if err != nil {
		t.Fatal(err)
	}
	data, ok := files[configPath(name)]
	if !ok {
		t.Fatalf("%s is not among the rendered files", name)
	}
	if bytes.Contains(data, []byte("<no value>")) || bytes.Contains(data, []byte("{{")) {
		t.Errorf("%s is not fully rendered:\n%s", name, data)
	}
	return data
}

func TestKubeletConfig(t *testing.T) {
	var config kubeletv1beta1.KubeletConfiguration
	if err := yaml.UnmarshalStrict(rendered(t, "kubelet.yaml"), &config); err != nil {
		t.Fatal(err)
	}
	if config.Authentication.Anonymous.Enabled == nil || *config.Authentication.Anonymous.Enabled {
		t.Error("kubelet answers anybody")
	}
	if config.StaticPodPath != layout.ManifestDir || config.ContainerRuntimeEndpoint != "unix://"+layout.ContainerdSocket {
		t.Errorf("static pods in %q, runtime at %q", config.StaticPodPath, config.ContainerRuntimeEndpoint)
	}
	if config.FailCgroupV1 == nil || *config.FailCgroupV1 {
		t.Error("kubelet refuses machines with control groups of version 1")
	}
	if len(config.FeatureGates) > 0 {
		t.Errorf("feature gates are not the defaults: %v", config.FeatureGates)
	}
}

func TestProxyConfig(t *testing.T) {
	var config proxyv1alpha1.KubeProxyConfiguration
	if err := yaml.UnmarshalStrict(rendered(t, "kube-proxy.yaml"), &config); err != nil {
		t.Fatal(err)
	}
	if config.Mode != "nftables" || config.HostnameOverride != layout.NodeName {
		t.Errorf("mode %q for node %q", config.Mode, config.HostnameOverride)
	}
	if config.Conntrack.MaxPerCore == nil || *config.Conntrack.MaxPerCore != 0 {
		t.Error("kube-proxy would change the machine's connection tracking")
	}
}

// TestAuditPolicy: the log has what accounts of programs ask for, without what
// they send, and nothing of Kubernetes' own, which asks for far more.
func TestAuditPolicy(t *testing.T) {
	policy, err := auditpolicy.LoadPolicyFromBytes(rendered(t, "audit-policy.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	evaluator := auditpolicy.NewPolicyRuleEvaluator(policy)
	for name, want := range map[string]audit.Level{
		"system:serviceaccount:divvy-system:divvy-node":               audit.LevelMetadata,
		"system:serviceaccount:bwki:bitfusion-webhook-deployment":     audit.LevelMetadata,
		"system:serviceaccount:kube-system:generic-garbage-collector": audit.LevelNone,
		"kubernetes-admin": audit.LevelNone,
	} {
		who := &user.DefaultInfo{Name: name, Groups: []string{user.AllAuthenticated}}
		if namespace, _, err := serviceaccount.SplitUsername(name); err == nil {
			who.Groups = append(who.Groups, serviceaccount.MakeGroupNames(namespace)...)
		}
		binding := evaluator.EvaluatePolicyRule(authorizer.AttributesRecord{User: who,
			Verb: "delete", APIGroup: "rbac.authorization.k8s.io", APIVersion: "v1", Resource: "rolebindings", ResourceRequest: true})
		if system := strings.Contains(name, ":kube-system:"); (binding.Level == audit.LevelNone) != system {
			t.Errorf("%s takes rights away: %s", name, binding.Level)
		}
		got := evaluator.EvaluatePolicyRule(authorizer.AttributesRecord{User: who, Verb: "list", APIVersion: "v1", Resource: "pods",
			ResourceRequest: true})
		if got.Level != want {
			t.Errorf("%s: %s, want %s", name, got.Level, want)
		}
	}
}

func TestContainerdConfig(t *testing.T) {
	var config struct {
		Version int
		Root    string
		State   string
		Plugins map[string]map[string]any
	}
	if err := toml.Unmarshal(rendered(t, "containerd.toml"), &config); err != nil {
		t.Fatal(err)
	}
	if config.Root != layout.ContainerdDir || config.State != layout.ContainerdRunDir {
		t.Errorf("root %q, state %q: not the lab's own folders", config.Root, config.State)
	}
	runtime := config.Plugins["io.containerd.cri.v1.runtime"]
	if runtime["enable_cdi"] != true || runtime["restrict_oom_score_adj"] != true {
		t.Errorf("runtime: %v", runtime)
	}
	// The sockets of shims lie in this folder; containerd allows 42 characters.
	dir, _ := config.Plugins["io.containerd.shim.v1.manager"]["socket_dir"].(string)
	if dir == "" || len(dir) > 42 || !strings.HasPrefix(dir, layout.RunDir) {
		t.Errorf("sockets of shims lie in %q", dir)
	}
}

func TestCNIConfig(t *testing.T) {
	var config struct {
		Plugins []struct{ Type, Bridge string }
	}
	if err := json.Unmarshal(rendered(t, "cni.conflist"), &config); err != nil {
		t.Fatal(err)
	}
	if len(config.Plugins) != 2 || config.Plugins[0].Type != "bridge" || config.Plugins[0].Bridge != layout.BridgeName ||
		config.Plugins[1].Type != "portmap" {
		t.Errorf("plugins %+v", config.Plugins)
	}
	if len(layout.BridgeName) > 15 {
		t.Errorf("interface name %q is longer than Linux allows", layout.BridgeName)
	}
}

func TestDaemons(t *testing.T) {
	paths := map[string]Component{}
	for _, c := range Components() {
		d := daemon(c, testBin, testIP)
		if c == Scheduler {
			if d != nil {
				t.Error("the scheduler is a process, not a static pod")
			}
			continue
		}
		if other, twice := paths[d.Path]; twice {
			t.Errorf("%s and %s run the same program: they could not be told apart", c, other)
		}
		paths[d.Path] = c
		for _, file := range d.ConfigFiles {
			if !strings.HasPrefix(file, layout.StateDir) && !strings.HasPrefix(file, layout.KubernetesDir) {
				t.Errorf("%s reads %s, which is not the lab's", c, file)
			}
		}
		if parsed, err := ParseComponent(d.Name); err != nil || parsed != c {
			t.Errorf("program %s parses as %q, %v", d.Name, parsed, err)
		}
	}
	if _, err := ParseComponent("dns"); err == nil {
		t.Error("an unknown component parses")
	}
	modes := daemon(APIServer, testBin, testIP).Args
	if !slices.Contains(modes, "--authorization-mode=Node,RBAC") {
		t.Errorf("the API server allows too much: %v", modes)
	}
}

func TestKubeconfigLoads(t *testing.T) {
	ca, err := pki.NewAuthority("kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range users() {
		identity, err := ca.Issue(u.profile)
		if err != nil {
			t.Fatal(err)
		}
		data, err := pki.Kubeconfig(serverURL(testIP), layout.ClusterName, u.profile.CommonName, ca, identity)
		if err != nil {
			t.Fatal(err)
		}
		config, err := clientcmd.RESTConfigFromKubeConfig(data)
		if err != nil {
			t.Fatalf("%s: %v", u.name, err)
		}
		if config.Host != "https://192.0.2.2:6443" || len(config.CAData) == 0 || len(config.CertData) == 0 || len(config.KeyData) == 0 {
			t.Errorf("%s: incomplete: host %s", u.name, config.Host)
		}
	}
}

func TestWriteFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "manifests", "x.yaml")
	write := func(content string, mode os.FileMode) os.FileInfo {
		t.Helper()
		if err := writeFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if data, err := os.ReadFile(path); err != nil || string(data) != content || info.Mode().Perm() != mode {
			t.Errorf("wrote %q with %v (%v), want %q with %v", data, info.Mode(), err, content, mode)
		}
		return info
	}
	first := write("a", 0o600)
	if again := write("a", 0o600); !os.SameFile(first, again) {
		t.Error("an unchanged file was replaced, which would restart a static pod")
	}
	write("b", 0o600)
	write("b", 0o644)
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("left beside the file: %v, %v", entries, err)
	}
}

func TestShellImage(t *testing.T) {
	program, err := vendorsim.BuildAllocator(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	spec, err := shellSpec("/proc/self/exe", program)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := image.Build(spec); err != nil {
		t.Error(err)
	}
	loader, err := image.Interpreter(program)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/bin/alloc", loader} {
		if !slices.ContainsFunc(spec.Files, func(f image.File) bool { return f.Path == path }) {
			t.Errorf("the image has no %s", path)
		}
	}
	for _, name := range []string{"sh", "ls", "cat", "sleep", "env"} {
		if !slices.ContainsFunc(spec.Files, func(f image.File) bool { return f.Path == "/bin/"+name && f.Target == "busybox" }) {
			t.Errorf("the image has no %s", name)
		}
	}
}

func TestRecognisesItsProcesses(t *testing.T) {
	bins := []string{"/old/bin", testBin}
	for exe, want := range map[string]bool{
		testBin + "/kubelet": true, "/old/bin/containerd-shim-runc-v2": true,
		testBin + "/kubectl": false, "/usr/bin/kubelet": false, testBin + "/other": false,
	} {
		if got := isDaemon(exe, bins); got != want {
			t.Errorf("isDaemon(%s) = %t, want %t", exe, got, want)
		}
	}
}
