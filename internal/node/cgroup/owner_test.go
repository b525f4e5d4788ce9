package cgroup

import (
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Ids of containers.
const (
	mainID    = "3f0c9a1be4d27586a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718"
	sidecarID = "77aa9a1be4d27586a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718"
)

func TestParse(t *testing.T) {
	const (
		uid    = "6c0f7a11-9a2b-4c3d-8e4f-5061728394a5"
		slice  = "6c0f7a11_9a2b_4c3d_8e4f_5061728394a5"
		static = "5f3b6d2c1a0e4f7d8c9b0a1f2e3d4c5b"
	)
	main, pod := []Owner{{uid, mainID}}, []Owner{{uid, ""}}
	for name, tt := range map[string]struct {
		text   string
		want   []Owner
		hidden bool
	}{
		// Version 2.
		"containerd, systemd, burstable": {"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + slice +
			".slice/cri-containerd-" + mainID + ".scope\n", main, false},
		"containerd, systemd, best effort": {"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + slice +
			".slice/cri-containerd-" + mainID + ".scope\n", main, false},
		"containerd, systemd, guaranteed": {"0::/kubepods.slice/kubepods-pod" + slice + ".slice/cri-containerd-" + mainID + ".scope\n",
			main, false},
		"containerd, cgroupfs, burstable":   {"0::/kubepods/burstable/pod" + uid + "/" + mainID + "\n", main, false},
		"containerd, cgroupfs, best effort": {"0::/kubepods/besteffort/pod" + uid + "/" + mainID + "\n", main, false},
		"containerd, cgroupfs, guaranteed":  {"0::/kubepods/pod" + uid + "/" + mainID + "\n", main, false},
		"containerd for cgroupfs, kubelet for systemd": {"0::/system.slice/containerd.service/kubepods-burstable-pod" + slice +
			".slice:cri-containerd:" + mainID + "\n", main, false},
		"CRI-O, systemd, burstable": {"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + slice +
			".slice/crio-" + mainID + ".scope\n", main, false},
		"CRI-O with crun, systemd, guaranteed": {"0::/kubepods.slice/kubepods-pod" + slice + ".slice/crio-" + mainID + ".scope/container\n",
			main, false},
		"CRI-O, cgroupfs":                 {"0::/kubepods/besteffort/pod" + uid + "/crio-" + mainID + "\n", main, false},
		"CRI-O, cgroupfs, without prefix": {"0::/kubepods/besteffort/pod" + uid + "/" + mainID + "\n", main, false},
		"CRI-O's monitor, systemd": {"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + slice +
			".slice/crio-conmon-" + mainID + ".scope\n", pod, false},
		"CRI-O's monitor, cgroupfs": {"0::/kubepods/pod" + uid + "/crio-conmon-" + mainID + "/" + mainID + "\n", pod, false},
		"cri-dockerd, systemd": {"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + slice +
			".slice/docker-" + mainID + ".scope\n", main, false},
		"cri-dockerd, cgroupfs": {"0::/kubepods/burstable/pod" + uid + "/" + mainID + "\n", main, false},
		"Kata's sandbox":        {"0::/kubepods/pod" + uid + "/kata_" + mainID + "\n", main, false},
		"static pod, systemd": {"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + static +
			".slice/cri-containerd-" + mainID + ".scope\n", []Owner{{static, mainID}}, false},
		"static pod, cgroupfs": {"0::/kubepods/burstable/pod" + static + "/" + mainID + "\n", []Owner{{static, mainID}}, false},
		"the pod's own group":  {"0::/kubepods/burstable/pod" + uid + "\n", pod, false},
		"the class of service": {"0::/kubepods/burstable\n", nil, false},
		"kubelet below a root": {"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + slice + ".slice/cri-containerd-" +
			mainID + ".scope\n", main, false},
		"k3s": {"0::/system.slice/k3s.service/kubepods/besteffort/pod" + uid + "/" + mainID + "\n", main, false},
		"a node that is a Docker container": {"0::/docker/" + sidecarID + "/kubelet/kubepods/burstable/pod" + uid + "/" + mainID + "\n",
			main, false},
		"a node that is a pod": {"0::/kubepods/burstable/pod" + static + "/" + sidecarID + "/kubepods/pod" + uid + "/" + mainID + "\n",
			[]Owner{{static, sidecarID}, {uid, mainID}}, false},
		"systemd in a container":  {"0::/kubepods/pod" + uid + "/" + mainID + "/system.slice/sshd.service\n", main, false},
		"Docker in a container":   {"0::/kubepods/pod" + uid + "/" + mainID + "/docker/" + sidecarID + "\n", main, false},
		"a group that is removed": {"0::/kubepods/pod" + uid + "/" + mainID + " (deleted)\n", main, false},

		// Version 1.
		"version 1, containerd, systemd": {"12:pids:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + slice +
			".slice/cri-containerd-" + mainID + ".scope\n1:name=systemd:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" +
			slice + ".slice/cri-containerd-" + mainID + ".scope\n0::/\n", main, false},
		"version 1, containerd, cgroupfs, only memory": {"9:cpuset:/\n8:memory:/kubepods/pod" + uid + "/" + mainID + "\n0::/\n",
			main, false},
		"version 1, CRI-O, only cpu": {"4:cpu,cpuacct:/kubepods/burstable/pod" + uid + "/crio-" + mainID + "\n",
			main, false},
		"version 1, cri-dockerd, only systemd": {"1:name=systemd:/kubepods/besteffort/pod" + uid + "/" + mainID + "\n",
			main, false},
		"version 1, another controller": {"5:freezer:/kubepods/pod" + uid + "/" + mainID + "\n4:memory:/\n", nil, false},
		"hybrid, version 2 knows the service": {"0::/system.slice/containerd.service\n2:pids:/kubepods/pod" + uid + "/" +
			mainID + "\n", main, false},

		// Outside of pods.
		"a service":             {"0::/system.slice/nvidia-persistenced.service\n", nil, false},
		"a session":             {"0::/user.slice/user-1000.slice/session-3.scope\n", nil, false},
		"the top":               {"0::/\n", nil, false},
		"a container of Docker": {"0::/system.slice/docker-" + mainID + ".scope\n", nil, false},

		// Names that only look alike.
		"a longer UID":               {"0::/kubepods/pod" + uid + "0/" + mainID + "\n", nil, false},
		"a UID of other characters":  {"0::/kubepods/pod" + strings.Replace(uid, "6", "x", 1) + "/" + mainID + "\n", nil, false},
		"dashes elsewhere":           {"0::/kubepods/pod6c0f7a119-a2b-4c3d-8e4f-5061728394a5/" + mainID + "\n", nil, false},
		"a hash that is too short":   {"0::/kubepods/pod" + static[1:] + "/" + mainID + "\n", nil, false},
		"a UID within an element":    {"0::/podman/x-pod" + uid + "/" + mainID + "\n", nil, false},
		"65 digits":                  {"0::/kubepods/pod" + uid + "/0" + mainID + "\n", pod, false},
		"63 digits":                  {"0::/kubepods/pod" + uid + "/" + mainID[1:] + "\n", pod, false},
		"digits before the pod only": {"0::/" + mainID + "/pod" + uid + "\n", pod, false},

		// A cgroup namespace of the reader's own.
		"private, another pod": {"0::/../../kubepods-burstable-pod" + slice + ".slice/cri-containerd-" +
			mainID + ".scope\n", main, false},
		"private, another container of the pod": {"0::/../cri-containerd-" + mainID + ".scope\n", nil, true},
		"private, a service":                    {"0::/../../../../system.slice/mps.service\n", nil, true},
		"private, version 1":                    {"8:memory:/../" + mainID + "\n0::/\n", nil, true},
		"dots in a name":                        {"0::/system.slice/a..b.service\n", nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Parse(tt.text)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got.Owners); diff != "" || got.Hidden != tt.hidden {
				t.Errorf("Parse(%q): hidden %t, %s", tt.text, got.Hidden, diff)
			}
		})
	}
	for name, text := range map[string]string{
		"empty": "", "no path": "0::\n", "no colons": "kubepods\n", "one colon": "0:memory\n", "only other controllers": "5:freezer:/\n",
	} {
		if got, err := Parse(text); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

var (
	uidForm = regexp.MustCompile("^([0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})$")
	idForm  = regexp.MustCompile("^([0-9a-f]{64})?$")
)

func FuzzParse(f *testing.F) {
	for _, text := range []string{
		"0::/kubepods/pod" + goneUID + "/" + mainID + "\n",
		"0::/kubepods.slice/kubepods-pod0a1b2c3d_0000_4000_8000_000000000001.slice/crio-" + mainID + ".scope/container\n",
		"8:memory:/../" + mainID + "\n1:name=systemd:/a:b\n0::/ (deleted)\n",
		"0::/pod5f3b6d2c1a0e4f7d8c9b0a1f2e3d4c5b/kata_" + mainID + "/pod" + goneUID + "/crio-conmon-" + mainID,
		":::::\n\n0::pod", "0::/system.slice/x.service/kubepods-pod0a1b2c3d_0000_4000_8000_000000000001.slice:cri-containerd:" + mainID,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := Parse(text)
		if err != nil {
			if len(got.Owners) > 0 {
				t.Errorf("owners %v with an error", got.Owners)
			}
			return
		}
		if !strings.Contains(text, got.Path) || got.Hidden && len(got.Owners) > 0 {
			t.Errorf("Parse(%q) = %+v", text, got)
		}
		for _, o := range got.Owners {
			if !uidForm.MatchString(o.PodUID) || !idForm.MatchString(o.Container) || !strings.Contains(text, o.Container) ||
				!strings.Contains(strings.ReplaceAll(text, "_", "-"), "pod"+o.PodUID) {
				t.Errorf("Parse(%q) has the owner %+v", text, o)
			}
		}
	})
}

