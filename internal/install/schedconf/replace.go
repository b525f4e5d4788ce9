package schedconf

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Annotations that Wire puts on a static pod that runs divvy-scheduler.
const (
	// AnnotationReplaced has the fields of kube-scheduler's container that others were put in
	// the place of, as YAML.
	AnnotationReplaced = "divvy.dev/scheduler-replaced"
	// AnnotationProgram is the digest of what was put in their place.
	AnnotationProgram = "divvy.dev/scheduler-program-hash"
)

// KeyDir is the name of a folder in Input.ConfigDir, and KeyFile of the key in it that divvy-scheduler
// signs planned allocations with. The container sees the folder, so that it sees a new key.
const (
	KeyDir  = "divvy"
	KeyFile = KeyDir + "/grant-key"
)

// Minor is what stands in Program.Image for the minor version of Kubernetes, such as 1.37.
const Minor = "MINOR"

// pluginName is the plugin's in profiles.
const pluginName = "Divvy"

const (
	replacedHost = "127.0.0.1"
	replacedPort = 9406
)

// ReplacedAddress is where divvy-scheduler in the place of kube-scheduler answers probes.
var ReplacedAddress = net.JoinHostPort(replacedHost, strconv.Itoa(replacedPort))

// programs are the versions of kube-scheduler that there is a divvy-scheduler for.
var programs = []version{35, 36, 37}

// A Program is divvy-scheduler, which takes the place of kube-scheduler.
type Program struct {
	// Image is the container image, with Minor in it where there is one for each version.
	Image string
	// Args are flags of divvy-scheduler besides those that Wire sets.
	Args []string
	// Key signs planned allocations.
	Key []byte
}

// HashOf returns what tells apart two pods of a scheduler by what Wire put into their
// manifests, "" for one that is not wired.
func HashOf(annotations map[string]string) string {
	hash, program := annotations[AnnotationHash], annotations[AnnotationProgram]
	if program != "" {
		hash += " " + program
	}
	return hash
}

func (p *Program) check() error {
	switch {
	case p.Image == "":
		return errors.New("the image of divvy-scheduler is missing")
	case len(bytes.TrimSpace(p.Key)) == 0:
		return errors.New("the key that divvy-scheduler signs planned allocations with is missing")
	}
	return nil
}

// image returns the image for a version of kube-scheduler.
func (p *Program) image(v version) (string, error) {
	if !slices.Contains(programs, v) {
		known := make([]string, len(programs))
		for i, one := range programs {
			known[i] = one.String()
		}
		return "", fmt.Errorf("kube-scheduler is %v, and divvy-scheduler exists for %s only; set scheduler.mode=extender",
			v, strings.Join(known, ", "))
	}
	return strings.ReplaceAll(p.Image, Minor, v.String()), nil
}

func (in Input) keyFile() string { return path.Join(in.dir(), KeyFile) }

// plug adds the plugin to all profiles, and takes our extender out.
func (c *config) plug(e Extender) error {
	_, all, err := c.split()
	if err != nil {
		return err
	}
	for _, n := range all {
		other, resources := scalarAt(n, "urlPrefix"), managed(n)
		switch {
		case isOurs(other):
		case len(resources) == 0:
			return c.doc.errorf("line %d: the extender %s is called for all pods, which divvy-scheduler does not support. Give it "+
				"managedResources, or set scheduler.mode=extender", n.Line, other)
		case slices.ContainsFunc(resources, func(r string) bool { return slices.Contains(e.Resources, r) }):
			return c.doc.errorf("line %d: the extender %s manages a resource of Divvy's: %s. Remove it from one of the two", n.Line, other,
				strings.Join(resources, ", "))
		}
	}
	if err := c.strip(); err != nil {
		return err
	}
	profiles, err := c.doc.mappings("profiles")
	if err != nil {
		return err
	}
	if len(profiles) == 0 {
		if err := c.doc.insert([]any{"profiles"}, -1, map[string]any{"schedulerName": defaultScheduler}); err != nil {
			return err
		}
	}
	for i := range max(len(profiles), 1) {
		if err := c.enable(i, "multiPoint", map[string]any{"name": pluginName, "weight": max(e.Weight, 1)}); err != nil {
			return err
		}
		for _, point := range ordered {
			if err := c.enable(i, point, map[string]any{"name": pluginName}); err != nil {
				return err
			}
		}
	}
	return nil
}

