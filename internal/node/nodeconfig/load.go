package nodeconfig

import (
	"path/filepath"
	"slices"
	"strings"

	yaml "go.yaml.in/yaml/v3"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

// Loaded is a configuration together with what its reader should know.
type Loaded struct {
	Config config.NodeConfig
	// Warnings are sentences about what has no effect, or another one than its
	// author may expect, each with the file or variable that it is about.
	Warnings []string
	// Files are those that were read, in order.
	Files []string

	// nvidia is the file of NVIDIA's plugin that was read last.
	nvidia old
}

// Load reads files of any form, puts the later over the earlier, the overrides
// over all of them, and validates what comes out. vendors are the names of the
// backends that there are. All mistakes of all files are reported at once, in a
// *config.MistakesError; the warnings are there then as well.
func Load(files []string, overrides Overrides, vendors []string) (Loaded, error) {
	l := Loaded{Config: config.Base(), Files: slices.Clone(files)}
	var mistakes []string
	source := "configuration"
	for _, path := range files {
		data, err := config.ReadFile(path)
		if err != nil {
			return Loaded{}, err
		}
		warnings, wrong := l.add(path, data)
		for _, w := range warnings {
			l.Warnings = append(l.Warnings, path+": "+w)
		}
		for _, m := range wrong {
			if len(files) > 1 {
				m = path + ": " + m
			}
			mistakes = append(mistakes, m)
		}
	}
	if len(files) == 1 {
		source = files[0]
	}
	config.Complete(&l.Config)
	warnings, wrong := overrides.apply(&l.Config)
	l.Warnings = append(l.Warnings, warnings...)
	mistakes = append(mistakes, wrong...)
	mistakes = append(mistakes, l.settleMIG()...)
	if mistakes = append(mistakes, config.Validate(l.Config, vendors)...); len(mistakes) > 0 {
		return Loaded{Warnings: l.Warnings}, &config.MistakesError{Source: source, Mistakes: mistakes}
	}
	return l, nil
}

// add puts one file over what was read before. One of another plugin replaces
// the resources of its vendor; of the vendor's settings it replaces those that
// it makes, since where the driver is, say, may be known to another file alone.
func (l *Loaded) add(path string, data []byte) (warnings, mistakes []string) {
	var root yaml.Node
	if err := yaml.Unmarshal(data, &root); err != nil {
		return nil, []string{strings.TrimPrefix(err.Error(), "yaml: ")}
	}
	if root.Kind == 0 && len(l.Files) > 1 && filepath.Base(path) != ixFileName {
		// NVIDIA's operator calls such a named configuration "empty".
		return []string{"the file is empty, so the other files hold as they are"}, nil
	}
	form, err := formOf(path, &root)
	if err != nil {
		return nil, []string{err.Error()}
	}
	c := &l.Config
	var o old
	switch form {
	case FormIX:
		o, mistakes = convertIX(data, &root)
	case FormNVIDIA:
		o, mistakes = convertNVIDIA(data, &root, c.Vendors[nvidia], c.Injection)
		l.nvidia = o
	default:
		mistakes, err := config.Decode(data, c)
		if err != nil {
			mistakes = append(mistakes, err.Error())
		}
		return nil, mistakes
	}
	c.Resources = slices.DeleteFunc(slices.Clone(c.Resources), func(r config.Resource) bool { return r.Vendor == o.vendor })
	c.Resources = append(c.Resources, o.resources...)
	if o.settings != nil {
		if c.Vendors == nil {
			c.Vendors = map[string]config.Vendor{}
		}
		c.Vendors[o.vendor] = *o.settings
	}
	return o.warnings, mistakes
}

// settleMIG finishes what NVIDIA's file says of MIG devices, once their strategy is
// known.
func (l *Loaded) settleMIG() (mistakes []string) {
	c := &l.Config
	if c.Vendors[nvidia].MigStrategy == config.MigMixed {
		if l.nvidia.mps {
			mistakes = append(mistakes,
				"sharing.mps: MPS cannot be combined with migStrategy mixed, as in NVIDIA's plugin; remove one of them")
		}
		return mistakes
	}
	for _, name := range l.nvidia.profiles {
		profile := profileOf(name)
		c.Resources = slices.DeleteFunc(c.Resources, func(r config.Resource) bool { return r.Vendor == nvidia && r.Profile == profile })
		l.Warnings = append(l.Warnings, "sharing.timeSlicing.resources: no device is offered as "+name+
			" without migStrategy mixed, so nothing of it is shared")
	}
	return nil
}
