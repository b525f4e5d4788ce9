package admission

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/pool"
)

func emptyDir(name string) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}
}

// W29: volumes of users with our names stay theirs.
func TestVolumeNamesOfUsers(t *testing.T) {
	t.Parallel()
	pod := guidePod()
	for _, name := range []string{caVolume, clientVolume, "pool-" + clientVolume} {
		pod.Spec.Volumes = append(pod.Spec.Volumes, emptyDir(name))
		pod.Spec.Containers[0].VolumeMounts = append(pod.Spec.Containers[0].VolumeMounts,
			corev1.VolumeMount{Name: name, MountPath: "/" + name})
	}
	converted, _ := convert(t, pod)
	want := map[string]string{pool.CAPath: "pool-ca", "/root/.bitfusion/client.yaml": "pool-client-dir-2", pool.MountPath: distroVolume,
		"/" + caVolume: caVolume}
	for at, name := range want {
		if m := mountOf(converted.Spec.Containers[0], at); m == nil || m.Name != name {
			t.Errorf("%s has mount %v, want volume %s", at, m, name)
		}
	}
	if m := mountOf(converted.Spec.InitContainers[0], populateClient); m == nil || m.Name != "pool-client-dir-2" {
		t.Errorf("populate has mount %v", m)
	}
	seen := map[string]bool{}
	for _, v := range converted.Spec.Volumes {
		if seen[v.Name] {
			t.Errorf("two volumes %s", v.Name)
		}
		seen[v.Name] = true
	}
	// And they are found again when there is more to do.
	converted.Spec.Containers = append(converted.Spec.Containers, container("added", half(), pythonX))
	more, _ := convert(t, converted)
	if len(more.Spec.Volumes) != len(converted.Spec.Volumes) {
		t.Errorf("%d volumes, had %d", len(more.Spec.Volumes), len(converted.Spec.Volumes))
	}
	if m := mountOf(more.Spec.Containers[1], "/root/.bitfusion/client.yaml"); m == nil || m.Name != "pool-client-dir-2" {
		t.Errorf("the added container has mount %v", m)
	}
}

// W29: what is mounted where the client must be is refused, with both.
func TestMountPathsOfUsers(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"/bitfusion", "/bitfusion/", "/opt/bitfusion", "/etc/bitfusion/servers.conf", pool.CAPath,
		"/root/.bitfusion/client.yaml"} {
		pod := guidePod()
		pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "code", MountPath: at}}
		denied(t, pod, `container "bf-pkgs"`, `"code"`, at)
	}
	pod := guidePod()
	pod.Spec.Containers[0].VolumeDevices = []corev1.VolumeDevice{{Name: "disk", DevicePath: "/bitfusion"}}
	denied(t, pod, `container "bf-pkgs"`, `"disk"`, "/bitfusion")
	// Beside and below is free.
	for _, at := range []string{"/root", "/etc/bitfusion", "/opt/bitfusion/data", "/bitfusion2"} {
		pod := guidePod()
		pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "code", MountPath: at}}
		convert(t, pod)
	}
	// And so is everything in a container that asks for nothing.
	pod = guidePod()
	other := container("other", corev1.ResourceRequirements{})
	other.VolumeMounts = []corev1.VolumeMount{{Name: "code", MountPath: "/bitfusion"}}
	pod.Spec.Containers = append(pod.Spec.Containers, other)
	convert(t, pod)
}

// W29: the name of the init container.
func TestContainerNamedPopulate(t *testing.T) {
	t.Parallel()
	none := corev1.ResourceRequirements{}
	denied(t, initsOf(guidePod(), container("populate", none, "fetch")), `init container "populate"`, "rename")
	denied(t, poolPod(container("populate", half(), pythonX)), `container "populate"`, "rename")
	// One that looks like ours but brings another client is not.
	converted, _ := convert(t, guidePod())
	other := annotated(converted, pool.VersionAnnotation, "401")
	other.Spec.Containers = append(other.Spec.Containers, container("added", half(), pythonX))
	denied(t, other, `init container "populate"`)
}

