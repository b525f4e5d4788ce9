package nodeconfig

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	yaml "go.yaml.in/yaml/v3"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
)

const (
	nvidia = "nvidia"
	// nvidiaResource is the resource of whole GPUs.
	nvidiaResource = "nvidia.com/gpu"
	// sharedSuffix is what renameByDefault puts after the name.
	sharedSuffix = ".shared"
)

// nvidiaFile is the configuration of NVIDIA's device plugin, "version: v1".
// Fields are pointers where it matters whether they are there.
type nvidiaFile struct {
	Version   string      `yaml:"version"`
	Flags     nvidiaFlags `yaml:"flags"`
	Resources struct {
		GPUs []nvidiaPattern `yaml:"gpus"`
		MIGs []nvidiaPattern `yaml:"mig"`
	} `yaml:"resources"`
	Sharing struct {
		TimeSlicing *nvidiaReplicated `yaml:"timeSlicing"`
		MPS         *nvidiaReplicated `yaml:"mps"`
	} `yaml:"sharing"`
	IMEX struct {
		ChannelIDs []int `yaml:"channelIDs"`
		Required   *bool `yaml:"required"`
	} `yaml:"imex"`
}

// nvidiaFlags are the settings that are flags of the plugin as well.
type nvidiaFlags struct {
	MigStrategy             *string `yaml:"migStrategy"`
	FailOnInitError         *bool   `yaml:"failOnInitError"`
	MPSRoot                 *string `yaml:"mpsRoot"`
	NVIDIADriverRoot        *string `yaml:"nvidiaDriverRoot"`
	NVIDIADevRoot           *string `yaml:"nvidiaDevRoot"`
	GDRCopyEnabled          *bool   `yaml:"gdrcopyEnabled"`
	GDSEnabled              *bool   `yaml:"gdsEnabled"`
	MOFEDEnabled            *bool   `yaml:"mofedEnabled"`
	UseNodeFeatureAPI       *bool   `yaml:"useNodeFeatureAPI"`
	DeviceDiscoveryStrategy *string `yaml:"deviceDiscoveryStrategy"`
	Plugin                  struct {
		PassDeviceSpecs               *bool       `yaml:"passDeviceSpecs"`
		DeviceListStrategy            *stringList `yaml:"deviceListStrategy"`
		DeviceIDStrategy              *string     `yaml:"deviceIDStrategy"`
		CDIAnnotationPrefix           *string     `yaml:"cdiAnnotationPrefix"`
		NVIDIACTKPath                 *string     `yaml:"nvidiaCTKPath"`
		ContainerDriverRoot           *string     `yaml:"containerDriverRoot"`
		SharedDevicesAllocationPolicy *string     `yaml:"sharedDevicesAllocationPolicy"`
	} `yaml:"plugin"`
	GFD struct {
		Oneshot         *bool   `yaml:"oneshot"`
		NoTimestamp     *bool   `yaml:"noTimestamp"`
		SleepInterval   *string `yaml:"sleepInterval"`
		OutputFile      *string `yaml:"outputFile"`
		MachineTypeFile *string `yaml:"machineTypeFile"`
	} `yaml:"gfd"`
}

// nvidiaPattern gives devices of some models a resource.
type nvidiaPattern struct {
	Pattern string `yaml:"pattern"`
	Name    string `yaml:"name"`
}

// nvidiaReplicated is a way to share devices.
type nvidiaReplicated struct {
	RenameByDefault            bool             `yaml:"renameByDefault"`
	FailRequestsGreaterThanOne *bool            `yaml:"failRequestsGreaterThanOne"`
	Resources                  []nvidiaReplicas `yaml:"resources"`
}

// nvidiaReplicas shares the devices of one resource.
type nvidiaReplicas struct {
	Name     string         `yaml:"name"`
	Rename   string         `yaml:"rename"`
	Devices  *nvidiaDevices `yaml:"devices"`
	Replicas int            `yaml:"replicas"`
}

// stringList is written as a list, or as one text with commas.
type stringList []string

// UnmarshalYAML reads either form.
func (l *stringList) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode {
		*l = splitList(n.Value)
		return nil
	}
	var list []string
	if err := n.Decode(&list); err != nil {
		return err
	}
	*l = list
	return nil
}

// splitList splits at commas and drops blanks.
func splitList(text string) []string {
	var out []string
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}

// nvidiaDevices is "all", a number of devices, or a list of indexes and uuids.
type nvidiaDevices struct {
	all      bool
	selector config.DeviceSelector
}

