package schedconf

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/divvy-gpu/divvy/internal/install/schedconf/yamledit"
)

// maxSize of a manifest or a configuration, in bytes. Those of real clusters
// have some thousands.
const maxSize = 1 << 20

// volumeName is the name of the volume that Wire adds; where another has it, a
// number is added.
const volumeName = "divvy-scheduler-config"

// A pod is a static pod's manifest with one kube-scheduler in it.
type pod struct {
	name      string // of the file, for messages
	doc       *yamledit.Doc
	container int
	command   command
	mounts    []mount
}

// A mount is where a part of the node is in the container.
type mount struct {
	path     string // in the container
	volume   string
	host     string // on the node; empty for volumes of other kinds
	readOnly bool
}

func (p *pod) errorf(format string, args ...any) error {
	return fmt.Errorf("%s: %w", p.name, fmt.Errorf(format, args...))
}

// readPod finds the scheduler in a manifest.
func readPod(name string, data []byte) (*pod, error) {
	if name == "" {
		name = "the manifest"
	}
	p := &pod{name: name}
	if len(data) > maxSize {
		return nil, p.errorf("%d bytes, but a manifest of kube-scheduler has at most %d", len(data), maxSize)
	}
	doc, err := yamledit.Parse(data)
	if err != nil {
		return nil, p.errorf("%w", err)
	}
	return p.with(doc)
}

// with returns the pod for a changed manifest.
func (p *pod) with(doc *yamledit.Doc) (*pod, error) {
	p = &pod{name: p.name, doc: doc}
	if kind, api := scalarOf(doc.At("kind")), scalarOf(doc.At("apiVersion")); kind != "Pod" || api != "v1" {
		return nil, p.errorf("holds %s of apiVersion %s, not a Pod of v1", orNothing(kind), orNothing(api))
	}
	if scalarOf(doc.At("metadata", "name")) == "" {
		return nil, p.errorf("metadata.name is missing")
	}
	containers := doc.At("spec", "containers")
	if containers == nil || containers.Kind != yaml.SequenceNode {
		return nil, p.errorf("spec.containers is not a list")
	}
	var found []int
	var named []int
	var problems []error
	for i, c := range containers.Content {
		c = yamledit.Resolve(c)
		if c.Kind != yaml.MappingNode {
			return nil, p.errorf("line %d: spec.containers[%d] is not a mapping", c.Line, i)
		}
		cmd, err := readCommand(doc, i)
		if err != nil {
			problems = append(problems, p.errorf("%w", err))
		}
		isNamed := scalarOf(yamledit.Get(c, "name")) == "kube-scheduler"
		if cmd.found {
			found = append(found, i)
		}
		if isNamed {
			named = append(named, i)
		}
	}
	if len(found) == 0 {
		if len(problems) > 0 {
			return nil, problems[0]
		}
		found = named
	}
	switch {
	case len(found) == 0:
		return nil, p.errorf("no container runs kube-scheduler")
	case len(found) > 1:
		return nil, p.errorf("%d containers run kube-scheduler, and only one can be configured", len(found))
	}
	p.container = found[0]
	var err error
	if p.command, err = readCommand(doc, p.container); err != nil {
		return nil, p.errorf("%w", err)
	}
	if !p.command.found && p.command.opaque {
		return nil, p.errorf("the command of container kube-scheduler does not run kube-scheduler directly, "+
			"so its flags cannot be read: %s", strings.Join(p.command.words(), " "))
	}
	if p.mounts, err = p.readMounts(); err != nil {
		return nil, err
	}
	return p, nil
}

// at returns a path below the scheduler's container.
func (p *pod) at(steps ...any) []any {
	return append([]any{"spec", "containers", p.container}, steps...)
}

// text returns a field of the container.
func (p *pod) text(field string) (string, error) {
	n := p.doc.At(p.at(field)...)
	if yamledit.IsNull(n) {
		return "", nil
	}
	if n.Kind != yaml.ScalarNode {
		return "", p.errorf("line %d: %s of the container is not a text", n.Line, field)
	}
	return n.Value, nil
}

func (p *pod) annotation(key string) string {
	return scalarOf(p.doc.At("metadata", "annotations", key))
}

// sequence returns the elements of an optional list of mappings.
func (p *pod) sequence(path ...any) ([]*yaml.Node, error) {
	n := p.doc.At(path...)
	if yamledit.IsNull(n) {
		return nil, nil
	}
	if n.Kind != yaml.SequenceNode {
		return nil, p.errorf("line %d: %v is not a list", n.Line, path[len(path)-1])
	}
	out := make([]*yaml.Node, len(n.Content))
	for i := range n.Content {
		out[i] = yamledit.Resolve(n.Content[i])
		if out[i].Kind != yaml.MappingNode {
			return nil, p.errorf("line %d: %v[%d] is not a mapping", out[i].Line, path[len(path)-1], i)
		}
	}
	return out, nil
}