func TestScope(t *testing.T) {
	const uid, inner = "6c0f7a11-9a2b-4c3d-8e4f-5061728394a5", "7c0f7a11-9a2b-4c3d-8e4f-5061728394a5"
	nested := "/kubepods/pod" + uid + "/" + mainID + "/kubepods/pod" + inner + "/" + sidecarID
	scope := "/kubepods.slice/kubepods-pod6c0f7a11_9a2b_4c3d_8e4f_5061728394a5.slice/crio-" + mainID + ".scope"
	for name, tt := range map[string]struct {
		path, want string
	}{
		"the container's own":        {scope, scope},
		"crun's":                     {scope + "/container", scope},
		"of systemd in a container":  {scope + "/system.slice/a.service", scope},
		"a container in a container": {nested + "/x", nested},
		"a pod's":                    {"/kubepods/pod" + uid, ""},
		"a pod's in a container":     {"/kubepods/pod" + uid + "/" + mainID + "/kubepods/pod" + inner, ""},
		"no pod's":                   {"/system.slice/a.service", ""},
	} {
		if got, ok := Scope(tt.path); got != tt.want || ok != (tt.want != "") {
			t.Errorf("%s: %q, %v, want %q", name, got, ok, tt.want)
		}
	}
}

func TestUnified(t *testing.T) {
	for name, tt := range map[string]struct {
		text, want string
	}{
		"version 2":     {"0::/a/b\n", "/a/b"},
		"both":          {"12:memory:/x\n1:name=systemd:/y\n0::/a\n", "/a"},
		"version 1":     {"12:memory:/x\n1:name=systemd:/y\n", ""},
		"no path":       {"0::\n", ""},
		"a named group": {"0:name=x:/a\n", ""},
		"empty":         {"", ""},
	} {
		if got, err := Unified(tt.text); got != tt.want || errors.Is(err, ErrNotUnified) != (tt.want == "") {
			t.Errorf("%s: %q, %v, want %q", name, got, err, tt.want)
		}
	}
}
