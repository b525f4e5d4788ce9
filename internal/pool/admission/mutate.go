package admission

import (
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// Mutate returns the pod converted, or the pod itself when there is nothing to
// do. It does not change its argument. namespace is that of the request. The
// warnings are for the user although the pod is admitted. A pod that must be
// refused gives a *Denial.
//
// Each container that asks for GPUs is converted on its own, by its index, and
// what all of them share is added when it is not there yet. So a converted pod
// is returned as it is, and when another webhook has added a container that
// asks, only that one is converted.
func Mutate(pod *corev1.Pod, namespace string, catalog *pool.Catalog, s Settings) (converted *corev1.Pod, warnings []string, err error) {
	if slices.Contains(s.IgnoredNamespaces, namespace) {
		return pod, nil, nil
	}
	mode, err := pool.ParseMode(pod.Annotations[pool.ModeAnnotation])
	if err != nil {
		return nil, nil, &Denial{Problems: []string{err.Error()}}
	}
	switch {
	case mode != pool.ModeNone && asks(pod):
	case holdsAny(pod):
		return labelled(pod), nil, nil // converted before
	case mode == pool.ModeNone:
		return pod, nil, nil // Validate refuses what is left
	default:
		return pod, []string{fmt.Sprintf("annotation %s is %q, but no container requests GPUs of the pool: set %s in the limits of the "+
			"containers that need them",
			pool.ModeAnnotation, admissionreview.Short(pod.Annotations[pool.ModeAnnotation]), pool.AmountResource)}, nil
	}
	c := conversion{pod: pod.DeepCopy(), mode: mode, settings: s}
	if err := c.run(catalog); err != nil {
		return nil, nil, err
	}
	return c.pod, c.warnings, nil
}

// labelled returns a pod that was converted before with the label by which its
// credentials are brought, or the pod itself when it has it: copies of pods, such
// as kubectl debug --copy-to makes, lose their labels.
func labelled(pod *corev1.Pod) *corev1.Pod {
	if pod.Labels[pool.ConvertedLabel] == "true" || len(Secrets(pod)) == 0 {
		return pod
	}
	pod = pod.DeepCopy()
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	pod.Labels[pool.ConvertedLabel] = "true"
	return pod
}

type conversion struct {
	pod      *corev1.Pod // a copy, which it changes
	mode     pool.Mode
	settings Settings

	client      *pool.Client
	filters     []string
	home        string // where .bitfusion/client.yaml is looked for
	entrypoints entrypoints
	files       files

	problems  []string
	forbidden bool
	warnings  []string
}

// run converts the pod. It goes on after a problem as long as it can, so that
// a user learns of all of them at once.
func (c *conversion) run(catalog *pool.Catalog) error {
	c.choose(catalog)
	if c.client != nil {
		c.plan()
	}
	for place, container := range containers(c.pod) {
		if pool.Asks(container.Resources) {
			c.convert(place, container)
		}
	}
	if len(c.problems) > 0 {
		return &Denial{Problems: c.problems, Forbidden: c.forbidden}
	}
	c.addFiles()
	if c.pod.Annotations == nil {
		c.pod.Annotations = map[string]string{}
	}
	c.pod.Annotations[pool.StatusAnnotation] = pool.StatusInjected
	if c.pod.Labels == nil {
		c.pod.Labels = map[string]string{}
	}
	c.pod.Labels[pool.ConvertedLabel] = "true"
	return nil
}

func (c *conversion) problemf(format string, args ...any) {
	c.problems = append(c.problems, fmt.Sprintf(format, args...))
}

// choose reads what the annotations say for the whole pod.
func (c *conversion) choose(catalog *pool.Catalog) {
	if text := unsupported(c.pod); text != "" {
		c.problemf("%s", text)
	}
	annotations := c.pod.Annotations
	client, err := catalog.Find(annotations[pool.VersionAnnotation], annotations[pool.OSAnnotation])
	if err != nil {
		c.problems = append(c.problems, problems("", err)...)
	}
	if err == nil && client.Image == "" && c.settings.ClientImage == "" {
		// Nothing that the user could write would help.
		c.problemf("no image is configured for client %s for %s: an administrator must set pool.client.image", client.Version, client.OS)
		c.forbidden = len(c.problems) == 1
	} else if err == nil {
		c.client = client
	}

	filter, filtered := annotations[pool.FilterAnnotation]
	if c.filters, err = pool.ParseFilter(filter); err != nil {
		c.problems = append(c.problems, problems("", err)...)
	}
	c.home = pool.DefaultHome
	if home := annotations[pool.HomeAnnotation]; home != "" {
		if err := checkHome(home); err != nil {
			c.problemf("annotation %s: %v", pool.HomeAnnotation, err)
		}
		c.home = path.Clean(home)
	}
	switch c.mode {
	case pool.ModeInjection:
		if filtered {
			c.warnings = append(c.warnings, fmt.Sprintf("annotation %s has no effect in mode %s: pass the filters to the client in the "+
				"command", pool.FilterAnnotation, pool.ModeInjection))
		}
	case pool.ModeAll:
		if c.entrypoints, err = parseEntrypoints(annotations[pool.EntrypointAnnotation]); err != nil {
			c.problemf("annotation %s: %v", pool.EntrypointAnnotation, err)
		}
	}
}

// maxHome bounds a home folder, in bytes: Linux takes paths of 4 KiB.
const maxHome = 1 << 10

// checkHome refuses what cannot be the home folder of a container.
func checkHome(home string) error {
	if !path.IsAbs(home) || len(home) > maxHome || strings.Contains(home, ":") ||
		strings.ContainsFunc(home, func(r rune) bool { return r < ' ' || r == 0x7f }) ||
		slices.Contains(strings.Split(home, "/"), "..") {
		return fmt.Errorf("%q is not a folder: must be an absolute path without \"..\" and colons, of at most %d bytes, such as %s",
			admissionreview.Short(home), maxHome, pool.DefaultHome)
	}
	home = path.Clean(home)
	for _, taken := range []string{pool.MountPath, pool.OptPath, pool.CAPath, serversPath} {
		if home == taken || strings.HasPrefix(home, taken+"/") {
			return fmt.Errorf("%q is in %s, which is reserved for the client: must be elsewhere, such as %s", admissionreview.Short(home),
				taken, pool.DefaultHome)
		}
	}
	return nil
}

func (c *conversion) convert(place string, container *corev1.Container) {
	before := len(c.problems)
	request, err := pool.ParseRequest(container.Resources, c.settings.TotalMemoryMB)
	if err != nil {
		c.problems = append(c.problems, problems(place+": ", err)...)
	}
	if c.client == nil {
		return
	}
	mounts := c.files.containerMounts()
	c.problems = append(c.problems, c.files.collisions(place, container, mounts)...)
	if len(c.problems) > before {
		return
	}
	if c.mode == pool.ModeAll {
		c.wrap(place, container, request)
	}
	setUnits(&container.Resources, request.Units)
	container.VolumeMounts = addMounts(container.VolumeMounts, mounts)
	container.Env = addLibraryPath(container.Env, c.client.LibraryPath)
	if !slices.ContainsFunc(container.Env, func(e corev1.EnvVar) bool { return e.Name == pool.ClientVariable }) {
		container.Env = append(container.Env, corev1.EnvVar{Name: pool.ClientVariable, Value: c.client.Binary})
	}
}

func (c *conversion) wrap(place string, container *corev1.Container, request pool.Request) {
	command := container.Command
	if len(command) == 0 {
		if command = c.entrypoints.of(container.Name); len(command) == 0 {
			c.problemf("%s has no command, and the entrypoint of its image is unknown: set command, or add annotation %s with the "+
				"image's entrypoint as a JSON list, such as '[\"/entrypoint.sh\"]'",
				place, pool.EntrypointAnnotation)
			return
		}
	}
	command, args, called, err := c.client.Wrap(request, c.filters, command, container.Args)
	switch {
	case err != nil:
		c.problems = append(c.problems, problems(place+": ", err)...)
	case called:
		c.warnings = append(c.warnings, fmt.Sprintf("%s calls the client itself: its command is not changed, so the command determines "+
			"what it uses", place))
	default:
		container.Command, container.Args = command, args
	}
}

// setUnits replaces what a user wrote by what the scheduler counts.
func setUnits(r *corev1.ResourceRequirements, units int64) {
	for _, list := range []*corev1.ResourceList{&r.Requests, &r.Limits} {
		if *list == nil {
			*list = corev1.ResourceList{}
		}
		for _, name := range []corev1.ResourceName{pool.AmountResource, pool.PercentResource, pool.MemoryResource} {
			delete(*list, name)
		}
		(*list)[pool.Resource] = *resource.NewQuantity(units, resource.DecimalSI)
	}
}

// libraryPathVariable names the folders in which the dynamic linker looks first.
const libraryPathVariable = "LD_LIBRARY_PATH"

// addLibraryPath puts the client's libraries before those of the container. An
// empty element would be the working directory, so none is made.
func addLibraryPath(env []corev1.EnvVar, folder string) []corev1.EnvVar {
	if folder == "" {
		return env
	}
	last := -1
	for i := range env {
		if env[i].Name == libraryPathVariable {
			last = i // the last of several is what a program sees
		}
	}
	if last < 0 {
		return append(env, corev1.EnvVar{Name: libraryPathVariable, Value: folder})
	}
	switch old := env[last]; {
	case old.ValueFrom != nil:
		return append(env, corev1.EnvVar{Name: libraryPathVariable, Value: folder + ":$(" + libraryPathVariable + ")"})
	case old.Value == "":
		env[last].Value = folder
	case old.Value != folder && !strings.HasPrefix(old.Value, folder+":"):
		env[last].Value = folder + ":" + old.Value
	}
	return env
}