func (p *pod) readMounts() ([]mount, error) {
	volumes, err := p.sequence("spec", "volumes")
	if err != nil {
		return nil, err
	}
	hosts := map[string]string{}
	for _, v := range volumes {
		hosts[scalarOf(yamledit.Get(v, "name"))] = scalarOf(yamledit.Get(yamledit.Get(v, "hostPath"), "path"))
	}
	list, err := p.sequence(p.at("volumeMounts")...)
	if err != nil {
		return nil, err
	}
	var out []mount
	for _, n := range list {
		m := mount{
			path: scalarOf(yamledit.Get(n, "mountPath")), volume: scalarOf(yamledit.Get(n, "name")),
			readOnly: scalarOf(yamledit.Get(n, "readOnly")) == "true",
		}
		if m.path == "" {
			continue
		}
		m.path = path.Clean(m.path)
		if host := hosts[m.volume]; host != "" && scalarOf(yamledit.Get(n, "subPathExpr")) == "" {
			m.host = path.Join(host, scalarOf(yamledit.Get(n, "subPath")))
		}
		out = append(out, m)
	}
	return out, nil
}

// mountOf returns the innermost mount that holds a path of the container.
func (p *pod) mountOf(inContainer string) (mount, bool) {
	var best mount
	found := false
	for _, m := range p.mounts {
		if _, ok := below(m.path, inContainer); ok && (!found || len(m.path) > len(best.path)) {
			best, found = m, true
		}
	}
	return best, found
}

// hostPath returns the file of the node that the container sees at a path.
func (p *pod) hostPath(flag, inContainer string) (string, error) {
	if !path.IsAbs(inContainer) {
		dir, err := p.text("workingDir")
		if err != nil {
			return "", err
		}
		if !path.IsAbs(dir) {
			return "", p.errorf("--%s=%s is not an absolute path, and the container has no workingDir", flag, inContainer)
		}
		inContainer = path.Join(dir, inContainer)
	}
	inContainer = path.Clean(inContainer)
	m, ok := p.mountOf(inContainer)
	if !ok {
		return "", p.errorf("--%s=%s is not in a volume of the container, so it cannot be read: mount it from the node with hostPath",
			flag, inContainer)
	}
	if m.host == "" {
		return "", p.errorf("--%s=%s is in volume %q, which is not a hostPath, so it cannot be read: store it on the node",
			flag, inContainer, m.volume)
	}
	rel, _ := below(m.path, inContainer)
	return path.Join(m.host, rel), nil
}

// containerPath returns where the container sees a file of the node.
func (p *pod) containerPath(host string) (string, bool) {
	for _, m := range p.mounts {
		if m.host == "" {
			continue
		}
		rel, ok := below(path.Clean(m.host), host)
		if !ok {
			continue
		}
		// Another mount may be in front of it.
		at := path.Join(m.path, rel)
		if back, err := p.hostPath("config", at); err == nil && back == host {
			return at, true
		}
	}
	return "", false
}

// below returns the rest of a path that is at or below a folder.
func below(dir, file string) (string, bool) {
	if dir == file {
		return "", true
	}
	if dir == "/" {
		return strings.TrimPrefix(file, "/"), true
	}
	return strings.CutPrefix(file, dir+"/")
}

// mountFile makes the container see a file of the node, and returns where.
func (p *pod) mountFile(host string) (*pod, string, error) {
	if at, ok := p.containerPath(host); ok {
		return p, at, nil
	}
	// Inside of another volume the file's place could not be made.
	at := host
	for _, dir := range []string{"/etc/divvy-scheduler", "/divvy-scheduler", ""} {
		m, inside := p.mountOf(at)
		if !inside {
			break
		}
		if dir == "" {
			return nil, "", p.errorf("volume %q is mounted at %s, so %s cannot be mounted in the container", m.volume, m.path, host)
		}
		at = path.Join(dir, path.Base(host))
	}
	volumes, err := p.sequence("spec", "volumes")
	if err != nil {
		return nil, "", err
	}
	name := volumeName
	for i := 2; slices.ContainsFunc(volumes, func(v *yaml.Node) bool { return scalarOf(yamledit.Get(v, "name")) == name }); i++ {
		name = volumeName + "-" + strconv.Itoa(i)
	}
	q, err := p.push(p.at("volumeMounts"), yamledit.Map{{Key: "mountPath", Value: at}, {Key: "name", Value: name},
		{Key: "readOnly", Value: true}})
	if err != nil {
		return nil, "", err
	}
	q, err = q.push([]any{"spec", "volumes"}, yamledit.Map{
		{Key: "hostPath", Value: yamledit.Map{{Key: "path", Value: host}, {Key: "type", Value: "File"}}},
		{Key: "name", Value: name},
	})
	return q, at, err
}

