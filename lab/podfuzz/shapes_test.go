package podfuzz

import (
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// shape makes a pod of bytes. Most pods it makes are valid, because a pod that
// the API server refuses in any case says little. When the bytes end, all that
// follows is as plain as can be.
type shape struct {
	bytes []byte
	// valid asks for what Kubernetes and the webhook accept, most of the time.
	valid bool
}

// below returns a number from 0 to n-1.
func (s *shape) below(n int) int {
	if len(s.bytes) == 0 {
		return 0
	}
	b := int(s.bytes[0])
	s.bytes = s.bytes[1:]
	return b % n
}

// oneIn is true for one in n; never when the bytes have ended.
func (s *shape) oneIn(n int) bool { return s.below(n) == n-1 }

func pick[T any](s *shape, from ...T) T { return from[s.below(len(from))] }

// nasty are words that mean something to shells, kubelet, JSON or paths.
var nasty = []string{
	"", " ", "python", "x.py", "python x.py", "-c", "/bin/bash", "bash", "/bin/sh", "sh", "--", "-", "a b",
	"'", `"`, "a'b\"c", "$HOME", "$(NAME)", "$$(NAME)", "$(",
	"`id`", "; id", "&& id", "| id", "> /x", "<(id)", "\n", "a\nb", "\t", "#", "*", "~", "!", "\\", "\\\\", "a=b", "A=b python x.py",
	"cd /x; python x.py",
	"python x.py && echo hi", "bitfusion", "bitfusion run -n 1 -- x", "/usr/bin/bitfusion", "bitfusion_train.py", "exec python x.py",
	"if true; then id; fi", "\u00e4\u4e2d", "\u2028",
	"\x7f", "{}", "${amount}", "${filter}", "%s", "%!", "</script>", "~0~1/", "é", "\U0001f600", "a,b", "time python", "((", "!x", "x &",
	"<<EOF",
}

// text returns any text at all.
func (s *shape) text() string {
	switch s.below(8) {
	case 0:
		n := min(s.below(40), len(s.bytes))
		raw := s.bytes[:n]
		s.bytes = s.bytes[n:]
		return strings.ToValidUTF8(string(raw), "?")
	case 1:
		return pick(s, nasty...) + pick(s, nasty...)
	default:
		return pick(s, nasty...)
	}
}

func list[T any](s *shape, most int, one func() T) []T {
	var all []T
	for range s.below(most + 1) {
		all = append(all, one())
	}
	return all
}

// name is a name that Kubernetes accepts, now and then one of the webhook's.
func (s *shape) name(prefix string, i int) string {
	return prefix + strconv.Itoa(i)
}

func (s *shape) pod() *corev1.Pod {
	s.valid = !s.oneIn(5)
	pod := &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: "fuzz", Namespace: namespace, Annotations: s.annotations(), Labels: s.labels()},
	}
	spec := &pod.Spec
	spec.Volumes = s.volumes()
	spec.ResourceClaims = nil
	if s.oneIn(8) {
		spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "claim", ResourceClaimName: ptr.To("claim")}}
	}
	taken := map[string]bool{}
	for i := range 1 + s.below(3) {
		spec.Containers = append(spec.Containers, s.container(spec, taken, "c", i))
	}
	for i := range s.below(4) {
		c := s.container(spec, taken, "i", i)
		if s.oneIn(3) {
			c.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
		} else {
			c.Lifecycle, c.LivenessProbe = nil, nil
		}
		spec.InitContainers = append(spec.InitContainers, c)
	}
	s.podSettings(pod)
	return pod
}

