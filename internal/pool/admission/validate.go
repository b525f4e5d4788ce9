package admission

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// Cluster is what Validate asks about the cluster. Its methods answer from
// memory and may be called by many goroutines.
type Cluster interface {
	// LargestAllocatable returns, for every resource name, the largest allocatable
	// quantity of any node that is ready and not cordoned, in the resource's own
	// integer units (milli-units for cpu). It is nil when no node is known.
	LargestAllocatable() map[corev1.ResourceName]int64
	// QuotaLimits returns the hard limits on requests.bitfusion.io/gpu in a
	// namespace by the name of the ResourceQuota; scoped quotas are left out.
	QuotaLimits(namespace string) map[string]int64
	// CredentialsAllowed returns nil when the pool's secrets are or may be brought
	// to the namespace, or says what an administrator has to do.
	CredentialsAllowed(namespace string, secrets []string) error
}

// Validate refuses a pod that uses the pool in a way that cannot work. It is
// called after all mutation. Its error is a *Denial.
//
// What counts is what the containers have, not what the annotations claim: a pod
// that says it was converted is looked at like any other.
func Validate(pod *corev1.Pod, namespace string, catalog *pool.Catalog, s Settings, cluster Cluster) (warnings []string, err error) {
	if slices.Contains(s.IgnoredNamespaces, namespace) {
		return nil, nil
	}
	v := validation{pod: pod, namespace: namespace, catalog: catalog, settings: s, cluster: cluster}
	v.mode, err = pool.ParseMode(pod.Annotations[pool.ModeAnnotation])
	if err != nil {
		v.wrong = append(v.wrong, err.Error())
	}
	v.leftovers()
	if holdsAny(pod) {
		if text := unsupported(pod); text != "" {
			v.wrong = append(v.wrong, text)
		}
		if _, err := pool.ParseFilter(pod.Annotations[pool.FilterAnnotation]); err != nil {
			v.wrong = append(v.wrong, problems("", err)...)
		}
		v.clients()
		v.nodes()
		v.quotas()
		if err := cluster.CredentialsAllowed(namespace, Secrets(pod)); err != nil {
			v.forbidden = append(v.forbidden, problems("", err)...)
		}
	}
	if len(v.wrong)+len(v.forbidden) == 0 {
		return nil, nil
	}
	// As long as something of the pod itself is wrong no permission would help.
	return nil, &Denial{Problems: slices.Concat(v.wrong, v.forbidden), Forbidden: len(v.wrong) == 0}
}

type validation struct {
	pod       *corev1.Pod
	namespace string
	mode      pool.Mode
	catalog   *pool.Catalog
	settings  Settings
	cluster   Cluster

	wrong     []string // mistakes of the pod
	forbidden []string // what somebody would have to allow
}

func (v *validation) wrongf(format string, args ...any) {
	v.wrong = append(v.wrong, fmt.Sprintf(format, args...))
}

// leftovers finds resources of the pool that nobody has converted.
func (v *validation) leftovers() {
	raw := false
	for place, c := range containers(v.pod) {
		for _, name := range resourceNames(c.Resources) {
			switch {
			case name == pool.Resource || !strings.HasPrefix(string(name), pool.Prefix):
			case name == pool.AmountResource || name == pool.PercentResource || name == pool.MemoryResource:
				raw = true
				if v.mode == pool.ModeNone {
					v.wrongf("%s: %s: %s is requested, but the pod does not select a mode: add annotation %s: %s (or %s)",
						place, name, written(c.Resources, name), pool.ModeAnnotation, pool.ModeAll, pool.ModeInjection)
				} else {
					v.wrongf("%s: %s: %s was not converted, so the pod would never run: the mutating webhook was not called for it; "+
						"contact an administrator",
						place, name, written(c.Resources, name))
				}
			case !pool.Asks(c.Resources): // otherwise the reading of the request tells it
				v.wrongf("%s: %s: %s is not a resource of the pool: must be %s with %s or %s", place, admissionreview.Short(string(name)),
					written(c.Resources, name), pool.AmountResource, pool.PercentResource, pool.MemoryResource)
			}
		}
		if pool.Asks(c.Resources) {
			if _, err := pool.ParseRequest(c.Resources, v.settings.TotalMemoryMB); err != nil {
				v.wrong = append(v.wrong, problems(place+": ", err)...)
			}
		}
	}
	if raw {
		if _, err := v.catalog.Find(v.pod.Annotations[pool.VersionAnnotation], v.pod.Annotations[pool.OSAnnotation]); err != nil {
			v.wrong = append(v.wrong, problems("", err)...)
		}
	}
}

