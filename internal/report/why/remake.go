package why

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// remake has the commands that make a pod again with another specification, by what its
// controller is.
type remake struct {
	pod *v1.Pod
	// kind and owner are as controllerOf has them.
	kind, owner string
	// running are the controller's pods that run.
	running int
	// held says why a change of the template would not reach the pod, "" where it does.
	held func() string
}

func (s *Snapshot) remake(p *v1.Pod) remake {
	r := remake{pod: p}
	if r.kind, r.owner = controllerOf(p); r.kind == "" {
		return r
	}
	r.held = sync.OnceValue(func() string { return s.heldBack(p.Namespace, r.kind, r.owner) })
	o := Owner{Kind: r.kind, Namespace: p.Namespace, Name: r.owner}
	for _, other := range s.podsOf(&o) {
		if other.Status.Phase == v1.PodRunning && other.DeletionTimestamp == nil {
			r.running++
		}
	}
	return r
}

// heldBack says why a change of a controller's template may not reach its pods, "" where it
// does or that is not known.
func (s *Snapshot) heldBack(namespace, kind, name string) string {
	if s.Controller == nil {
		return ""
	}
	obj, err := s.Controller(kind, namespace, name)
	if err != nil {
		return fmt.Sprintf("whether %s/%s rolls it out is not known: %v", kind, name, err)
	}
	switch c := obj.(type) {
	case *appsv1.Deployment:
		if c.Spec.Paused {
			return fmt.Sprintf("%s/%s is paused and does not roll it out", kind, name)
		}
	case *appsv1.StatefulSet:
		if rolling := c.Spec.UpdateStrategy.RollingUpdate; rolling != nil && ptr.Deref(rolling.Partition, 0) > 0 {
			return fmt.Sprintf("%s/%s rolls it out only to pods from number %d on", kind, name, *rolling.Partition)
		}
	}
	return ""
}

// templated reports whether a controller has a template that can be changed.
func (r *remake) templated() bool { return r.kind == kindDeployment || r.kind == kindStatefulSet }

// order adds the commands that change the amount of a resource of a container.
func (r *remake) order(c *Change, at place, name v1.ResourceName, value string, limits bool) {
	container := at.of(r.pod).Name
	if !r.templated() {
		ops := []operation{{Op: "add", Path: at.path(name, "requests"), Value: value}}
		if limits {
			ops = append([]operation{{Op: "add", Path: at.path(name, "limits"), Value: value}}, ops...)
		}
		r.again(c, ops)
		return
	}
	amount := string(name) + "=" + value
	command := []string{"set", "resources", "-n", r.pod.Namespace, r.kind + "/" + r.owner, "-c", container, "--requests=" + amount}
	if limits {
		command = append(command, "--limits="+amount)
	}
	c.Text += fmt.Sprintf(" (%s/%s, container %s)", r.kind, r.owner, container)
	r.restarts(c)
	if !named(container) {
		return
	}
	resources := nested(value, "requests", string(name))
	if limits {
		resources["limits"] = map[string]string{string(name): value}
	}
	list := "containers"
	if at.init {
		list = "initContainers"
	}
	r.template(c, command, patchStrategic, nested([]any{map[string]any{"name": container, "resources": resources}},
		"spec", "template", "spec", list))
}

// again adds the commands that create the pod again with these operations of a JSON patch
// on it.
func (r *remake) again(c *Change, ops []operation) {
	p := r.pod
	switch {
	case r.kind == "":
		r.restarts(c)
		c.Commands = r.replace(ops)
	case r.templated():
		ops = slices.Clone(ops)
		for i := range ops {
			ops[i].Path = "/spec/template" + ops[i].Path
		}
		c.Text += fmt.Sprintf(" (%s/%s)", r.kind, r.owner)
		r.restarts(c)
		r.template(c, []string{"patch", "-n", p.Namespace, r.kind + "/" + r.owner, "--type=json", "-p", textOf(ops)},
			patchJSON, ops)
	case r.kind == kindJob:
		c.Text += fmt.Sprintf(" (in %s/%s, which must be created again)", r.kind, r.owner)
		r.restarts(c)
	default:
		c.Text += fmt.Sprintf(" (in %s/%s)", r.kind, r.owner)
		r.restarts(c)
	}
}

// restarts says what a change does to the controller's other pods, and what admits the pod before
// kube-scheduler does. They free what they have and need it again, which the copy does not show.
func (r *remake) restarts(c *Change) {
	if _, queued := r.pod.Labels[labelKueueQueue]; queued {
		c.Text += "; Kueue must admit it again"
		c.unsure = true
	}
	if r.running > 0 {
		c.Text += fmt.Sprintf("; restarts its %s", count(r.running, "running pod"))
		c.unsure = true
	}
}

// replace are the commands that create a pod without a controller again. The changed pod is
// written to a file first: once the old one is deleted, it is all that is left of it.
func (r *remake) replace(ops []operation) []string {
	p := r.pod
	if !named(p.Namespace, p.Name) {
		return nil
	}
	file := p.Name + ".json"
	return []string{
		kubectl("patch", "pod", "-n", p.Namespace, p.Name, "--dry-run=client", "-o", "json", "--type=json", "-p",
			textOf(ops)) + " > " + file,
		replaceCommand + file,
	}
}

const replaceCommand = "kubectl replace --force -f "

// file is where the commands of a change write the pod before they delete it; "" for none.
func (c *Change) file() string {
	for _, command := range c.Commands {
		if file, ok := strings.CutPrefix(command, replaceCommand); ok {
			return file
		}
	}
	return ""
}

// template adds the command that changes the template of the controller, and what a
// controller of the kind needs to replace its waiting pod.
func (r *remake) template(c *Change, command []string, of string, content any) {
	p := r.pod
	if why := r.held(); why != "" {
		c.Text += "; " + why
		c.unsure = true
	}
	if !named(p.Namespace, p.Name, r.owner) {
		return
	}
	c.Commands = append(c.Commands, kubectl(command...))
	c.patches(r.kind, p.Namespace, r.owner, of, content)
	if r.kind == kindStatefulSet { // it waits for a pod of its old revision to be ready
		c.Commands = append(c.Commands, kubectl("delete", "pod", "-n", p.Namespace, p.Name))
	}
}

// both is a change of annotations and one of the request. The pod is created again, so its
// annotations must be written where its request is.
func (r *remake) both(first, c Change) Change {
	c.Text = first.Text + ", and " + c.Text
	if r.kind == "" && len(first.Commands) > 0 && len(c.Commands) > 0 {
		c.Commands = append(slices.Clone(first.Commands), c.Commands...)
		c.Patch = append(slices.Clone(first.Patch), c.Patch...)
		return c
	}
	c.Commands, c.Patch = nil, nil
	return c
}