func TestHome(t *testing.T) {
	t.Parallel()
	for home, at := range map[string]string{
		"": "/root/.bitfusion/client.yaml", "/root": "/root/.bitfusion/client.yaml",
		"/home/user/": "/home/user/.bitfusion/client.yaml", "/": "/.bitfusion/client.yaml",
	} {
		converted, _ := convert(t, annotated(guidePod(), pool.HomeAnnotation, home))
		if mountOf(converted.Spec.Containers[0], at) == nil {
			t.Errorf("home %q: mounts %v", home, converted.Spec.Containers[0].VolumeMounts)
		}
	}
	for _, home := range []string{"home", "/a/../b", "/a:b", "/a\nb", "/bitfusion", "/bitfusion/x", "/opt/bitfusion",
		"/etc/bitfusion/servers.conf/x"} {
		denied(t, annotated(guidePod(), pool.HomeAnnotation, home), pool.HomeAnnotation, "/root")
	}
}

// W7: limits of the init container are never below its requests, and left out
// where no container says any.
func TestPopulateResources(t *testing.T) {
	t.Parallel()
	request := func(pairs ...string) corev1.ResourceRequirements {
		return corev1.ResourceRequirements{Requests: quantities(append(pairs, pool.AmountResource, "1")...)}
	}
	tests := map[string]struct {
		containers []corev1.Container
		want       map[string]string
	}{
		"none": {[]corev1.Container{container("a", half(), pythonX)}, map[string]string{}},
		"W7: requests without limits": {[]corev1.Container{container("a", request("cpu", "2", "memory", "1Gi"), pythonX)},
			map[string]string{"requests.cpu": "2", "requests.memory": "1Gi"}},
		"the largest": {
			[]corev1.Container{container("a", asking(pool.AmountResource, "1", "cpu", "1", "memory", "4Gi"), pythonX),
				container("b", asking("cpu", "3", "ephemeral-storage", "1Gi"))},
			map[string]string{"limits.cpu": "3", "requests.cpu": "3", "limits.memory": "4Gi", "requests.memory": "4Gi",
				"limits.ephemeral-storage": "1Gi", "requests.ephemeral-storage": "1Gi"},
		},
		"W7: a limit below another's request": {
			[]corev1.Container{container("a", request("cpu", "2"), pythonX),
				container("b", corev1.ResourceRequirements{Requests: quantities("cpu", "500m"), Limits: quantities("cpu", "1")})},
			map[string]string{"limits.cpu": "2", "requests.cpu": "2"},
		},
		"other resources are not copied": {[]corev1.Container{container("a", asking(pool.AmountResource, "1", "nvidia.com/gpu", "1"),
			pythonX)}, map[string]string{}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			converted, _ := convert(t, poolPod(test.containers...))
			if diff := cmp.Diff(test.want, resourcesOf(converted.Spec.InitContainers[0])); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// S6: pods that do not run as root, and namespaces that insist on it.
func TestPopulateWithoutRoot(t *testing.T) {
	t.Parallel()
	own := func(names ...string) *corev1.Pod {
		pod := guidePod()
		pod.Spec.Containers = nil
		for _, name := range names {
			c := container(name, half(), pythonX)
			c.SecurityContext = &corev1.SecurityContext{RunAsNonRoot: ptr.To(true)}
			pod.Spec.Containers = append(pod.Spec.Containers, c)
		}
		return pod
	}
	shared := func(s corev1.PodSecurityContext) *corev1.Pod {
		pod := guidePod()
		pod.Spec.SecurityContext = &s
		return pod
	}
	mixed := own("a", "b")
	mixed.Spec.Containers[0].SecurityContext = nil
	ownUser := own("a")
	ownUser.Spec.Containers[0].SecurityContext.RunAsUser = ptr.To[int64](1000)
	tests := map[string]struct {
		pod  *corev1.Pod
		user *int64
	}{
		"as it comes":              {guidePod(), nil},
		"root by name":             {shared(corev1.PodSecurityContext{RunAsUser: ptr.To[int64](0)}), nil},
		"the pod has a user":       {shared(corev1.PodSecurityContext{RunAsUser: ptr.To[int64](1000)}), ptr.To[int64](1000)},
		"the pod forbids root":     {shared(corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true)}), ptr.To[int64](anyUser)},
		"all containers forbid it": {own("a", "b"), ptr.To[int64](anyUser)},
		"and one has a user":       {ownUser, ptr.To[int64](1000)},
		"one container forbids it": {mixed, nil},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			converted, _ := convert(t, test.pod)
			populate := converted.Spec.InitContainers[0]
			if diff := cmp.Diff(test.user, populate.SecurityContext.RunAsUser); diff != "" {
				t.Errorf("user -want +got:\n%s", diff)
			}
			if (test.user != nil) != (populate.SecurityContext.RunAsNonRoot != nil && *populate.SecurityContext.RunAsNonRoot) {
				t.Errorf("runAsNonRoot %v", populate.SecurityContext.RunAsNonRoot)
			}
			// /root is root's alone in most images.
			token := populateToken
			if test.user != nil {
				token = populateTokenNonRoot
			}
			if mountOf(populate, token+"/client.yaml") == nil || !strings.Contains(populate.Command[2], " "+token+"/client.yaml ") {
				t.Errorf("the token is not read from %s: %q, %v", token, populate.Command, populate.VolumeMounts)
			}
		})
	}
}

