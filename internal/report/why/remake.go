package why

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// remake has the commands that make a pod again with another specification, by what its
// controller is.
type remake struct {
	pod *v1.Pod
	// owner is as ownerText has it.
	owner string
}

// order adds the commands that change the amount of a resource of a container.
func (r *remake) order(c *Change, at place, name v1.ResourceName, value string, limits bool) {
	p := r.pod
	kind, owner, _ := strings.Cut(r.owner, "/")
	container := at.of(p).Name
	if kind != "deployment" && kind != "statefulset" {
		ops := []string{jsonPatch("add", at.path(name, "requests"), value)}
		if limits {
			ops = append([]string{jsonPatch("add", at.path(name, "limits"), value)}, ops...)
		}
		r.again(c, ops)
		return
	}
	amount := quoteShell(string(name) + "=" + value)
	command := fmt.Sprintf("kubectl set resources -n %s %s/%s -c %s --requests=%s", p.Namespace, kind, owner, container, amount)
	if limits {
		command += " --limits=" + amount
	}
	c.Text += fmt.Sprintf(" (%s, container %s)", r.owner, container)
	c.Commands = append(c.Commands, command)
	r.replaced(c, kind)
}

// again adds the commands that create the pod again with these operations of a JSON patch
// on it.
func (r *remake) again(c *Change, ops []string) {
	p := r.pod
	kind, owner, _ := strings.Cut(r.owner, "/")
	switch kind {
	case "":
		c.Commands = append(c.Commands, fmt.Sprintf(
			"kubectl patch pod -n %s %s --dry-run=client -o json --type=json -p %s | kubectl replace --force -f -", p.Namespace, p.Name,
			quoteShell("["+strings.Join(ops, ",")+"]")))
	case "deployment", "statefulset":
		text := strings.ReplaceAll(strings.Join(ops, ","), `"path":"/spec/`, `"path":"/spec/template/spec/`)
		c.Text += " (" + r.owner + ")"
		c.Commands = append(c.Commands, fmt.Sprintf("kubectl patch -n %s %s/%s --type=json -p %s", p.Namespace, kind, owner,
			quoteShell("["+text+"]")))
		r.replaced(c, kind)
	default:
		c.Text += " (in " + r.owner + ", which must be created again)"
	}
}

// replaced adds what a controller of a kind needs to replace its waiting pod.
func (r *remake) replaced(c *Change, kind string) {
	if kind == "statefulset" { // it waits for a pod of its old revision to be ready
		c.Commands = append(c.Commands, fmt.Sprintf("kubectl delete pod -n %s %s", r.pod.Namespace, r.pod.Name))
	}
}

// both is a change of annotations and one of the request. The pod is created again, so its
// annotations must be written where its request is.
func (r *remake) both(v variant, c Change) Change {
	c.Text = v.change.Text + ", and " + c.Text
	if r.owner == "" && len(c.Commands) == 1 {
		c.Commands = append(slices.Clone(v.change.Commands), c.Commands...)
		return c
	}
	c.Commands = nil
	return c
}