// UnmarshalYAML reads any of the forms.
func (d *nvidiaDevices) UnmarshalYAML(n *yaml.Node) error {
	wrong := func(value string) error {
		return &yaml.TypeError{Errors: []string{fmt.Sprintf("line %d: %q names no devices; write all, a number of devices, or a list of "+
			"indexes and uuids", n.Line, value)}}
	}
	if n.Kind == yaml.ScalarNode {
		if n.Value == "all" {
			d.all = true
			return nil
		}
		count, err := strconv.Atoi(n.Value)
		if err != nil || count < 1 || count > 1024 {
			return wrong(n.Value)
		}
		for i := range count {
			d.selector.Indexes = append(d.selector.Indexes, i)
		}
		return nil
	}
	var list []string
	if err := n.Decode(&list); err != nil {
		return err
	}
	for _, one := range list {
		index, err := strconv.Atoi(one)
		switch {
		case err == nil && index >= 0:
			d.selector.Indexes = append(d.selector.Indexes, index)
		case strings.HasPrefix(one, "GPU-"), strings.HasPrefix(one, "MIG-"):
			d.selector.IDs = append(d.selector.IDs, one)
		default:
			if _, ok := accel.ParsePartition(one); !ok {
				return wrong(one)
			}
			d.selector.Partitions = append(d.selector.Partitions, one)
		}
	}
	if len(list) == 0 {
		return wrong("[]")
	}
	return nil
}

// convertNVIDIA brings NVIDIA's file into this program's form. Settings that it
// does not make are those before, or else as the plugin has them; way is how
// containers of all vendors reached devices before.
func convertNVIDIA(data []byte, root *yaml.Node, before config.Vendor, way config.Injection) (o old, mistakes []string) {
	o.vendor, o.settings = nvidia, &before
	var f nvidiaFile
	o.warnings, mistakes = decodeOld(data, root, &f)
	if f.Version != "" && f.Version != "v1" {
		mistakes = append(mistakes, fmt.Sprintf("version: %q is not known; write v1", f.Version))
	}
	if len(before.Injection) == 0 {
		before.Injection = []config.Injection{config.InjectEnvironment}
		if before.CDIKind != "" && isCDI(way) {
			// A kind for these devices says that the way is meant for them too.
			before.Injection = []config.Injection{way}
		}
	}
	for _, s := range nvidiaSettings {
		value, set := s.get(&f)
		if !set {
			continue
		}
		warning, err := s.apply(o.settings, value)
		if err != nil {
			mistakes = append(mistakes, s.field+": "+err.Error())
		}
		if warning != "" {
			o.warn(s.field, "%s", warning)
		}
	}
	nvidiaNames(&o, &f)
	shared, wrong := nvidiaShared(&o, &f)
	o.resources = shared
	mistakes = append(mistakes, wrong...)
	return o, mistakes
}

// nvidiaNames warns of the names that the file gives to models.
func nvidiaNames(o *old, f *nvidiaFile) {
	for _, p := range f.Resources.GPUs {
		if p.Pattern != "*" || prefixed(p.Name) != nvidiaResource {
			o.warn("resources.gpus", "the names of models (%q is %s) have no effect, as in NVIDIA's plugin; to offer a model under a "+
				"name of its own, write a resource of "+
				"kind NodeConfig with devices.models", p.Pattern, prefixed(p.Name))
		}
	}
	for _, p := range f.Resources.MIGs {
		if v := accel.VendorNamed(nvidia); accel.Resource(prefixed(p.Name)) != v.PartitionResource(p.Pattern) {
			o.warn("resources.mig", "the names of profiles (%q is %s) have no effect, as in NVIDIA's plugin; MIG devices are %s with "+
				"migStrategy mixed, and %s with migStrategy single",
				p.Pattern, prefixed(p.Name), v.PartitionResource("<profile>"), nvidiaResource)
		}
	}
	if f.IMEX.Required != nil && *f.IMEX.Required || len(f.IMEX.ChannelIDs) > 0 {
		o.warn("imex", imexWarning)
	}
}

// prefixed is a resource's name with NVIDIA's domain.
func prefixed(name string) string {
	if strings.HasPrefix(name, nvidia+".com/") {
		return name
	}
	return nvidia + ".com/" + name
}