func (s *shape) annotations() map[string]string {
	m := map[string]string{
		pool.ModeAnnotation:    pick(s, "all", "all", "injection", "injection", "ALL", "y", "on", "True"),
		pool.VersionAnnotation: pick(s, "450", "450", "401", "350", "250"),
		pool.OSAnnotation:      pick(s, "ubuntu18", "ubuntu20", "centos7", "centos8"),
	}
	if s.oneIn(4) {
		m[pool.FilterAnnotation] = pick(s, "server.hostname=bf",
			"server.hostname=bf-server server.addr=192.168.1.1 server.hostname=bf-server2", "device.id=0",
			`device.name="Tesla T4"`, "server.dirver-version=460.73.01", " ", "")
	}
	if s.below(4) > 0 {
		m[pool.EntrypointAnnotation] = pick(s, `["/entrypoint.sh"]`, `{"c0": ["/a b"], "c1": ["python", "x.py"], "i0": ["x"]}`,
			`["sh", "-c", "a; b"]`, `["$(X)"]`)
	}
	if s.oneIn(4) {
		m[pool.HomeAnnotation] = pick(s, "/root", "/home/user", "/", "/a b/", "/var//x")
	}
	if s.oneIn(5) {
		m[pool.StatusAnnotation] = pick(s, "injected", "INJECTED", "waiting", "")
	}
	for i := range s.below(3) {
		key := pick(s, "example.com/a.b-c_", "a", "sidecar.istio.io/status", "x.y/z") + strconv.Itoa(i)
		if !s.valid && s.oneIn(4) {
			key = "example.com/a~1b"
		}
		m[key] = s.text()
	}
	if !s.valid {
		for range s.below(4) {
			key := pick(s, pool.ModeAnnotation, pool.VersionAnnotation, pool.OSAnnotation, pool.FilterAnnotation, pool.EntrypointAnnotation,
				pool.HomeAnnotation)
			if value := s.text(); s.oneIn(3) {
				delete(m, key)
			} else {
				m[key] = value
			}
		}
	}
	if s.oneIn(30) {
		return nil
	}
	return m
}

func (s *shape) labels() map[string]string {
	var m map[string]string
	for i := range s.below(3) {
		if m == nil {
			m = map[string]string{}
		}
		m[pick(s, "app", "example.com/team", pool.ConvertedLabel, "divvy.dev/x")] = pick(s, "", "true", "false", "v"+strconv.Itoa(i))
	}
	return m
}

func (s *shape) volumes() []corev1.Volume {
	var volumes []corev1.Volume
	taken := map[string]bool{}
	for i := range s.below(5) {
		v := corev1.Volume{Name: pick(s, s.name("v", i), "ca", "client-dir", "pool-client-dir", "bitfusion-distro", "bitfusion-opt",
			"client-from-secret", "servers-from-secret", "pool-ca", "pool-ca-2")}
		if taken[v.Name] && s.valid {
			v.Name = s.name("v", i)
		}
		taken[v.Name] = true
		switch s.below(8) {
		case 0, 1:
			v.EmptyDir = &corev1.EmptyDirVolumeSource{Medium: pick(s, corev1.StorageMediumDefault, corev1.StorageMediumMemory)}
		case 2:
			v.Secret = &corev1.SecretVolumeSource{SecretName: pick(s, "own", pool.CASecret, pool.SingleSecret)}
		case 3:
			v.ConfigMap = &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "config"}}
		case 4:
			v.HostPath = &corev1.HostPathVolumeSource{Path: pick(s, "/home/benchmarks", "/bitfusion")}
		case 5:
			v.PersistentVolumeClaim = &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}
		case 6:
			v.Projected = &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{
				Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "own"}},
			}}}
		case 7:
			v.DownwardAPI = &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{{Path: "labels",
				FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels"}}}}
		}
		volumes = append(volumes, v)
	}
	return volumes
}

func (s *shape) container(spec *corev1.PodSpec, taken map[string]bool, prefix string, i int) corev1.Container {
	name := s.name(prefix, i)
	if s.oneIn(40) || !s.valid && s.oneIn(6) {
		name = pick(s, "populate", "c0", "i0", "")
	}
	if taken[name] && s.valid {
		name = s.name(prefix, i)
	}
	taken[name] = true
	c := corev1.Container{
		Name: name, Image: pick(s, "nvcr.io/nvidia/tensorflow:19.07-py3", "busybox"),
		Env: s.env(), Resources: s.resources(spec), VolumeMounts: s.mounts(spec),
		ImagePullPolicy: pick(s, "", corev1.PullAlways, corev1.PullIfNotPresent), Stdin: s.oneIn(9), TTY: s.oneIn(9),
		WorkingDir: pick(s, "", "", "/work"), SecurityContext: s.security(),
	}
	switch s.below(6) {
	case 0:
		c.Command = []string{"python x.py"}
	case 1:
		c.Command = []string{pick(s, "bash", "/bin/bash", "sh", "/bin/sh"), "-c", s.text()}
	case 2:
		c.Args = list(s, 3, s.text)
	case 3:
		c.Command = append([]string{pick(s, "python", "/bin/x", "a b", "bitfusion")}, list(s, 4, s.text)...)
	case 4:
		c.Command = []string{s.text()}
		c.Args = list(s, 3, s.text)
	case 5:
		c.Command = append([]string{"python"}, list(s, 3, s.text)...)
		c.Args = list(s, 3, s.text)
	}
	if s.oneIn(5) {
		c.EnvFrom = []corev1.EnvFromSource{{Prefix: "X_",
			ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "config"}}}}
	}
	if s.oneIn(6) {
		c.Ports = []corev1.ContainerPort{{ContainerPort: 8080, Name: "http"}}
	}
	if s.oneIn(6) {
		c.LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt32(8080)}}}
		c.Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	}
	if s.oneIn(12) {
		if !slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == "disk" }) {
			spec.Volumes = append(spec.Volumes, corev1.Volume{Name: "disk", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "disk"},
			}})
		}
		c.VolumeDevices = []corev1.VolumeDevice{{Name: "disk", DevicePath: pick(s, "/dev/x", "/dev/x", "/dev/y", "/bitfusion",
			"/opt/bitfusion")}}
	}
	return c
}

