// Package scheduler writes the static pod of a kube-scheduler on a control-plane
// node in the form that kubeadm gives it.
package scheduler

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// Names and places that kubeadm uses.
const (
	PodName      = "kube-scheduler"
	Namespace    = metav1.NamespaceSystem
	Kubeconfig   = "/etc/kubernetes/scheduler.conf"
	ManifestFile = "kube-scheduler.yaml"
	// SecurePort serves health and metrics on the loopback address.
	SecurePort = 10259
)

// priorityNodeCritical is the value of the class system-node-critical. A
// static pod passes no admission that would fill it in.
const priorityNodeCritical = 2000001000

// Manifest returns the static pod of a kube-scheduler that runs the image.
func Manifest(image string) ([]byte, error) {
	pod := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Name:      PodName,
			Namespace: Namespace,
			Labels:    map[string]string{"component": PodName, "tier": "control-plane"},
		},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{{
				Name:            PodName,
				Image:           image,
				ImagePullPolicy: corev1.PullIfNotPresent,
				Command: []string{
					PodName,
					"--authentication-kubeconfig=" + Kubeconfig,
					"--authorization-kubeconfig=" + Kubeconfig,
					"--bind-address=127.0.0.1",
					"--kubeconfig=" + Kubeconfig,
					"--leader-elect=true",
				},
				Ports: []corev1.ContainerPort{
					{Name: "probe-port", ContainerPort: SecurePort, Protocol: corev1.ProtocolTCP},
				},
				Resources: corev1.ResourceRequirements{
					Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m")},
				},
				VolumeMounts: []corev1.VolumeMount{
					{Name: "kubeconfig", MountPath: Kubeconfig, ReadOnly: true},
				},
				StartupProbe:   probe("/livez", 10, 24, 10),
				LivenessProbe:  probe("/livez", 10, 8, 10),
				ReadinessProbe: probe("/readyz", 0, 3, 1),
			}},
			HostNetwork:       true,
			Priority:          ptr.To[int32](priorityNodeCritical),
			PriorityClassName: "system-node-critical",
			SecurityContext: &corev1.PodSecurityContext{
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Volumes: []corev1.Volume{hostFile("kubeconfig", Kubeconfig, corev1.HostPathFileOrCreate)},
		},
	}
	data, err := yaml.Marshal(pod)
	if err != nil {
		return nil, fmt.Errorf("encode the static pod of kube-scheduler: %w", err)
	}
	return data, nil
}

// probe returns a probe of the scheduler's own health; times are in seconds.
func probe(path string, initialDelay, failures, period int32) *corev1.Probe {
	return &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{
			Host: "127.0.0.1", Path: path, Port: intstr.FromString("probe-port"), Scheme: corev1.URISchemeHTTPS,
		}},
		InitialDelaySeconds: initialDelay,
		TimeoutSeconds:      15,
		FailureThreshold:    failures,
		PeriodSeconds:       period,
	}
}

func hostFile(name, path string, kind corev1.HostPathType) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: path, Type: ptr.To(kind)},
	}}
}

// SamePod reports whether a pod that kubelet reported was made from the manifest,
// as far as two of the lab's manifests differ: in the image, and in what wiring the
// scheduler to Divvy's extender puts into them.
func SamePod(manifest, reported *corev1.Pod) bool {
	if len(manifest.Spec.Containers) != len(reported.Spec.Containers) ||
		manifest.Annotations[schedconf.AnnotationHash] != reported.Annotations[schedconf.AnnotationHash] {
		return false
	}
	for i, wanted := range manifest.Spec.Containers {
		got := reported.Spec.Containers[i]
		if wanted.Image != got.Image || !slices.Equal(wanted.Command, got.Command) || !slices.Equal(wanted.Args, got.Args) {
			return false
		}
	}
	return true
}