// ordered are the extension points in which the plugin must come before kube-scheduler's own, whose
// order stays as it is: what a point enables by name comes before the rest of multiPoint.
var ordered = []string{"postFilter", "bind"}

// enable puts the plugin in front of those that a profile enables at a point, where it is not among them.
func (c *config) enable(profile int, point string, entry map[string]any) error {
	return c.doc.insert([]any{"profiles", profile, "plugins", point, "enabled"}, 0, entry)
}

// disable takes the plugin out of those that a profile enables at a point.
func (c *config) disable(profile int, point string) error {
	at := []any{"profiles", profile, "plugins", point, "enabled"}
	enabled, err := c.doc.mappings(at...)
	for i, n := range slices.Backward(enabled) {
		if err == nil && scalarAt(n, "name") == pluginName {
			err = c.doc.remove(append(at, i)...)
		}
	}
	return err
}

// unplug takes the plugin out of all profiles.
func (c *config) unplug() error {
	profiles, err := c.doc.mappings("profiles")
	if err != nil {
		return err
	}
	for i := range profiles {
		for _, point := range append([]string{"multiPoint"}, ordered...) {
			if err := c.disable(i, point); err != nil {
				return err
			}
		}
	}
	return nil
}

// replacedFields are those of the container that replace changes.
var replacedFields = []string{"command", "args", "image", "env", "startupProbe", "livenessProbe", "readinessProbe", "securityContext"}

// replace lets a manifest that is wired run divvy-scheduler, and returns the file with its key.
// The configuration is that which the manifest names. What it changes can be taken back by
// unreplace.
func (s *scheduler) replace(p *pod, c *config, program *Program) (File, []string, error) {
	image, err := program.image(s.version)
	if err != nil {
		return File{}, nil, p.doc.errorf("%w", err)
	}
	args, notes, err := s.programArgs(p, c)
	if err != nil {
		return File{}, nil, err
	}
	folder := path.Dir(s.in.keyFile())
	saved, err := save(p, folder)
	if err != nil {
		return File{}, nil, err
	}
	at, err := p.mount(folder, "Directory")
	if err != nil {
		return File{}, nil, err
	}
	flags := slices.Concat([]string{"--grant-key-file=" + path.Join(at, path.Base(KeyFile))}, program.Args, args)
	if err := run(p, image, flags); err != nil {
		return File{}, nil, err
	}
	sum := fmt.Appendf(nil, "%s %q", image, flags)
	err = errors.Join(p.annotate(AnnotationReplaced, saved), p.annotate(AnnotationProgram, digest(madeByUs, sum)))
	key := File{Path: s.in.keyFile(), Content: program.Key, Mode: 0o600}
	key.UID, key.GID = p.owner()
	return key, append(notes, "kube-scheduler is replaced by "+image+"."), err
}

// save returns the fields of the container that are about to be replaced.
func save(p *pod, keyFolder string) (string, error) {
	was := &yaml.Node{Kind: yaml.MappingNode}
	for _, field := range replacedFields {
		if n := child(p.doc.at(p.at()...), field); n != nil {
			was.Content = append(was.Content, &yaml.Node{Kind: yaml.ScalarNode, Value: field}, n)
		}
	}
	name := scalarAt(p.doc.root, p.at("name")...)
	if name == "" {
		return "", p.doc.errorf("container %d has no name", p.container)
	}
	top := &yaml.Node{}
	err := top.Encode(map[string]any{"container": name, "key": keyFolder})
	if err != nil {
		return "", p.doc.errorf("remember its container: %w", err)
	}
	set(top, "was", was)
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	enc.CompactSeqIndent()
	if err := errors.Join(enc.Encode(top), enc.Close()); err != nil {
		return "", p.doc.errorf("remember its container: %w", err)
	}
	back, err := parse(b.Bytes())
	if err != nil || !equal(back.root, top) {
		return "", p.doc.errorf("container %s is written with anchors or tags, so it cannot be remembered; write it out", name)
	}
	return b.String(), nil
}