// unmountFile takes out what mountFile put in, or GCUShare's config manager, which
// names the volume otherwise: the file is about to be removed, and a volume of it
// would make kubelet create an empty one.
func (p *pod) unmountFile(host string) (*pod, error) {
	volumes, err := p.sequence("spec", "volumes")
	if err != nil {
		return nil, err
	}
	for i, v := range slices.Backward(volumes) {
		name := scalarOf(yamledit.Get(v, "name"))
		if name == "" || scalarOf(yamledit.Get(yamledit.Get(v, "hostPath"), "path")) != host {
			continue
		}
		list, err := p.sequence(p.at("volumeMounts")...)
		if err != nil {
			return nil, err
		}
		for j, m := range slices.Backward(list) {
			if scalarOf(yamledit.Get(m, "name")) != name {
				continue
			}
			if p, err = p.pull(p.at("volumeMounts"), j); err != nil {
				return nil, err
			}
		}
		if p.inUse(name) {
			continue
		}
		if p, err = p.pull([]any{"spec", "volumes"}, i); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// inUse reports whether some container mounts a volume.
func (p *pod) inUse(volume string) bool {
	for _, kind := range []string{"containers", "initContainers"} {
		containers := p.doc.At("spec", kind)
		if containers == nil {
			continue
		}
		for _, c := range containers.Content {
			mounts := yamledit.Get(c, "volumeMounts")
			if mounts == nil {
				continue
			}
			for _, m := range mounts.Content {
				if scalarOf(yamledit.Get(m, "name")) == volume {
					return true
				}
			}
		}
	}
	return false
}

// push puts an element at the end of a list, which is made if it is missing.
func (p *pod) push(path []any, value any) (*pod, error) {
	doc, err := push(p.doc, path, value)
	if err != nil {
		return nil, p.errorf("%w", err)
	}
	return p.with(doc)
}

func push(d *yamledit.Doc, path []any, value any) (*yamledit.Doc, error) {
	list := d.At(path...)
	if yamledit.IsNull(list) || list.Kind == yaml.SequenceNode && len(list.Content) == 0 {
		key, _ := path[len(path)-1].(string)
		return d.Put(path[:len(path)-1], key, yamledit.List{value})
	}
	return d.Insert(path, len(list.Content), value)
}

// pull takes an element out of a list, and the list with the last of them.
func (p *pod) pull(path []any, position int) (*pod, error) {
	target := append(slices.Clone(path), position)
	if n := p.doc.At(path...); n != nil && len(n.Content) == 1 {
		target = path
	}
	doc, err := p.doc.Delete(target...)
	if err != nil {
		return nil, p.errorf("%w", err)
	}
	return p.with(doc)
}

// annotate sets an annotation, or takes it out when the value is empty.
func (p *pod) annotate(key, value string) (*pod, error) {
	all := p.doc.At("metadata", "annotations")
	n := yamledit.Get(all, key)
	var doc *yamledit.Doc
	var err error
	switch {
	case scalarOf(n) == value && (n == nil) == (value == ""):
		return p, nil
	case value == "" && len(all.Content) == 2:
		doc, err = p.doc.Delete("metadata", "annotations")
	case value == "":
		doc, err = p.doc.Delete("metadata", "annotations", key)
	case n != nil && n.Kind == yaml.ScalarNode:
		doc, err = p.doc.Replace([]any{"metadata", "annotations", key}, value)
	case yamledit.IsNull(p.doc.At("metadata")):
		doc, err = p.doc.Put(nil, "metadata", yamledit.Map{{Key: "annotations", Value: yamledit.Map{{Key: key, Value: value}}}})
	case yamledit.IsNull(all) || len(all.Content) == 0:
		doc, err = p.doc.Put([]any{"metadata"}, "annotations", yamledit.Map{{Key: key, Value: value}})
	default:
		doc, err = p.doc.Put([]any{"metadata", "annotations"}, key, value)
	}
	if err != nil {
		return nil, p.errorf("%w", err)
	}
	return p.with(doc)
}

// owner returns the user and the group that the scheduler runs as; 0 is root.
func (p *pod) owner() (uid, gid int) {
	get := func(key string) int {
		for _, n := range []*yaml.Node{p.doc.At(p.at("securityContext", key)...), p.doc.At("spec", "securityContext", key)} {
			if !yamledit.IsNull(n) {
				if id, err := strconv.Atoi(n.Value); err == nil && id >= 0 {
					return id
				}
			}
		}
		return 0
	}
	return get("runAsUser"), get("runAsGroup")
}

// scalarOf returns the text of a scalar, and nothing for all else.
func scalarOf(n *yaml.Node) string {
	n = yamledit.Resolve(n)
	if n == nil || n.Kind != yaml.ScalarNode || yamledit.IsNull(n) {
		return ""
	}
	return n.Value
}

func orNothing(s string) string {
	if s == "" {
		return "nothing"
	}
	return strconv.Quote(s)
}