func (s *shape) env() []corev1.EnvVar {
	i := 0
	return list(s, 4, func() corev1.EnvVar {
		i++
		e := corev1.EnvVar{Name: pick(s, "A"+strconv.Itoa(i), "LD_LIBRARY_PATH", "LD_LIBRARY_PATH", "PATH", pool.ClientVariable, "x.y-z")}
		switch s.below(5) {
		case 0, 1:
			e.Value = pick(s, "/usr/lib", "", ":", "/a:/b:", "$(A1)", "${X}")
		case 2:
			e.Value = s.text()
		case 3:
			e.ValueFrom = &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}
		case 4:
			e.ValueFrom = &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{
				LocalObjectReference: corev1.LocalObjectReference{Name: "own"}, Key: "k",
			}}
		}
		return e
	})
}

func (s *shape) mounts(spec *corev1.PodSpec) []corev1.VolumeMount {
	var volumes []string
	for i := range spec.Volumes {
		if spec.Volumes[i].Name != "disk" {
			volumes = append(volumes, spec.Volumes[i].Name)
		}
	}
	if len(volumes) == 0 {
		return nil
	}
	i := 0
	return list(s, 3, func() corev1.VolumeMount {
		i++
		m := corev1.VolumeMount{Name: pick(s, volumes...), MountPath: "/m" + strconv.Itoa(i), ReadOnly: s.oneIn(4)}
		if s.oneIn(8) {
			m.MountPath = pick(s, "/root", "/etc/bitfusion", "/opt/bitfusion/x", "/bitfusion/x", "/client", "/bitfusion-distro") +
				strings.Repeat("/", i-1)
		}
		if s.oneIn(30) || !s.valid && s.oneIn(3) {
			m.MountPath = pick(s, "/bitfusion", "/bitfusion/", "/opt/bitfusion", "/etc/bitfusion/tls/ca.crt",
				"/root/.bitfusion/client.yaml", "//bitfusion", "/opt/./bitfusion")
		}
		if s.oneIn(6) {
			m.SubPath = "sub"
		}
		return m
	})
}

// resources are of one of the forms in which people write them.
func (s *shape) resources(spec *corev1.PodSpec) corev1.ResourceRequirements {
	limits, requests := corev1.ResourceList{}, corev1.ResourceList{}
	for _, of := range []struct {
		name            corev1.ResourceName
		request, limits []string
	}{
		{corev1.ResourceCPU, []string{"100m", "1", "0", "0.5"}, []string{"1", "2500m", "4"}},
		{corev1.ResourceMemory, []string{"64Mi", "1G", "1"}, []string{"1Gi", "2G", "3000000000"}},
		{corev1.ResourceEphemeralStorage, []string{"1Gi", "100M"}, []string{"2Gi", "10G"}},
	} {
		if s.oneIn(3) {
			requests[of.name] = resource.MustParse(pick(s, of.request...))
		}
		if s.oneIn(3) {
			limits[of.name] = resource.MustParse(pick(s, of.limits...))
		}
	}
	if s.oneIn(8) {
		limits["example.com/nic"] = resource.MustParse("1")
	}
	lists := []corev1.ResourceList{limits}
	switch s.below(4) {
	case 2:
		lists = []corev1.ResourceList{limits, requests}
	case 3:
		lists = []corev1.ResourceList{requests}
	}
	set := func(name corev1.ResourceName, value string) {
		for _, l := range lists {
			l[name] = resource.MustParse(value)
		}
	}
	if !s.oneIn(3) {
		set(pool.AmountResource, pick(s, "1", "2", "8", "1k"))
		switch s.below(3) {
		case 1:
			set(pool.PercentResource, pick(s, "1", "50", "100"))
		case 2:
			set(pool.MemoryResource, pick(s, "1M", "8000M", "16000M", "8Gi", "15999999999", "1120M"))
		}
	}
	if !s.valid && s.oneIn(3) {
		set(pick[corev1.ResourceName](s, pool.AmountResource, pool.PercentResource, pool.MemoryResource, pool.Resource,
			"bitfusion.io/gpu-mem"),
			pick(s, "0", "-1", "1500m", "101", "500k", "9e18", "1e30", "16001M"))
	}
	r := corev1.ResourceRequirements{Limits: limits, Requests: requests}
	if len(spec.ResourceClaims) > 0 && s.oneIn(2) {
		r.Claims = []corev1.ResourceClaim{{Name: "claim"}}
	}
	return r
}

