package runtimesetup

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// files are those of a host, by path; a text that begins with "->" is a link.
type files map[string]string

func (all files) host(t *testing.T) Host {
	t.Helper()
	root := t.TempDir()
	for name, text := range all {
		full := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, link := strings.CutPrefix(text, "->"); link {
			err = os.Symlink(target, full)
		} else {
			err = os.WriteFile(full, []byte(text), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return Host(root)
}

const (
	containerd1  = "/etc/containerd/config.toml"
	operatorTOML = "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"
	handTOML     = "/etc/nvidia-container-runtime/config.toml"
	dropIn       = "/etc/containerd/conf.d/99-nvidia.toml"
	hookOfOp     = "/usr/local/nvidia/toolkit/nvidia-cdi-hook"

	imports    = "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n"
	legacyCRI  = "[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  default_runtime_name = \"nvidia\"\n"
	cdiCRI     = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  enable_cdi = true\n"
	nvidiaProg = "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia.options]\n" +
		"  BinaryName = \"/usr/local/nvidia/toolkit/nvidia-container-runtime\"\n"
	mountsOnly = "accept-nvidia-visible-devices-as-volume-mounts = true\naccept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
)

// One case for each way of ../../../docs/gpu-operator.md, and what is close to it.
func TestDecide(t *testing.T) {
	for name, tt := range map[string]struct {
		files files
		want  config.Injection
		says  string
	}{
		"operator 25.10 and later: CDI native": {
			files{containerd1: imports, dropIn: cdiCRI + nvidiaProg,
				operatorTOML: "[nvidia-container-runtime]\nmode = \"cdi\"\n", hookOfOp: ""},
			config.InjectCDI, "containerd adds CDI devices",
		},
		"the same with CRI-O": {
			files{"/run/crio/crio.sock": "",
				"/etc/crio/crio.conf.d/99-nvidia.toml": "[crio.runtime.runtimes.nvidia]\nruntime_path = \"/x\"\n",
				operatorTOML:                           "", hookOfOp: ""},
			config.InjectCDI, "cri-o adds CDI devices",
		},
		"operator with NRI: the runtime's configuration is its own": {
			files{containerd1: "version = 3\n", "/var/run/nri/nri.sock": "", operatorTOML: "", hookOfOp: ""},
			config.InjectCDI, "containerd adds CDI devices",
		},
		"operator before 25.10: nvidia is the default runtime": {
			files{containerd1: "version = 2\n" + legacyCRI + nvidiaProg, operatorTOML: ""},
			config.InjectEnvironment, "reads the environment",
		},
		"the same in a file of its own": {
			files{containerd1: imports, dropIn: "version = 2\n" + legacyCRI}, config.InjectEnvironment, "",
		},
		"the same where containerd adds CDI devices too": {
			files{containerd1: "version = 2\n" + legacyCRI +
				"[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n", operatorTOML: ""},
			config.InjectEnvironment, "",
		},
		"legacy with CRI-O": {
			files{"/run/crio/crio.sock": "", "/etc/crio/crio.conf": "[crio.runtime]\ndefault_runtime = \"runc\"\n",
				"/etc/crio/crio.conf.d/99-nvidia.conf": "[crio.runtime]\ndefault_runtime = \"nvidia\"\n"},
			config.InjectEnvironment, "default of cri-o",
		},
		"legacy with Docker": {
			files{"/run/cri-dockerd.sock": "", "/etc/docker/daemon.json": `{"default-runtime": "gpu", ` +
				`"runtimes": {"gpu": {"path": "/usr/bin/nvidia-container-runtime"}}}`},
			config.InjectEnvironment, "default of docker",
		},
		"legacy with volume mounts": {
			files{containerd1: "version = 2\n" + legacyCRI, handTOML: mountsOnly}, config.InjectVolumeMounts, handTOML,
		},
		"volume mounts are accepted beside the environment": {
			files{containerd1: "version = 2\n" + legacyCRI, handTOML: "accept-nvidia-visible-devices-as-volume-mounts = true\n"},
			config.InjectEnvironment, "",
		},
		"neither the environment nor volume mounts are accepted, and CDI is": {
			files{containerd1: "version = 2\n" + legacyCRI + "[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n",
				handTOML: "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n", "/usr/bin/nvidia-ctk": ""},
			config.InjectCDI, "adds CDI devices",
		},
		"nothing is accepted": {
			files{containerd1: "version = 2\n" + legacyCRI, handTOML: "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"},
			config.InjectDeviceNodes, "accepts neither",
		},
		"k3s beside the containerd of Docker": {
			files{containerd1: "disabled_plugins = [\"cri\"]\n", "/usr/bin/nvidia-ctk": "",
				"/var/lib/rancher/k3s/agent/etc/containerd/config.toml": "version = 3\n"},
			config.InjectCDI, "k3s",
		},
		"toolkit by hand, CDI": {
			files{containerd1: cdiCRI, "/usr/bin/nvidia-ctk": "", "/etc/cdi/nvidia.yaml": "cdiVersion: 0.5.0\n"}, config.InjectCDI, "",
		},
		"toolkit by hand, containerd 2": {
			files{containerd1: "version = 3\n", "/usr/bin/nvidia-cdi-hook": ""}, config.InjectCDI, "",
		},
		"CDI is off in containerd 2": {
			files{containerd1: "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\nenable_cdi = false\n",
				"/usr/bin/nvidia-cdi-hook": ""},
			config.InjectDeviceNodes, "CDI is not enabled",
		},
		"a default runtime in mode cdi, and a containerd without CDI": {
			files{containerd1: "version = 2\n" + legacyCRI, handTOML: "[nvidia-container-runtime]\nmode = \"cdi\"\n"},
			config.InjectDeviceNodes, "in mode cdi",
		},
		"nothing but containerd 1": {files{containerd1: "version = 2\n"}, config.InjectDeviceNodes, "CDI is not enabled"},
		"no toolkit":               {files{containerd1: "version = 3\n"}, config.InjectDeviceNodes, "toolkit was not found"},
		"nothing at all":           {files{}, config.InjectEnvironment, "no configuration of a container runtime"},
		"k3s": {
			files{"/var/lib/rancher/k3s/agent/etc/containerd/config.toml": "version = 3\n", "/usr/bin/nvidia-ctk": ""},
			config.InjectCDI, "k3s",
		},
		"a runtime that is only called like NVIDIA's": {
			files{containerd1: "version = 2\n" + legacyCRI +
				"[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia.options]\n" +
				"BinaryName = \"/usr/bin/runc\"\n"},
			config.InjectDeviceNodes, "not the default",
		},
		"a file that is no TOML":        {files{containerd1: "version = ["}, config.InjectDeviceNodes, "could not read " + containerd1},
		"an import that does not exist": {files{containerd1: imports}, config.InjectDeviceNodes, "CDI is not enabled"},
		"links are followed inside the host": {
			files{containerd1: "->/etc/real.toml", "/etc/real.toml": "version = 2\n" + legacyCRI}, config.InjectEnvironment, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := Decide(Read(tt.files.host(t), "", ""))
			if got.Injection != tt.want || !strings.Contains(got.Why, tt.says) {
				t.Errorf("Decide = %+v, want %s with %q", got, tt.want, tt.says)
			}
		})
	}
}

// The format of containerd's configuration does not say which containerd reads it: containerd 2,
// whose default is to add CDI devices, reads that of containerd 1 as well.
func TestContainerdThatTheNodeReports(t *testing.T) {
	const off = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = false\n"
	for name, tt := range map[string]struct {
		config, runtime string
		want            bool
	}{
		"containerd 1":                     {"version = 2\n", "containerd://1.7.29", false},
		"containerd 2":                     {"version = 2\n", "containerd://2.1.4", true},
		"containerd 2 of k3s":              {"version = 2\n", "containerd://2.1.4-k3s2", true},
		"containerd 2, and CDI is off":     {off, "containerd://2.1.4", false},
		"containerd 2 with its own format": {"version = 3\n", "containerd://2.1.4", true},
		"no version":                       {"version = 2\n", "containerd://Unknown", false},
		"another runtime":                  {"version = 2\n", "docker://28.0.1", false},
		"not known":                        {"version = 2\n", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			if f := Read(files{containerd1: tt.config}.host(t), "", tt.runtime); f.CDI != tt.want {
				t.Errorf("CDI is %t, want %t", f.CDI, tt.want)
			}
		})
	}
}

func TestFindings(t *testing.T) {
	spec := func(kind string, devices ...string) string {
		text := "cdiVersion: 0.5.0\nkind: " + kind + "\ndevices:\n"
		for _, d := range devices {
			text += "- name: " + d + "\n  containerEdits: {env: [A=b]}\n"
		}
		return text
	}
	const stock, stockJSON = "k8s.device-plugin.nvidia.com/gpu", "/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json"
	for name, tt := range map[string]struct {
		files files
		want  []string // parts of the findings, with their kinds
	}{
		"nothing": {
			files{"/var/run/cdi/divvy-nvidia.divvy.dev-gpu.yaml": spec("nvidia.divvy.dev/gpu", "a", "b"),
				containerd1: "version = 3\n"}, nil,
		},
		"what NVIDIA's plugin left": {
			files{stockJSON: `{"cdiVersion": "0.5.0", "kind": "` + stock +
				`", "devices": [{"name": "z", "containerEdits": {"env": ["A=b"]}}]}`},
			[]string{wire.StaleCDI + " " + stockJSON},
		},
		"and Divvy's of the same kind": {
			files{stockJSON: `{"cdiVersion": "0.5.0", "kind": "` + stock +
				`", "devices": [{"name": "a", "containerEdits": {"env": ["A=b"]}}]}`,
				"/var/run/cdi/divvy-k8s.device-plugin.nvidia.com-gpu.yaml": spec(stock, "a", "b")},
			[]string{wire.StaleCDI + " " + stockJSON,
				wire.ConflictingCDI + " /var/run/cdi/divvy-k8s.device-plugin.nvidia.com-gpu.yaml and " + stockJSON},
		},
		"in different folders, the later one goes before": {
			files{"/etc/cdi/nvidia.yaml": spec("nvidia.com/gpu", "0"), "/var/run/cdi/nvidia.yaml": spec("nvidia.com/gpu", "0")}, nil,
		},
		"many devices": {
			files{"/etc/cdi/a.yaml": spec("nvidia.com/gpu", "0", "1", "2", "3", "4"),
				"/etc/cdi/b.yaml": spec("nvidia.com/gpu", "0", "1", "2", "3", "4")},
			[]string{wire.ConflictingCDI + " /etc/cdi/a.yaml and /etc/cdi/b.yaml"},
		},
		"files that are no specifications": {files{"/etc/cdi/a.yaml": "a: [", "/etc/cdi/b.txt": "x", "/etc/cdi/empty.yaml": "",
			"/var/run/cdi/null.json": "null"}, nil},
		"any container gets GPUs": {files{containerd1: "version = 2\n" + legacyCRI},
			[]string{wire.OpenEnvironment + " NVIDIA's runtime"}},
		"only by mounts": {files{containerd1: "version = 2\n" + legacyCRI, handTOML: mountsOnly}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			h := tt.files.host(t)
			got := Findings(h, Read(h, "", ""))
			var texts []string
			for i, f := range got {
				text := f.Kind + " " + f.What
				if i < len(tt.want) && strings.HasPrefix(text, tt.want[i]) {
					text = tt.want[i]
				}
				texts = append(texts, text)
			}
			if diff := cmp.Diff(tt.want, texts); diff != "" {
				t.Errorf("findings (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFindingNamesAFewDevices(t *testing.T) {
	text := "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n"
	for _, d := range []string{"0", "1", "2", "3", "4"} {
		text += "- name: \"" + d + "\"\n  containerEdits: {env: [A=b]}\n"
	}
	h := files{"/etc/cdi/a.yaml": text, "/etc/cdi/b.yaml": text}.host(t)
	got := Findings(h, Facts{})
	if len(got) != 1 || !strings.HasSuffix(got[0].What, "nvidia.com/gpu=0, nvidia.com/gpu=1, nvidia.com/gpu=2 and 2 more") {
		t.Errorf("findings: %v", got)
	}
}