// run lets the container run an image with flags.
func run(p *pod, image string, flags []string) error {
	doc, at := p.doc, p.at()
	errs := []error{doc.put(at, "image", image)}
	if doc.at(p.at("command")...) != nil {
		errs = append(errs, doc.put(at, "command", []string{})) // the image's own
	}
	errs = append(errs, doc.put(at, "args", flags))
	for _, variable := range [][2]string{{"POD_NAME", "metadata.name"}, {"POD_NAMESPACE", "metadata.namespace"}} {
		errs = append(errs, doc.insert(p.at("env"), -1, map[string]any{"name": variable[0],
			"valueFrom": map[string]any{"fieldRef": map[string]any{"fieldPath": variable[1]}}}))
	}
	if scalarAt(doc.root, p.at("securityContext", "runAsUser")...) == "" &&
		scalarAt(doc.root, "spec", "securityContext", "runAsUser") == "" {
		// As the image of kube-scheduler, and its files, have it.
		errs = append(errs, doc.put(p.at("securityContext"), "runAsUser", 0))
	}
	if isNull(doc.at(p.at("livenessProbe")...)) {
		errs = append(errs, doc.put(at, "livenessProbe", map[string]any{"initialDelaySeconds": 10, "failureThreshold": 8,
			"timeoutSeconds": 15}))
	}
	for field, route := range map[string]string{"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"} {
		if !isNull(doc.at(p.at(field)...)) {
			errs = append(errs, probe(p, field, route))
		}
	}
	return errors.Join(errs...)
}

// probe gives a probe another address.
func probe(p *pod, field, route string) error {
	for _, kind := range []string{"exec", "tcpSocket", "grpc"} {
		if p.doc.at(p.at(field, kind)...) == nil {
			continue
		}
		if err := p.doc.remove(p.at(field, kind)...); err != nil {
			return err
		}
	}
	return p.doc.put(p.at(field), "httpGet", map[string]any{"host": replacedHost, "path": route, "port": replacedPort, "scheme": "HTTP"})
}

// programArgs returns the flags of divvy-scheduler that follow from those of kube-scheduler, with
// kube-scheduler's own after "--".
func (s *scheduler) programArgs(p *pod, c *config) (args, notes []string, err error) {
	if p.command.program > 0 {
		return nil, nil, p.doc.errorf("kube-scheduler is started by %s, which is not in the image of divvy-scheduler: start it directly, "+
			"or set scheduler.mode=extender", strings.Join(p.command.words()[:p.command.program], " "))
	}
	if scalarAt(p.doc.root, "spec", "hostNetwork") != "true" {
		return nil, nil, p.doc.errorf("the pod does not use the network of the node, so kubelet cannot probe divvy-scheduler: set " +
			"hostNetwork: true, or scheduler.mode=extender")
	}
	kubeconfig := scalarAt(c.doc.root, "clientConnection", "kubeconfig")
	if kubeconfig == "" {
		return nil, nil, c.doc.errorf("clientConnection.kubeconfig is missing, so divvy-scheduler cannot reach the API server: set it")
	}
	election, notes, err := p.election(c)
	if err != nil {
		return nil, nil, err
	}
	config, _ := p.command.flag(flagConfig)
	args = append([]string{"--scheduler-config=" + config.value, "--kubeconfig=" + kubeconfig, "--listen=" + ReplacedAddress,
		"--metrics-listen=", "--tls-listen="}, election...)
	return append(append(args, "--"), p.command.rest()...), notes, nil
}