// The script, run by a real shell in a folder that stands for the container's
// root: twice, because kubelet does so when the pod's sandbox is made anew, and
// by whoever runs this test. S7: only the chosen client is copied. S6: the files
// can be read, and servers.conf written, by everybody.
func TestPopulateScript(t *testing.T) {
	t.Parallel()
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("needs bash")
	}
	for name, client := range map[string]pool.Client{
		"flat":   {Root: root450, OptSource: root450 + "/opt/bitfusion"},
		"deeper": {Root: "/bitfusion/vendor/a client", OptSource: "/bitfusion/vendor/a client/opt"},
		"no opt": {Root: root450},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			write := func(mode os.FileMode, elements ...string) {
				file := filepath.Join(append([]string{root}, elements...)...)
				if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(file, []byte(strings.Join(elements, "/")), mode); err != nil {
					t.Fatal(err)
				}
			}
			write(0o755, client.Root, "usr/bin/bitfusion")
			write(0o755, "/bitfusion/another/usr/bin/bitfusion")
			write(0o444, populateToken, "client.yaml")
			write(0o444, populateToken, "servers.conf")
			if client.OptSource != "" {
				write(0o644, client.OptSource, "lib/library.so")
			}
			for _, folder := range []string{populateDistro, populateClient, populateOpt} {
				if err := os.Mkdir(filepath.Join(root, folder), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			f := files{client: &client}
			script := f.script(populateToken)
			for _, folder := range []string{populateDistro, populateOpt, populateToken, populateClient + "/", "/bitfusion/"} {
				script = strings.ReplaceAll(script, " "+folder, " "+root+folder)
				script = strings.ReplaceAll(script, "'"+folder, "'"+root+folder)
			}
			script = strings.ReplaceAll(script, populateClient+" ", root+populateClient+" ")
			for range 2 {
				if out, err := exec.CommandContext(t.Context(), bash, "-c", script).CombinedOutput(); err != nil {
					t.Fatalf("%v\n%s\n%s", err, out, script)
				}
			}
			want := map[string]os.FileMode{
				filepath.Join(populateDistro, strings.TrimPrefix(client.Root, pool.MountPath), "usr/bin/bitfusion"): 0o755,
				filepath.Join(populateClient, "client.yaml"):                                                        0o444,
				filepath.Join(populateClient, "servers.conf"):                                                       0o666,
			}
			if client.OptSource != "" {
				want[filepath.Join(populateOpt, "lib/library.so")] = 0o644
			}
			for file, mode := range want {
				info, err := os.Stat(filepath.Join(root, file))
				if err != nil {
					t.Error(err)
				} else if info.Mode() != mode {
					t.Errorf("%s has mode %v, want %v", file, info.Mode(), mode)
				}
			}
			if _, err := os.Stat(filepath.Join(root, populateDistro, "another")); !os.IsNotExist(err) {
				t.Errorf("another client was copied: %v", err)
			}
		})
	}
}

func TestSecretsOfVolumes(t *testing.T) {
	t.Parallel()
	converted, _ := convert(t, guidePod())
	converted.Spec.Volumes = append(converted.Spec.Volumes,
		corev1.Volume{Name: "own", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "own"}}},
		corev1.Volume{Name: "both",
			VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{ConfigMap: &corev1.ConfigMapProjection{}},
				{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: pool.SingleSecret}}},
				{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: pool.CASecret}}},
			}}}})
	want := []string{pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret}
	slices.Sort(want)
	if diff := cmp.Diff(want, Secrets(converted)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if got := Secrets(guidePod()); len(got) > 0 {
		t.Errorf("a pod without any: %q", got)
	}
}
