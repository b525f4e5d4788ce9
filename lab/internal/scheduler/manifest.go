// Package scheduler writes what makes a kube-scheduler on a control-plane node:
// its static pod, in the form that kubeadm gives it, and the configuration that
// lets it consult Divvy's extender.
package scheduler

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// Names and places that kubeadm uses.
const (
	PodName      = "kube-scheduler"
	Namespace    = metav1.NamespaceSystem
	Kubeconfig   = "/etc/kubernetes/scheduler.conf"
	ManifestFile = "kube-scheduler.yaml"
	// SecurePort serves health and metrics on the loopback address.
	SecurePort = 10259
	// ConfigFile is the configuration that names Divvy's extender.
	ConfigFile = "/etc/kubernetes/divvy-scheduler-config.yaml"
	// AnnotationConfigHash holds the digest of that file in the static pod:
	// kubelet restarts a static pod when its manifest changes, not when a file
	// that it mounts does.
	AnnotationConfigHash = "divvy.dev/scheduler-config-hash"
)

// priorityNodeCritical is the value of the class system-node-critical. A
// static pod passes no admission that would fill it in.
const priorityNodeCritical = 2000001000

// Manifest returns the static pod of a kube-scheduler that runs the image. A
// config, the content of ConfigFile, is mounted and used when it is not empty.
func Manifest(image string, config []byte) ([]byte, error) {
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
	if len(config) > 0 {
		c := &pod.Spec.Containers[0]
		c.Command = append(c.Command, "--config="+ConfigFile)
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "divvy-config", MountPath: ConfigFile, ReadOnly: true})
		pod.Spec.Volumes = append(pod.Spec.Volumes, hostFile("divvy-config", ConfigFile, corev1.HostPathFile))
		pod.Annotations = map[string]string{AnnotationConfigHash: hash(config)}
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

func hash(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:16])
}

// SamePod reports whether a pod that kubelet reported was made from the
// manifest, as far as Manifest sets what differs between two of them.
func SamePod(manifest, reported *corev1.Pod) bool {
	if len(manifest.Spec.Containers) != len(reported.Spec.Containers) ||
		manifest.Annotations[AnnotationConfigHash] != reported.Annotations[AnnotationConfigHash] {
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
