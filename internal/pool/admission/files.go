package admission

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// Where a container finds what is not in pool.MountPath.
const (
	serversPath = "/etc/bitfusion/servers.conf"
	clientFile  = ".bitfusion/client.yaml"
)

// The init container that fills the volumes, and where it has them.
const (
	populateName   = "populate"
	populateDistro = "/bitfusion-distro"
	populateOpt    = "/workload-container-opt"
	populateClient = "/client"
	// populateToken is where it finds the token: in the home of root as the
	// guides show it, or, when it does not run as root and may not look in there,
	// in a folder of its own.
	populateToken        = "/root/.bitfusion"
	populateTokenNonRoot = "/bitfusion-token"
	// anyUser is who it runs as in pods that forbid root and name nobody.
	anyUser = 65532
)

// Volumes, under the names that the guides show.
const (
	distroVolume  = "bitfusion-distro"
	optVolume     = "bitfusion-opt"
	clientVolume  = "client-dir"
	caVolume      = "ca"
	tokenVolume   = "client-from-secret"
	serversVolume = "servers-from-secret"
	// volumePrefix is put before those whose name a user's volume has.
	volumePrefix = "pool-"
)

// files are the volumes of one pod that carry the client and its credentials,
// and the init container that fills them.
type files struct {
	client *pool.Client
	home   string
	// names are the volumes' names in this pod by their names in the guides.
	names   map[string]string
	volumes []corev1.Volume
	// populate is where the pod has the init container already, or -1.
	populate int
}

// plan decides on the names of the volumes. What an earlier run has added is
// used again.
func (c *conversion) plan() {
	f := files{client: c.client, home: c.home, names: map[string]string{}, populate: -1}
	for place, container := range containers(c.pod) {
		if container.Name != populateName {
			continue
		}
		f.populate = slices.IndexFunc(c.pod.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == populateName })
		if f.populate < 0 || !f.reuse(c.pod, container) {
			c.problemf("%s: the name is reserved for the init container that installs the client: rename your container", place)
		}
		break
	}
	taken := map[string]bool{}
	for i := range c.pod.Spec.Volumes {
		taken[c.pod.Spec.Volumes[i].Name] = true
	}
	for _, v := range f.wanted() {
		if f.names[v.Name] != "" {
			continue
		}
		guides := v.Name
		for i := 1; taken[v.Name]; i++ {
			v.Name = volumePrefix + guides
			if i > 1 {
				v.Name += "-" + strconv.Itoa(i)
			}
		}
		taken[v.Name] = true
		f.names[guides] = v.Name
		f.volumes = append(f.volumes, v)
	}
	c.files = f
}

// reuse takes the names of the volumes from an init container of an earlier
// run. It reports false when the init container is not one.
func (f *files) reuse(pod *corev1.Pod, populate *corev1.Container) bool {
	if len(populate.Command) != 3 || !strings.Contains(populate.Command[2], f.copyClient()) {
		return false
	}
	for at, guides := range map[string]string{populateDistro: distroVolume, populateClient: clientVolume, populateOpt: optVolume} {
		if at == populateOpt && f.client.OptSource == "" {
			continue
		}
		i := slices.IndexFunc(populate.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == at })
		if i < 0 {
			return false
		}
		name := populate.VolumeMounts[i].Name
		if v := findVolume(pod, name); v == nil || v.EmptyDir == nil {
			return false
		}
		f.names[guides] = name
	}
	for _, v := range f.wanted() {
		if v.Secret == nil {
			continue
		}
		for i := range pod.Spec.Volumes {
			have := &pod.Spec.Volumes[i]
			if have.Secret != nil && have.Secret.SecretName == v.Secret.SecretName && slices.EqualFunc(have.Secret.Items, v.Secret.Items,
				func(a, b corev1.KeyToPath) bool { return a.Key == b.Key && a.Path == b.Path }) {
				f.names[v.Name] = have.Name
			}
		}
	}
	return true
}

func findVolume(pod *corev1.Pod, name string) *corev1.Volume {
	for i := range pod.Spec.Volumes {
		if pod.Spec.Volumes[i].Name == name {
			return &pod.Spec.Volumes[i]
		}
	}
	return nil
}

func (f *files) wanted() []corev1.Volume {
	empty := func(name string) corev1.Volume {
		return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}
	}
	secret := func(name, from, key, to string) corev1.Volume {
		if f.client.SingleSecret {
			from = pool.SingleSecret
		}
		// Readable by all in the container, because nobody knows as whom the
		// workload runs; it has the token in any case.
		return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
			SecretName: from, Items: []corev1.KeyToPath{{Key: key, Path: to, Mode: ptr.To[int32](0o444)}},
		}}}
	}
	all := []corev1.Volume{empty(distroVolume)}
	if f.client.OptSource != "" {
		all = append(all, empty(optVolume))
	}
	return append(all, empty(clientVolume),
		secret(caVolume, pool.CASecret, pool.CAKey, "tls/ca.crt"),
		secret(tokenVolume, pool.ClientSecret, pool.ClientKey, pool.ClientKey),
		secret(serversVolume, pool.ServersSecret, pool.ServersKey, pool.ServersKey))
}