// rest are the flags of kube-scheduler that stay its own.
func (c command) rest() []string {
	var out []string
	dropped := map[int]bool{}
	for _, f := range c.flags {
		if f.name == flagConfig || f.name == "leader-elect" {
			dropped[f.at], dropped[f.valueAt] = true, true
		}
	}
	for i := c.program + 1; i < len(c.list) && c.list[i].text != "--"; i++ {
		if !dropped[i] {
			out = append(out, c.list[i].text)
		}
	}
	return out
}

// election returns the flags by which divvy-scheduler takes part in kube-scheduler's election.
func (p *pod) election(c *config) (flags, notes []string, err error) {
	value := func(flag, field, otherwise string) string {
		f, ok := p.command.flag("leader-elect" + flag)
		switch {
		case ok && f.unclear != "":
			err = p.doc.errorf("--leader-elect%s cannot be determined: %s; set it explicitly", flag, f.unclear)
		case ok:
			return f.value
		}
		if v := scalarAt(c.doc.root, "leaderElection", field); v != "" {
			return v
		}
		return otherwise
	}
	elects := value("", "leaderElect", "true")
	name := value("-resource-name", "resourceName", "kube-scheduler")
	namespace := value("-resource-namespace", "resourceNamespace", "kube-system")
	lasts := value("-lease-duration", "leaseDuration", "15s")
	own := scalarAt(p.doc.root, "metadata", "namespace")
	if own == "" {
		own = "default"
	}
	duration, wrong := time.ParseDuration(lasts)
	switch {
	case err != nil:
		return nil, nil, err
	case namespace != own:
		return nil, nil, p.doc.errorf("the Lease for leader election is in namespace %s and the pod in %s: divvy-scheduler needs both in "+
			"the same namespace", namespace, own)
	case wrong != nil || duration < time.Second || duration > time.Minute || duration%time.Second != 0:
		return nil, nil, p.doc.errorf("the duration of the Lease for leader election is %s: divvy-scheduler needs whole seconds, from 1s "+
			"to 1m0s", lasts)
	}
	if on, wrong := strconv.ParseBool(elects); wrong != nil || !on {
		notes = append(notes, fmt.Sprintf("kube-scheduler has no leader election; divvy-scheduler elects by the Lease %s/%s.",
			namespace, name))
	}
	return []string{"--leader-elect", "--leader-elect-name=" + name, "--leader-elect-namespace=" + namespace,
		"--leader-elect-duration=" + duration.String(), "--leader-elect-shared"}, notes, nil
}

// unreplace takes out of a manifest what replace put into it but the mount of the key, and returns
// the image that ran and the folder of the key; "" for a manifest with kube-scheduler.
func (d *document) unreplace() (image, keyFolder string, err error) {
	text := scalarAt(d.root, "metadata", "annotations", AnnotationReplaced)
	if text == "" {
		return "", "", nil
	}
	saved, err := parse([]byte(text))
	if err != nil {
		return "", "", d.errorf("annotation %s was edited: %w; restore the original manifest", AnnotationReplaced, err)
	}
	// Another container may have been put in front of it since.
	containers, err := d.mappings("spec", "containers")
	if err != nil {
		return "", "", err
	}
	name := scalarAt(saved.root, "container")
	position := slices.IndexFunc(containers, func(c *yaml.Node) bool { return name != "" && scalarAt(c, "name") == name })
	was := saved.at("was")
	if was == nil || position < 0 {
		return "", "", d.errorf("annotation %s was edited: it describes no container of the pod; restore the original manifest",
			AnnotationReplaced)
	}
	at := []any{"spec", "containers", position}
	now := containers[position]
	image = scalarAt(now, "image")
	for _, field := range replacedFields {
		if n := get(was, field); n != nil {
			err = d.put(at, field, n)
		} else if child(now, field) != nil {
			err = d.remove(append(slices.Clone(at), field)...)
		}
		if err != nil {
			return "", "", err
		}
	}
	for _, key := range []string{AnnotationReplaced, AnnotationProgram} {
		if d.at("metadata", "annotations", key) == nil {
			continue
		}
		if err := d.remove("metadata", "annotations", key); err != nil {
			return "", "", err
		}
	}
	return image, scalarAt(saved.root, "key"), nil
}