// nvidiaShared returns the resources that the file stands for: the whole GPUs,
// or some or all of them in time slices.
func nvidiaShared(o *old, f *nvidiaFile) (_ []config.Resource, mistakes []string) {
	whole := config.Resource{Name: nvidiaResource, Vendor: nvidia, Mode: config.ModeExclusive}
	if f.Sharing.MPS != nil {
		o.mps = true
		text := "sharing by MPS is not offered: it needs a daemon of its own and its limits of memory"
		if f.Sharing.TimeSlicing != nil {
			o.warn("sharing.mps", "%s; the time slices of the same file hold, which NVIDIA's plugin would not have used beside mps", text)
		} else {
			o.warn("sharing.mps", "%s. GPUs are offered whole, as time slices would keep no limit; write sharing.timeSlicing, or mode "+
				"memory "+
				"in a file of kind NodeConfig, if that is what the pods need", text)
		}
	}
	slices := f.Sharing.TimeSlicing
	if slices == nil {
		return []config.Resource{whole}, nil
	}
	const at = "sharing.timeSlicing"
	if len(slices.Resources) == 0 {
		return []config.Resource{whole}, []string{at + ".resources: the list is empty; name the resource that is shared, such as " +
			nvidiaResource}
	}
	found := map[string]*nvidiaReplicas{} // by name
	var names []string
	for i := range slices.Resources {
		r := &slices.Resources[i]
		field := fmt.Sprintf("%s.resources[%d]", at, i)
		switch name := prefixed(r.Name); {
		case r.Name == "":
			mistakes = append(mistakes, field+".name: the name is missing; write "+nvidiaResource)
			continue
		case name != nvidiaResource && profileOf(name) == "":
			o.warn(field, "no device is offered as %q, so nothing is shared; write %s", r.Name, nvidiaResource)
			continue
		case found[name] != nil:
			mistakes = append(mistakes, fmt.Sprintf("%s.name: %s is there twice; keep one", field, name))
			continue
		default:
			found[name], names = r, append(names, name)
		}
		if r.Replicas < 2 || r.Replicas > config.MaxReplicas {
			mistakes = append(mistakes, fmt.Sprintf("%s.replicas: %d is out of range; use 2 to %d", field, r.Replicas, config.MaxReplicas))
		}
	}
	if len(mistakes) > 0 {
		return []config.Resource{whole}, mistakes
	}
	var out []config.Resource
	if found[nvidiaResource] == nil {
		out = append(out, whole)
	}
	for _, name := range names {
		out = append(out, nvidiaSlices(o, slices, found[name], name, stringOf(f.Flags.Plugin.SharedDevicesAllocationPolicy))...)
	}
	return out, nil
}

// profileOf is the profile of the MIG devices that the resource is made of, "" for
// another resource.
func profileOf(name string) string {
	profile, _ := accel.VendorNamed(nvidia).ProfileOf(accel.Resource(name))
	return profile
}

// nvidiaSlices returns the resources of the devices of that name in time slices.
// Devices that the file leaves out stay whole: under their own name where the slices
// have another one, else with a single replica.
func nvidiaSlices(o *old, s *nvidiaReplicated, r *nvidiaReplicas, name, policy string) []config.Resource {
	const field = "sharing.timeSlicing.resources"
	profile := profileOf(name)
	if profile != "" {
		o.profiles = append(o.profiles, name)
	}
	sliced := config.Resource{
		Name: name, Vendor: nvidia, Mode: config.ModeTimeSlicing, Replicas: r.Replicas, Profile: profile,
		FailRequestsGreaterThanOne: s.FailRequestsGreaterThanOne != nil && *s.FailRequestsGreaterThanOne,
	}
	if policy == string(config.PackedAllocation) {
		sliced.Allocation = config.PackedAllocation
	}
	switch {
	case r.Rename != "":
		sliced.Name = prefixed(r.Rename)
		if !s.RenameByDefault || sliced.Name != name+sharedSuffix {
			o.warn(field, "rename: %s is used as it is written, while NVIDIA's plugin overwrites it; pods have to ask for this name",
				sliced.Name)
		}
	case s.RenameByDefault:
		sliced.Name += sharedSuffix
	}
	if r.Devices == nil || r.Devices.all {
		return []config.Resource{sliced}
	}
	selector := r.Devices.selector
	o.warn(field, "devices: only the devices that are named are shared, while NVIDIA's plugin shares all whatever is written")
	if sliced.Name == name {
		sliced.ReplicasFor = []config.ReplicaRule{{Devices: selector, Replicas: sliced.Replicas}}
		sliced.Replicas = 1
		return []config.Resource{sliced}
	}
	sliced.Devices = &selector
	rest := config.Resource{Name: name, Vendor: nvidia, Mode: config.ModeExclusive, Profile: profile,
		Devices: &config.DeviceSelector{Except: new(selector)}}
	return []config.Resource{sliced, rest}
}

func stringOf(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// withoutNodes returns the ways of injection other than device nodes.
func withoutNodes(ways []config.Injection) []config.Injection {
	return slices.DeleteFunc(slices.Clone(ways), func(w config.Injection) bool { return w == config.InjectDeviceNodes })
}
