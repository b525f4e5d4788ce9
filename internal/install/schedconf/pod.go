package schedconf

import (
	"cmp"
	"path"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// volumeName is the name of the volume that Wire adds; where another has it, a
// number is added.
const volumeName = "divvy-scheduler-config"

// A pod is a static pod's manifest with one kube-scheduler in it.
type pod struct {
	doc       *document
	container int
	command   command
	mounts    []mount
	// program is the image of divvy-scheduler that ran in the place of kube-scheduler, "" for
	// none. The document is that without it.
	program string
}

// A mount is where a part of the node is in the container.
type mount struct {
	path   string // in the container
	volume string
	host   string // on the node; empty for volumes of other kinds
}

func readPod(name string, data []byte) (*pod, error) {
	doc, err := read(cmp.Or(name, "the manifest"), data)
	if err != nil {
		return nil, err
	}
	p := &pod{doc: doc}
	var keyFolder string
	if p.program, keyFolder, err = doc.unreplace(); err != nil {
		return nil, err
	}
	if kind, api := scalarAt(p.doc.root, "kind"), scalarAt(p.doc.root, "apiVersion"); kind != "Pod" || api != "v1" {
		return nil, p.doc.errorf("holds %s of apiVersion %s, not a Pod of v1", orNothing(kind), orNothing(api))
	}
	if scalarAt(p.doc.root, "metadata", "name") == "" {
		return nil, p.doc.errorf("metadata.name is missing")
	}
	containers := p.doc.at("spec", "containers")
	if containers == nil || containers.Kind != yaml.SequenceNode {
		return nil, p.doc.errorf("spec.containers is not a list")
	}
	var found, named []int
	var problems []error
	for i, c := range containers.Content {
		if c = resolve(c); c.Kind != yaml.MappingNode {
			return nil, p.doc.errorf("line %d: spec.containers[%d] is not a mapping", c.Line, i)
		}
		cmd, err := readCommand(c)
		if err != nil {
			problems = append(problems, p.doc.errorf("%w", err))
		}
		if cmd.found {
			found = append(found, i)
		}
		if scalarAt(c, "name") == "kube-scheduler" {
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
		return nil, p.doc.errorf("no container runs kube-scheduler")
	case len(found) > 1:
		return nil, p.doc.errorf("%d containers run kube-scheduler, and only one can be configured", len(found))
	}
	p.container = found[0]
	if p.command, err = readCommand(p.doc.at(p.at()...)); err != nil {
		return nil, p.doc.errorf("%w", err)
	}
	if !p.command.found && p.command.opaque {
		return nil, p.doc.errorf("the command of container kube-scheduler does not run kube-scheduler directly, "+
			"so its flags cannot be read: %s", strings.Join(p.command.words(), " "))
	}
	if keyFolder != "" {
		if err := p.unmountFile(keyFolder); err != nil {
			return nil, err
		}
	}
	if err := p.readMounts(); err != nil {
		return nil, err
	}
	return p, nil
}

func (p *pod) at(steps ...any) []any {
	return append([]any{"spec", "containers", p.container}, steps...)
}

func (p *pod) text(field string) (string, error) {
	n := p.doc.at(p.at(field)...)
	if isNull(n) {
		return "", nil
	}
	if n.Kind != yaml.ScalarNode {
		return "", p.doc.errorf("line %d: %s of the container is not a text", n.Line, field)
	}
	return n.Value, nil
}

func (p *pod) annotation(key string) string {
	return scalarAt(p.doc.root, "metadata", "annotations", key)
}

func (p *pod) readMounts() error {
	volumes, err := p.doc.mappings("spec", "volumes")
	if err != nil {
		return err
	}
	hosts := map[string]string{}
	for _, v := range volumes {
		hosts[scalarAt(v, "name")] = scalarAt(v, "hostPath", "path")
	}
	list, err := p.doc.mappings(p.at("volumeMounts")...)
	if err != nil {
		return err
	}
	for _, n := range list {
		m := mount{path: scalarAt(n, "mountPath"), volume: scalarAt(n, "name")}
		if m.path == "" {
			continue
		}
		m.path = path.Clean(m.path)
		if host := hosts[m.volume]; host != "" && scalarAt(n, "subPathExpr") == "" {
			m.host = path.Join(host, scalarAt(n, "subPath"))
		}
		p.mounts = append(p.mounts, m)
	}
	return nil
}

// mountOf returns the innermost mount that holds a path of the container.
func mountOf(mounts []mount, inContainer string) (mount, bool) {
	var best mount
	found := false
	for _, m := range mounts {
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
			return "", p.doc.errorf("--%s=%s is not an absolute path, and the container has no workingDir", flag, inContainer)
		}
		inContainer = path.Join(dir, inContainer)
	}
	inContainer = path.Clean(inContainer)
	m, ok := mountOf(p.mounts, inContainer)
	if !ok {
		return "", p.doc.errorf("--%s=%s is not in a volume of the container, so it cannot be read: mount it from the node with hostPath",
			flag, inContainer)
	}
	if m.host == "" {
		return "", p.doc.errorf("--%s=%s is in volume %q, which is not a hostPath, so it cannot be read: store it on the node",
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

// mount makes the container see a file or a folder of the node, and returns where.
func (p *pod) mount(host, kind string) (string, error) {
	if at, ok := p.containerPath(host); ok {
		return at, nil
	}
	// Inside of another volume the file's place could not be made.
	at := host
	for _, dir := range []string{"/etc/divvy-scheduler", "/divvy-scheduler", ""} {
		m, inside := mountOf(p.mounts, at)
		if !inside {
			break
		}
		if dir == "" {
			return "", p.doc.errorf("volume %q is mounted at %s, so %s cannot be mounted in the container", m.volume, m.path, host)
		}
		at = path.Join(dir, path.Base(host))
	}
	volumes, err := p.doc.mappings("spec", "volumes")
	if err != nil {
		return "", err
	}
	name := volumeName
	for i := 2; slices.ContainsFunc(volumes, func(v *yaml.Node) bool { return scalarAt(v, "name") == name }); i++ {
		name = volumeName + "-" + strconv.Itoa(i)
	}
	err = p.doc.insert(p.at("volumeMounts"), -1, map[string]any{"mountPath": at, "name": name, "readOnly": true})
	if err == nil {
		err = p.doc.insert([]any{"spec", "volumes"}, -1,
			map[string]any{"hostPath": map[string]any{"path": host, "type": kind}, "name": name})
	}
	if err != nil {
		return "", err
	}
	return at, nil
}

// unmountFile takes out what mount put in, or GCUShare's config manager, which
// names the volume otherwise: the file is about to be removed, and a volume of it
// would make kubelet create an empty one.
func (p *pod) unmountFile(host string) error {
	volumes, err := p.doc.mappings("spec", "volumes")
	if err != nil {
		return err
	}
	for i, v := range slices.Backward(volumes) {
		name := scalarAt(v, "name")
		if name == "" || scalarAt(v, "hostPath", "path") != host {
			continue
		}
		list, err := p.doc.mappings(p.at("volumeMounts")...)
		if err != nil {
			return err
		}
		for j, m := range slices.Backward(list) {
			if scalarAt(m, "name") != name {
				continue
			}
			if err := p.doc.remove(p.at("volumeMounts", j)...); err != nil {
				return err
			}
		}
		if inUse(p.doc, name) {
			continue
		}
		if err := p.doc.remove("spec", "volumes", i); err != nil {
			return err
		}
	}
	return nil
}

// inUse reports whether some container mounts a volume.
func inUse(doc *document, volume string) bool {
	for _, kind := range []string{"containers", "initContainers"} {
		containers, err := doc.mappings("spec", kind)
		if err != nil {
			continue
		}
		for i := range containers {
			mounts, err := doc.mappings("spec", kind, i, "volumeMounts")
			if err == nil && slices.ContainsFunc(mounts, func(m *yaml.Node) bool { return scalarAt(m, "name") == volume }) {
				return true
			}
		}
	}
	return false
}

// annotate sets an annotation, or takes it out when the value is empty.
func (p *pod) annotate(key, value string) error {
	var err error
	switch n := p.doc.at("metadata", "annotations", key); {
	case value != "" && scalarAt(n) != value:
		err = p.doc.put([]any{"metadata", "annotations"}, key, value)
	case value == "" && n != nil:
		err = p.doc.remove("metadata", "annotations", key)
	}
	return err
}

// owner returns the user and the group that the scheduler runs as; 0 is root.
func (p *pod) owner() (uid, gid int) {
	get := func(key string) int {
		for _, at := range [][]any{p.at("securityContext", key), {"spec", "securityContext", key}} {
			if id, err := strconv.Atoi(scalarAt(p.doc.root, at...)); err == nil && id >= 0 {
				return id
			}
		}
		return 0
	}
	return get("runAsUser"), get("runAsGroup")
}