func (f *files) containerMounts() []corev1.VolumeMount {
	mounts := []corev1.VolumeMount{
		{MountPath: pool.CAPath, Name: f.names[caVolume], SubPath: "tls/ca.crt"},
		{MountPath: path.Join(f.home, clientFile), Name: f.names[clientVolume], SubPath: pool.ClientKey},
		// Not from the secret itself: the client insists on writing it.
		{MountPath: serversPath, Name: f.names[clientVolume], SubPath: pool.ServersKey},
		{MountPath: pool.MountPath, Name: f.names[distroVolume]},
	}
	if f.client.OptSource != "" {
		mounts = append(mounts, corev1.VolumeMount{MountPath: pool.OptPath, Name: f.names[optVolume]})
	}
	return mounts
}

func sameMount(a, b corev1.VolumeMount) bool {
	return cleanPath(a.MountPath) == cleanPath(b.MountPath) && a.Name == b.Name && a.SubPath == b.SubPath
}

// addMounts adds what is not there yet.
func addMounts(have, add []corev1.VolumeMount) []corev1.VolumeMount {
	for _, m := range add {
		if !slices.ContainsFunc(have, func(h corev1.VolumeMount) bool { return sameMount(h, m) }) {
			have = append(have, m)
		}
	}
	return have
}

// collisions names the user's mounts and devices that are where the client's
// must be.
func (f *files) collisions(place string, container *corev1.Container, mounts []corev1.VolumeMount) []string {
	var found []string
	for _, m := range container.VolumeMounts {
		if f.hides(m, mounts) {
			found = append(found, fmt.Sprintf("%s: volume %q is mounted at %s, which is reserved for the client: mount it elsewhere", place,
				admissionreview.Short(m.Name), admissionreview.Short(m.MountPath)))
		}
	}
	for _, ours := range mounts {
		for _, d := range container.VolumeDevices {
			if cleanPath(d.DevicePath) == ours.MountPath {
				found = append(found,
					fmt.Sprintf("%s: the device of volume %q is at %s, which is reserved for the client: use another path", place,
						admissionreview.Short(d.Name), admissionreview.Short(d.DevicePath)))
			}
		}
	}
	return found
}

// hides reports whether a user's mount is at a place of the client's mounts,
// below a file of them, or over the client's own folder.
func (f *files) hides(m corev1.VolumeMount, mounts []corev1.VolumeMount) bool {
	at := cleanPath(m.MountPath)
	if slices.ContainsFunc(mounts, func(ours corev1.VolumeMount) bool { return sameMount(m, ours) }) {
		return false
	}
	return at == f.client.Root || strings.HasPrefix(at, f.client.Root+"/") ||
		slices.ContainsFunc(mounts, func(ours corev1.VolumeMount) bool {
			return at == ours.MountPath || ours.SubPath != "" && strings.HasPrefix(at, ours.MountPath+"/")
		})
}

// cleanPath is where kubelet mounts: a path that is not absolute is below /.
func cleanPath(at string) string { return path.Clean("/" + at) }

// addFiles adds the volumes and the init container to the pod, or moves the
// init container that is there already before the first that needs it.
func (c *conversion) addFiles() {
	spec := &c.pod.Spec
	spec.Volumes = append(spec.Volumes, c.files.volumes...)
	first := slices.IndexFunc(spec.InitContainers, func(c corev1.Container) bool { return holds(c.Resources) })
	if first < 0 {
		first = len(spec.InitContainers)
	}
	switch at := c.files.populate; {
	case at < 0:
		spec.InitContainers = slices.Insert(spec.InitContainers, first, c.populate())
	case at > first:
		populate := spec.InitContainers[at]
		spec.InitContainers = slices.Insert(slices.Delete(spec.InitContainers, at, at+1), first, populate)
	}
}

