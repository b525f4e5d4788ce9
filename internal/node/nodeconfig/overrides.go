package nodeconfig

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

// EnvPrefix and a flag's name in capitals, with "_" for "-", make the
// environment variable that gives the flag's value when the flag is absent:
// DIVVY_LOG_LEVEL for --log-level.
const EnvPrefix = "DIVVY_"

// EnvName is the environment variable of a flag.
func EnvName(flag string) string {
	return EnvPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Overrides are the settings that the command line and the environment make,
// weakest first. The zero value has none.
type Overrides []override

// override is one setting with the place that it comes from.
type override struct {
	origin string
	set    func(c *config.NodeConfig) (warning string, err error)
	// flag is the flag that makes the setting too, "" for none.
	flag string
}

// apply puts the overrides over a configuration.
func (o Overrides) apply(c *config.NodeConfig) (warnings, mistakes []string) {
	unused := kindsUnused(*c)
	for _, one := range o {
		warning, err := one.set(c)
		if err != nil {
			mistakes = append(mistakes, fmt.Sprintf("%s: %v", one.origin, err))
		}
		if warning != "" {
			warnings = append(warnings, fmt.Sprintf("%s: %s", one.origin, warning))
		}
	}
	// Another way to reach devices has no use for the kind of CDI names that
	// belonged to the way before. One that was of no use before, or that is
	// asked for beside it, is a mistake that Validate tells of.
	for vendor := range kindsUnused(*c) {
		asked := slices.ContainsFunc(o, func(one override) bool { return one.flag == vendor+cdiKindFlag })
		if v := c.Vendors[vendor]; !unused[vendor] && !asked {
			v.CDIKind = ""
			c.Vendors[vendor] = v
		}
	}
	return warnings, mistakes
}

// kindsUnused returns the vendors whose kind of CDI names is set though
// containers are given none.
func kindsUnused(c config.NodeConfig) map[string]bool {
	out := map[string]bool{}
	for vendor, v := range c.Vendors {
		ways := v.Injection
		if len(ways) == 0 {
			ways = []config.Injection{c.Injection}
		}
		if v.CDIKind != "" && !slices.ContainsFunc(ways, isCDI) {
			out[vendor] = true
		}
	}
	return out
}

// cdiKindFlag is what the flags end in that set the kind of a vendor's CDI names.
const cdiKindFlag = "-cdi-kind"

// setting is a key of the configuration that has a flag and a variable.
type setting struct {
	flag, usage string
	set         func(c *config.NodeConfig, value string) error
}

// settings returns those of a program with these vendors. Resources have none:
// they are lists, and lists belong into a file.
func settings(vendors []string) []setting {
	out := []setting{
		text("driver-root", "where the host's file system is mounted", func(c *config.NodeConfig) *string { return &c.DriverRoot }),
		text("kubelet-dir", "kubelet's root directory", func(c *config.NodeConfig) *string { return &c.KubeletDir }),
		text("state-dir", "folder for state that must survive restarts", func(c *config.NodeConfig) *string { return &c.StateDir }),
		text("cdi-dir", "folder for CDI specifications", func(c *config.NodeConfig) *string { return &c.CDIDir }),
		text("log-file", "file to also write the log to, with rotation; empty to disable",
			func(c *config.NodeConfig) *string { return &c.LogFile }),
		text("log-level", "error, warn, info or debug", func(c *config.NodeConfig) *string { return &c.LogLevel }),
		text("listen", "address to serve probes and metrics on, host:port", func(c *config.NodeConfig) *string { return &c.Listen }),
		text("grant-key-file", "file with the key that signs planned allocations",
			func(c *config.NodeConfig) *string { return &c.GrantKeyFile }),
		{"injection", "how devices are made available to containers: environment, deviceNodes, cdi or cdiAnnotations",
			func(c *config.NodeConfig, value string) error {
				c.Injection = config.Injection(value)
				return nil
			}},
		{"health-interval", "interval of device discovery and health checks, such as 5s", func(c *config.NodeConfig, value string) error {
			d, err := time.ParseDuration(value)
			if err != nil {
				return fmt.Errorf("%q is not a duration; write it as 5s or 1m30s", value)
			}
			c.HealthInterval = config.Duration(d)
			return nil
		}},
		{"labels", "labels to set on the node: all, divvy or none", func(c *config.NodeConfig, value string) error {
			c.Labels = config.LabelPolicy(value)
			return nil
		}},
	}
	for _, v := range vendors {
		out = append(out, vendorSettings(v)...)
	}
	return out
}

func text(flag, usage string, field func(*config.NodeConfig) *string) setting {
	return setting{flag, usage, func(c *config.NodeConfig, value string) error {
		*field(c) = value
		return nil
	}}
}

// vendorSettings are those of one vendor.
func vendorSettings(vendor string) []setting {
	of := func(flag, usage string, set func(v *config.Vendor, value string) error) setting {
		return setting{vendor + "-" + flag, vendor + ": " + usage, func(c *config.NodeConfig, value string) error {
			return editVendor(c, vendor, func(v *config.Vendor) error { return set(v, value) })
		}}
	}
	out := []setting{
		{vendor + "-library", vendor + ": path of the vendor's library", func(c *config.NodeConfig, value string) error {
			if c.Libraries == nil {
				c.Libraries = map[string]string{}
			}
			c.Libraries[vendor] = value
			return nil
		}},
		of("driver-root", "folder on the host in which the driver is installed", func(v *config.Vendor, value string) error {
			v.DriverRoot = value
			return nil
		}),
		of("dev-root", "folder on the host whose dev folder has the device nodes", func(v *config.Vendor, value string) error {
			v.DevRoot = value
			return nil
		}),
		of("injection", "how devices are made available to containers, separated by commas", func(v *config.Vendor, value string) error {
			v.Injection = nil
			for _, way := range splitList(value) {
				v.Injection = append(v.Injection, config.Injection(way))
			}
			return nil
		}),
		of("device-ids", "how environment variables identify devices: uuid or index", func(v *config.Vendor, value string) error {
			v.DeviceIDs = value
			return nil
		}),
		of(strings.TrimPrefix(cdiKindFlag, "-"), "kind of an existing CDI specification, written by another program",
			func(v *config.Vendor, value string) error {
				v.CDIKind = value
				return nil
			}),
		of("health-ignore", "causes that do not make a device unhealthy, separated by commas", func(v *config.Vendor, value string) error {
			v.Health.Ignore = append([]string{}, splitList(value)...)
			return nil
		}),
		of("health-heed", "causes that make a device unhealthy even if they are ignored, separated by commas",
			func(v *config.Vendor, value string) error {
				v.Health.Heed = splitList(value)
				return nil
			}),
		of("recover-after", "how long a device must be healthy before new pods are placed on it again",
			func(v *config.Vendor, value string) error {
				d, err := time.ParseDuration(value)
				if err != nil {
					return fmt.Errorf("%q is not a duration; write it as 5s or 1m30s", value)
				}
				v.Health.RecoverAfter = new(config.Duration(d))
				return nil
			}),
	}
	if vendor != nvidia {
		return out
	}
	return append(out,
		of("cdi-hook-path", "path on the host of the program that CDI hooks run; empty to look for it",
			func(v *config.Vendor, value string) error {
				v.CDIHookPath = value
				return nil
			}),
		of("cdi-disable-hooks", "hooks that the CDI specification does not have, separated by commas",
			func(v *config.Vendor, value string) error {
				v.CDIDisableHooks = splitList(value)
				return nil
			}),
		of("cdi-feature-flags", "what to switch on when the CDI specification is generated, separated by commas",
			func(v *config.Vendor, value string) error {
				v.CDIFeatureFlags = splitList(value)
				return nil
			}),
	)
}

// editVendor changes the settings of a vendor.
func editVendor(c *config.NodeConfig, vendor string, edit func(*config.Vendor) error) error {
	v := c.Vendors[vendor]
	if err := edit(&v); err != nil {
		return err
	}
	if c.Vendors == nil {
		c.Vendors = map[string]config.Vendor{}
	}
	c.Vendors[vendor] = v
	return nil
}

// AddFlags adds the flags that override keys of the files.
func AddFlags(fs *pflag.FlagSet, vendors []string) {
	for _, s := range settings(vendors) {
		fs.String(s.flag, "", fmt.Sprintf("%s (environment %s)", s.usage, EnvName(s.flag)))
	}
}

// Collect returns what the command line and the environment override: flags go
// before variables of this program, and those before the variables of the
// device plugins that it takes the place of. Values are checked by Load,
// together with the files.
func Collect(fs *pflag.FlagSet, lookup func(string) (string, bool), vendors []string) Overrides {
	out := oldEnvironment(lookup)
	var flags Overrides
	for _, s := range settings(vendors) {
		if f := fs.Lookup(s.flag); f != nil && f.Changed {
			flags = append(flags, s.from("--"+s.flag, f.Value.String()))
		} else if value, ok := lookup(EnvName(s.flag)); ok {
			out = append(out, s.from("environment variable "+EnvName(s.flag), value))
		}
	}
	return append(out, flags...)
}

func (s setting) from(origin, value string) override {
	return override{origin, func(c *config.NodeConfig) (string, error) { return "", s.set(c, value) }, s.flag}
}

// oldEnvironment returns what the variables of the other device plugins say. An
// empty variable says nothing, as with them.
func oldEnvironment(lookup func(string) (string, bool)) Overrides {
	var out Overrides
	add := func(name string, set func(c *config.NodeConfig, value string) (string, error)) {
		if value, ok := lookup(name); ok && strings.TrimSpace(value) != "" {
			out = append(out, override{origin: "environment variable " + name, set: func(c *config.NodeConfig) (string,
				error) {
				return set(c, value)
			}})
		}
	}
	add("SPLIT_BOARD", func(c *config.NodeConfig, value string) (string, error) {
		split, err := parseBool(value)
		if err != nil {
			return "", err
		}
		for i := range c.Resources {
			if r := &c.Resources[i]; r.Vendor == iluvatar {
				r.SplitBoards = split
			}
		}
		return "", nil
	})
	for _, old := range []struct{ name, warning string }{{"USE_VOLCANO", volcanoWarning}, {"RESET_GPU", resetWarning}} {
		done := notDone(old.warning)
		add(old.name, func(_ *config.NodeConfig, value string) (string, error) { return done(nil, value) })
	}
	for _, s := range nvidiaSettings {
		for _, name := range s.env {
			add(name, func(c *config.NodeConfig, value string) (string, error) { return s.override(c, name, value) })
		}
	}
	return out
}

// override applies a variable of NVIDIA's device plugin.
func (s nvidiaSetting) override(c *config.NodeConfig, name, value string) (warning string, err error) {
	v := c.Vendors[nvidia]
	if len(v.Injection) == 0 {
		v.Injection = []config.Injection{c.Injection}
	}
	before := slices.Clone(v.Injection)
	if warning, err = s.apply(&v, value); err != nil {
		return "", err
	}
	if !slices.ContainsFunc(c.Resources, func(r config.Resource) bool { return r.Vendor == nvidia }) {
		return "", nil // what it says is about devices that are not offered
	}
	if slices.Equal(before, v.Injection) {
		v.Injection = c.Vendors[nvidia].Injection
	}
	if name == "SHARED_DEVICES_ALLOCATION_POLICY" {
		for i := range c.Resources {
			if r := &c.Resources[i]; r.Vendor == nvidia && r.Mode == config.ModeTimeSlicing {
				r.Allocation = config.Allocation(value)
			}
		}
	}
	return warning, editVendor(c, nvidia, func(to *config.Vendor) error {
		*to = v
		return nil
	})
}

// Places say where configurations are.
type Places struct {
	// Files are read in order, the later over the earlier.
	Files []string
	// Dir has named configurations, a file each, of which the node's label
	// chooses one that goes over the Files; "" for none.
	Dir string
}

// DefaultFile is read where nothing else is said and it is there: it is where
// Iluvatar's device plugin has its configuration.
const DefaultFile = "/ixconfig/ix-config"

// Find completes places from the environment: DIVVY_CONFIG, with commas between
// several files, and DIVVY_CONFIG_DIR, or else CONFIG_FILE of NVIDIA's device
// plugin, or else DefaultFile if it is there. Warnings name what is not used.
func (p Places) Find(lookup func(string) (string, bool)) (Places, []string) {
	get := func(name string) string {
		value, _ := lookup(name)
		return strings.TrimSpace(value)
	}
	if len(p.Files) == 0 {
		p.Files = splitList(get(EnvName("config")))
	}
	if p.Dir == "" {
		p.Dir = get(EnvName("config-dir"))
	}
	theirs := get("CONFIG_FILE")
	switch {
	case len(p.Files) > 0 || p.Dir != "":
		if theirs != "" && !slices.Contains(p.Files, theirs) {
			return p, []string{"environment variable CONFIG_FILE: the file is not read, as --config or --config-dir say what is; add it " +
				"to --config"}
		}
	case theirs != "":
		p.Files = []string{theirs}
	default:
		if _, err := os.Stat(DefaultFile); err == nil {
			p.Files = []string{filepath.Clean(DefaultFile)}
		}
	}
	return p, nil
}