// clients finds containers that take units of the pool without its client.
func (v *validation) clients() {
	for place, c := range containers(v.pod) {
		if holds(c.Resources) && !hasClient(v.pod, c) {
			v.wrongf("%s: %s: %s was set by hand, but the container has no client: remove it, request %s and %s or %s, and add "+
				"annotation %s: %s (or %s)",
				place, pool.Resource, written(c.Resources, pool.Resource), pool.AmountResource, pool.PercentResource, pool.MemoryResource,
				pool.ModeAnnotation, pool.ModeAll, pool.ModeInjection)
		}
	}
}

// hasClient reports whether a container has the client's files, and the pod the
// init container that fills them.
func hasClient(pod *corev1.Pod, container *corev1.Container) bool {
	volume := ""
	paths := map[string]bool{}
	for _, m := range container.VolumeMounts {
		at := cleanPath(m.MountPath)
		paths[at] = true
		if at == pool.MountPath {
			volume = m.Name
		}
		if strings.HasSuffix(at, "/"+clientFile) {
			paths[clientFile] = true
		}
	}
	if volume == "" || !paths[pool.CAPath] || !paths[serversPath] || !paths[clientFile] {
		return false
	}
	for i := range pod.Spec.InitContainers {
		populate := &pod.Spec.InitContainers[i]
		if populate == container {
			return false // it would run before its client is there
		}
		if populate.Name == populateName {
			return slices.ContainsFunc(populate.VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.MountPath == populateDistro && m.Name == volume
			})
		}
	}
	return false
}

func (v *validation) nodes() {
	largest := v.cluster.LargestAllocatable()
	if largest == nil {
		return
	}
	for place, c := range containers(v.pod) {
		for _, name := range resourceNames(c.Resources) {
			request, limit := c.Resources.Requests[name], c.Resources.Limits[name]
			switch {
			case request.IsZero() && limit.IsZero(), largest[name] > 0, strings.HasPrefix(string(name), pool.Prefix) &&
				name != pool.Resource:
			case name == pool.Resource:
				v.wrongf("%s: no ready node has %s (%s are requested): an administrator must check whether the DaemonSet "+
					"bitfusion-device-plugin runs", place, name, written(c.Resources, name))
			default:
				v.wrongf("%s: no ready node has resource %s (%s are requested): remove it, or correct its name", place,
					admissionreview.Short(string(name)), written(c.Resources, name))
			}
		}
	}
	if units, most := podUnits(v.pod), largest[pool.Resource]; most > 0 && units > most {
		v.wrongf("the pod requests %d of %s in total, but the largest node has %d: request less, or distribute the work over several pods",
			units, pool.Resource, most)
	}
}

// quotas finds quotas that could not hold the pod even when nothing else ran.
func (v *validation) quotas() {
	units := podUnits(v.pod)
	limits := v.cluster.QuotaLimits(v.namespace)
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		if limit := limits[name]; units > limit {
			v.forbidden = append(v.forbidden, fmt.Sprintf("the pod requests %d of %s (%d are one GPU), but quota %q of namespace %q "+
				"allows %d in total: request less, or ask for a larger quota",
				units, pool.Resource, pool.UnitsPerGPU, name, v.namespace, limit))
		}
	}
}

func written(r corev1.ResourceRequirements, name corev1.ResourceName) string {
	q, ok := r.Limits[name]
	if !ok {
		q = r.Requests[name]
	}
	return q.String()
}

// podUnits is what the whole pod takes of the pool at its peak, as kube-scheduler
// and quotas count it.
func podUnits(pod *corev1.Pod) int64 {
	units := resource.PodRequests(pod, resource.PodResourcesOptions{})[pool.Resource]
	if units.CmpInt64(math.MaxInt64) > 0 {
		return math.MaxInt64 // and not what remains of it in 64 bits
	}
	return units.Value()
}

func resourceNames(r corev1.ResourceRequirements) []corev1.ResourceName {
	names := slices.AppendSeq(slices.Collect(maps.Keys(r.Requests)), maps.Keys(r.Limits))
	slices.Sort(names)
	return slices.Compact(names)
}
