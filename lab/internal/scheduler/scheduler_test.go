package scheduler_test

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/lab/internal/scheduler"
)

const image = "registry.k8s.io/kube-scheduler:v1.37.1"

// The golden file is what kubeadm v1.37.1 itself writes, byte for byte.
func TestManifestIsKubeadms(t *testing.T) {
	want, err := os.ReadFile("testdata/kubeadm-v1.37.1.yaml")
	if err != nil {
		t.Fatal(err)
	}
	got, err := scheduler.Manifest(image)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("manifest differs from kubeadm's (-kubeadm +ours):\n%s", diff)
	}
}

// Kubelet restarts the scheduler only when the manifest changes.
func TestSamePod(t *testing.T) {
	pod := func(image string, change func(*corev1.Pod)) *corev1.Pod {
		data, err := scheduler.Manifest(image)
		if err != nil {
			t.Fatal(err)
		}
		p := &corev1.Pod{}
		if err := yaml.UnmarshalStrict(data, p); err != nil {
			t.Fatal(err)
		}
		if change != nil {
			change(p)
		}
		return p
	}
	plain := pod(image, nil)
	// Kubelet adds annotations of its own.
	if !scheduler.SamePod(plain,
		pod(image, func(p *corev1.Pod) { p.Annotations = map[string]string{"kubernetes.io/config.source": "file"} })) {
		t.Error("what kubelet reports is not the pod of the manifest")
	}
	others := map[string]*corev1.Pod{
		"another image": pod("registry.k8s.io/kube-scheduler:v1.36.0", nil),
		"another flag": pod(image, func(p *corev1.Pod) {
			p.Spec.Containers[0].Command = append(p.Spec.Containers[0].Command, "--config=/a")
		}),
		"another configuration": pod(image, func(p *corev1.Pod) { p.Annotations = map[string]string{schedconf.AnnotationHash: "1"} }),
	}
	for name, other := range others {
		if scheduler.SamePod(plain, other) {
			t.Errorf("%s makes the same pod", name)
		}
	}
}