func (c *conversion) populate() corev1.Container {
	f := &c.files
	security := &corev1.SecurityContext{
		AllowPrivilegeEscalation: ptr.To(false),
		Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
	token := populateToken
	if user, nonRoot := runsAs(c.pod); nonRoot {
		token = populateTokenNonRoot
		security.RunAsNonRoot, security.RunAsUser = ptr.To(true), ptr.To(user)
	}
	image := c.client.Image
	if image == "" {
		image = c.settings.ClientImage
	}
	mounts := []corev1.VolumeMount{
		{MountPath: populateDistro, Name: f.names[distroVolume]},
		{MountPath: populateClient, Name: f.names[clientVolume]},
		{MountPath: path.Join(token, pool.ClientKey), Name: f.names[tokenVolume], SubPath: pool.ClientKey},
		{MountPath: path.Join(token, pool.ServersKey), Name: f.names[serversVolume], SubPath: pool.ServersKey},
	}
	if c.client.OptSource != "" {
		mounts = append(mounts, corev1.VolumeMount{MountPath: populateOpt, Name: f.names[optVolume]})
	}
	return corev1.Container{
		Name:            populateName,
		Image:           image,
		ImagePullPolicy: c.settings.ClientPullPolicy,
		Command:         []string{"/bin/bash", "-c", f.script(token)},
		Resources:       populateResources(c.pod),
		SecurityContext: security,
		VolumeMounts:    mounts,
	}
}

// script copies the files of the chosen client and no other. It may run twice
// in one pod, when the pod's sandbox is made anew, and so overwrites. It needs
// nothing of its image but bash, cp and mkdir.
func (f *files) script(token string) string {
	steps := []string{
		f.copyClient(),
		"cp -f " + path.Join(token, pool.ClientKey) + " " + populateClient,
		// The client writes this one, as whoever the workload runs as. A file that
		// is there keeps its mode.
		"(umask 0 && : > " + path.Join(populateClient, pool.ServersKey) + ")",
		"cp " + path.Join(token, pool.ServersKey) + " " + populateClient,
	}
	if f.client.OptSource != "" {
		steps = append(steps, "cp -rf "+quote(f.client.OptSource)+"/* "+populateOpt)
	}
	return " " + strings.Join(steps, " && ") + " "
}

// copyClient is the step that copies the client's own folder to the same place
// below the volume.
func (f *files) copyClient() string {
	to := path.Join(populateDistro, strings.TrimPrefix(path.Dir(f.client.Root), pool.MountPath))
	step := "cp -rf " + quote(f.client.Root) + " " + quote(to+"/")
	if to != populateDistro {
		step = "mkdir -p " + quote(to) + " && " + step
	}
	return step
}

// quote makes one word of a path for the shell. $ is doubled for kubelet, which
// replaces $(NAME) in commands.
func quote(word string) string { return pool.Quote(strings.ReplaceAll(word, "$", "$$")) }

// runsAs tells whether the init container has to run as somebody other than
// root, and as whom: when the pod's other containers do, because then the
// namespace or the node may insist on it.
func runsAs(pod *corev1.Pod) (user int64, nonRoot bool) {
	all := pod.Spec.SecurityContext
	if all != nil && all.RunAsUser != nil {
		user = *all.RunAsUser
		nonRoot = user != 0
	}
	insists := true
	for _, c := range containers(pod) {
		own := c.SecurityContext
		switch {
		case own != nil && own.RunAsNonRoot != nil:
			insists = insists && *own.RunAsNonRoot
		case all != nil && all.RunAsNonRoot != nil:
			insists = insists && *all.RunAsNonRoot
		default:
			insists = false
		}
		if user == 0 && own != nil && own.RunAsUser != nil {
			user = *own.RunAsUser
		}
	}
	if all != nil && all.RunAsNonRoot != nil && *all.RunAsNonRoot {
		insists = true
	}
	if user == 0 {
		user = anyUser
	}
	return user, nonRoot || insists
}

// populateResources are the largest requests and limits of the containers, so
// that the init container adds nothing to what the pod takes and a quota that
// wants them is content.
func populateResources(pod *corev1.Pod) corev1.ResourceRequirements {
	var r corev1.ResourceRequirements
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
		request, requested := largest(pod, name, func(c *corev1.Container) corev1.ResourceList { return c.Resources.Requests })
		limit, limited := largest(pod, name, func(c *corev1.Container) corev1.ResourceList { return c.Resources.Limits })
		if requested {
			setQuantity(&r.Requests, name, request)
		}
		if limited {
			if limit.Cmp(request) < 0 {
				limit = request // of a container without a limit
			}
			setQuantity(&r.Limits, name, limit)
		}
	}
	return r
}

func largest(pod *corev1.Pod, name corev1.ResourceName, list func(*corev1.Container) corev1.ResourceList) (q resource.Quantity,
	found bool) {
	for i := range pod.Spec.Containers {
		if have, ok := list(&pod.Spec.Containers[i])[name]; ok && (!found || have.Cmp(q) > 0) {
			q, found = have.DeepCopy(), true
		}
	}
	return q, found
}

func setQuantity(list *corev1.ResourceList, name corev1.ResourceName, q resource.Quantity) {
	if *list == nil {
		*list = corev1.ResourceList{}
	}
	(*list)[name] = q
}
