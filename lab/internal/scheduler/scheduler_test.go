package scheduler_test

import (
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	configv1 "k8s.io/kube-scheduler/config/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/lab/internal/scheduler"
)

const image = "registry.k8s.io/kube-scheduler:v1.37.1"

// The golden file is what kubeadm v1.37.1 itself writes, byte for byte.
func TestManifestIsKubeadms(t *testing.T) {
	want, err := os.ReadFile("testdata/kubeadm-v1.37.1.yaml")
	if err != nil {
		t.Fatal(err)
	}
	got, err := scheduler.Manifest(image, nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("manifest differs from kubeadm's (-kubeadm +ours):\n%s", diff)
	}
}

func TestManifestWithConfig(t *testing.T) {
	pod := decode(t, []byte("a: b"))
	container := pod.Spec.Containers[0]
	if !slices.Contains(container.Command, "--config="+scheduler.ConfigFile) {
		t.Errorf("command %v does not name the configuration", container.Command)
	}
	mounted := slices.ContainsFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool {
		return m.MountPath == scheduler.ConfigFile && m.ReadOnly && slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
			return v.Name == m.Name && v.HostPath != nil && v.HostPath.Path == scheduler.ConfigFile
		})
	})
	if !mounted {
		t.Errorf("the configuration is not mounted: %+v of %+v", container.VolumeMounts, pod.Spec.Volumes)
	}
}

// Kubelet restarts the scheduler only when the manifest changes.
func TestManifestChangesWithConfig(t *testing.T) {
	one, same, other := decode(t, []byte("a: b")), decode(t, []byte("a: b")), decode(t, []byte("a: c"))
	if !scheduler.SamePod(one, same) {
		t.Error("the same configuration makes another pod")
	}
	if scheduler.SamePod(one, other) {
		t.Error("another configuration makes the same pod")
	}
	if scheduler.SamePod(one, decode(t, nil)) {
		t.Error("a configuration makes the same pod as none")
	}
}

func TestConfigDecodesStrictly(t *testing.T) {
	var config configv1.KubeSchedulerConfiguration
	if err := yaml.UnmarshalStrict(scheduler.DivvyExtender.Config(), &config); err != nil {
		t.Fatal(err)
	}
	if len(config.Extenders) != 1 {
		t.Fatalf("got %d extenders, want 1", len(config.Extenders))
	}
	e := config.Extenders[0]
	if e.URLPrefix != "http://127.0.0.1:32766/gcushare-scheduler" || e.FilterVerb != "filter" || e.PrioritizeVerb != "prioritize" ||
		e.BindVerb != "bind" || e.Weight != 1 || !e.NodeCacheCapable || e.Ignorable || e.HTTPTimeout.Seconds() != 10 {
		t.Errorf("unexpected extender: %+v", e)
	}
	want := []configv1.ExtenderManagedResource{{Name: "enflame.com/gcu-memory"}, {Name: "iluvatar.com/gpu-memory"}, {Name: "nvidia.com/gpu-memory"}}
	if diff := cmp.Diff(want, e.ManagedResources); diff != "" {
		t.Errorf("managed resources (-want +got):\n%s", diff)
	}
	if config.ClientConnection.Kubeconfig != scheduler.Kubeconfig {
		t.Errorf("kubeconfig is %q: flags do not set it where a configuration is given", config.ClientConnection.Kubeconfig)
	}
	if config.LeaderElection.LeaderElect == nil || !*config.LeaderElection.LeaderElect {
		t.Error("leader election is off")
	}
}

func decode(t *testing.T, config []byte) *corev1.Pod {
	t.Helper()
	data, err := scheduler.Manifest(image, config)
	if err != nil {
		t.Fatal(err)
	}
	pod := &corev1.Pod{}
	if err := yaml.UnmarshalStrict(data, pod); err != nil {
		t.Fatal(err)
	}
	return pod
}
