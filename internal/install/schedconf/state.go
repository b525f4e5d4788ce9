package schedconf

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A State is how a scheduler is run, as its manifest and configuration say.
type State struct {
	// Wired is set when the configuration that the manifest names has our extender
	// in it, or divvy-scheduler runs.
	Wired bool
	// Version of kube-scheduler, such as "1.31".
	Version string
	// ConfigPath is the value of --config in the container, ConfigFile the file on
	// the node behind it. Both are empty when there is no such flag.
	ConfigPath, ConfigFile string
	// APIVersion of that configuration, such as kubescheduler.config.k8s.io/v1.
	APIVersion string
	// Edited is set when the configuration was changed by somebody else since it
	// was written.
	Edited bool
	// Program is the image of divvy-scheduler that runs in the place of kube-scheduler, "" where
	// none does.
	Program string
	// Extender is our entry in the configuration, nil without one.
	Extender *Extender
	// Profiles are the schedulers' names, OtherExtenders the URLs of the others.
	Profiles, OtherExtenders []string

	entry *yaml.Node
}

// Inspect returns how the scheduler is run. It fails where Wire would for the
// sake of the manifest or of a configuration that cannot be read.
func Inspect(in Input) (State, error) {
	s, err := find(in)
	if err != nil {
		return State{}, err
	}
	st := State{Version: s.version.String(), Profiles: []string{defaultScheduler}, Program: s.pod.program, Wired: s.pod.program != ""}
	now := s.source
	if s.wired {
		f, _ := s.pod.command.flag(flagConfig)
		now = source{path: f.value, host: s.target}
		st.Edited = s.edited()
	}
	if now.host == "" {
		return st, nil
	}
	st.ConfigPath, st.ConfigFile = now.path, now.host
	data, err := in.read(now.host)
	if err != nil {
		return State{}, err
	}
	if data == nil {
		return State{}, s.pod.doc.errorf("--%s=%s: file %s does not exist on the node", flagConfig, now.path, now.host)
	}
	c, err := readConfig(now.host, data)
	if err != nil {
		return State{}, err
	}
	if err := c.checkVersion(); err != nil {
		return State{}, err
	}
	st.APIVersion, st.Profiles = c.apiVersion, c.profiles()
	ours, all, err := c.split()
	if err != nil {
		return State{}, err
	}
	for i, n := range all {
		if !slices.Contains(ours, i) {
			st.OtherExtenders = append(st.OtherExtenders, scalarAt(n, "urlPrefix"))
		}
	}
	if len(ours) > 0 {
		st.Wired, st.entry = true, all[ours[0]]
		st.Extender = readExtender(st.entry)
	}
	return st, nil
}

// Differences says, in a sentence each, in what the scheduler differs from one
// that consults the extender. Nil means: in nothing.
func (s State) Differences(e Extender) []string {
	switch {
	case e.Program != nil:
		return s.differencesOf(e.Program)
	case s.Program != "":
		return []string{s.Program + " runs in the place of kube-scheduler, which should call the extender"}
	case !s.Wired:
		return []string{"kube-scheduler does not call the extender"}
	}
	var want, got map[string]any
	if n, err := nodeOf(e.entry()); err != nil || n.Decode(&want) != nil {
		return []string{fmt.Sprintf("the expected extender: %v", err)}
	}
	if err := s.entry.Decode(&got); err != nil {
		return []string{fmt.Sprintf("the extender in %s: %v", s.ConfigFile, err)}
	}
	return differences("", got, want)
}

func (s State) differencesOf(p *Program) []string {
	v, err := parseVersion(s.Version)
	if err != nil {
		return []string{err.Error()}
	}
	switch image, err := p.image(v); {
	case err != nil:
		return []string{err.Error()}
	case s.Program == "":
		return []string{"divvy-scheduler does not run in the place of kube-scheduler"}
	case s.Program != image:
		return []string{fmt.Sprintf("the image is %s, but should be %s", s.Program, image)}
	}
	return nil
}

// differences compares two mappings, in the order of their keys.
func differences(prefix string, got, want map[string]any) []string {
	all := maps.Clone(want)
	maps.Copy(all, got)
	var out []string
	for _, k := range slices.Sorted(maps.Keys(all)) {
		g, w := got[k], want[k]
		name := prefix + k
		gm, isG := g.(map[string]any)
		wm, isW := w.(map[string]any)
		switch {
		case reflect.DeepEqual(g, w):
		case isG && isW:
			out = append(out, differences(name+".", gm, wm)...)
		case g == nil:
			out = append(out, name+" is missing")
		case w == nil:
			out = append(out, name+" exists, but should not")
		case strings.HasSuffix(k, "Data"):
			out = append(out, name+" differs")
		default:
			out = append(out, fmt.Sprintf("%s is %s, but should be %s", name, short(g), short(w)))
		}
	}
	return out
}

// short returns a value in one line.
func short(v any) string {
	list, ok := v.([]any)
	if !ok {
		return fmt.Sprint(v)
	}
	names := make([]string, len(list))
	for i, e := range list {
		names[i] = fmt.Sprint(e)
		if m, ok := e.(map[string]any); ok {
			names[i] = fmt.Sprint(m["name"])
			if m["ignoredByScheduler"] == true {
				names[i] += " (ignored by the scheduler)"
			}
		}
	}
	return strings.Join(names, ", ")
}