func (s *shape) security() *corev1.SecurityContext {
	if !s.oneIn(3) {
		return nil
	}
	c := &corev1.SecurityContext{}
	switch s.below(6) {
	case 0:
		c.Privileged = ptr.To(true)
	case 1:
		c.RunAsNonRoot, c.RunAsUser = ptr.To(true), ptr.To[int64](1000)
	case 2:
		c.RunAsNonRoot = ptr.To(true)
	case 3:
		c.AllowPrivilegeEscalation, c.ReadOnlyRootFilesystem = ptr.To(false), ptr.To(true)
		c.SeccompProfile = &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeUnconfined}
	case 4:
		c.Capabilities = &corev1.Capabilities{Add: []corev1.Capability{"NET_ADMIN"}, Drop: []corev1.Capability{"ALL"}}
	case 5:
		if s.valid {
			break
		}
		c.WindowsOptions = &corev1.WindowsSecurityContextOptions{HostProcess: ptr.To(true)}
	}
	return c
}

func (s *shape) podSettings(pod *corev1.Pod) {
	spec := &pod.Spec
	spec.RestartPolicy = pick(s, "", corev1.RestartPolicyNever, corev1.RestartPolicyOnFailure, corev1.RestartPolicyAlways)
	switch s.below(16) {
	case 1:
		spec.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true)}
	case 2:
		spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: ptr.To[int64](1000), FSGroup: ptr.To[int64](2000)}
	case 3:
		spec.SecurityContext = &corev1.PodSecurityContext{
			SeccompProfile:     &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeLocalhost, LocalhostProfile: ptr.To("x.json")},
			SupplementalGroups: []int64{1},
		}
	case 4:
		spec.OS = &corev1.PodOS{Name: pick(s, corev1.Linux, corev1.Linux, corev1.Windows)}
	case 5:
		spec.NodeSelector = map[string]string{"kubernetes.io/os": pick(s, "linux", "linux", "windows"), "a": "b"}
	case 6:
		spec.HostNetwork, spec.DNSPolicy = true, corev1.DNSClusterFirstWithHostNet
	case 7:
		spec.ShareProcessNamespace = ptr.To(true)
	case 8:
		spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/wait"}}
	case 9:
		spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		spec.PriorityClassName = "high"
	case 10:
		spec.Overhead, spec.RuntimeClassName = corev1.ResourceList{"cpu": resource.MustParse("1")}, ptr.To("kata")
	case 11:
		spec.Resources = &corev1.ResourceRequirements{
			Requests: corev1.ResourceList{"cpu": resource.MustParse("16"), "memory": resource.MustParse("64Gi")},
			Limits:   corev1.ResourceList{"cpu": resource.MustParse("16"), "memory": resource.MustParse("64Gi")},
		}
	case 12:
		exists := []corev1.NodeSelectorRequirement{{Key: "a", Operator: corev1.NodeSelectorOpExists}}
		spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: exists}},
			},
		}}
	case 13:
		spec.HostUsers = ptr.To(false)
	case 14:
		spec.SecurityContext = &corev1.PodSecurityContext{WindowsOptions: &corev1.WindowsSecurityContextOptions{HostProcess: ptr.To(true)}}
		spec.HostNetwork = true
	case 15:
		if pod.Annotations != nil {
			pod.Annotations[pick(s, corev1.MirrorPodAnnotationKey, "container.apparmor.security.beta.kubernetes.io/c0")] = pick(s,
				"runtime/default", "x")
		}
	}
}
