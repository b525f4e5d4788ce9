package accel

import "strings"

// Vendor is what the programs and the chart know of a vendor. What only the
// node needs, the backend, is in internal/node/backend/vendors.
type Vendor struct {
	// Name is how configurations spell the vendor, and Brand how documents do.
	Name, Brand string
	// NodeLabel, with the value "true", marks nodes with devices of the vendor:
	// divvy-node runs there.
	NodeLabel string
	// Labels is a regular expression for the keys of the labels that the vendor's
	// own feature discovery writes, which divvy-node may write too; "" for none.
	// ChoosingLabels is one for those among them that decide what runs on a node,
	// which it may not.
	Labels, ChoosingLabels string
	// Devices is the resource of whole devices. Its domain is the vendor's.
	Devices Resource
	// Partitions begins the names of the resources of partitions, which end in the
	// name of their profile; "" for a vendor without. PartitionBackend is what isolates
	// them, Isolation.Backend.
	Partitions       Resource
	PartitionBackend string
	// Memory is the resource of units of memory. MemoryText and DeviceText name
	// the memory and a device in rejections, which users and scripts look for:
	// "insufficient GCU Memory in one gcu device".
	Memory                 Resource
	MemoryText, DeviceText string
	// DeviceType is what a device of the vendor is in ResourceSlices, in one word.
	DeviceType string
	// LegacyPrefix begins the annotations that pods with units of Memory carried
	// before Divvy; "" for none.
	LegacyPrefix string
	// Plugins and Schedulers are the programs that Divvy replaces, device plugins
	// and schedulers with their helpers: what names of their workloads begin with.
	Plugins, Schedulers []string
}

// Vendors is the table of the vendors, in the order of their names. Nothing
// changes it after the start of a program.
var Vendors = []Vendor{
	{
		Name: "enflame", Brand: "Enflame",
		NodeLabel: "enflame.com/gcushare", Labels: `enflame\.com/gcu\..+`,
		Devices:    "enflame.com/gcu",
		Partitions: "enflame.com/drs-gcu-", PartitionBackend: "drs",
		Memory: "enflame.com/gcu-memory", MemoryText: "GCU Memory", DeviceText: "gcu device",
		DeviceType:   "gcu",
		LegacyPrefix: "enflame.com/gcu-device-",
		Plugins:      []string{"gcushare-device-plugin", "gcu-device-plugin", "enflame-gcu-device-plugin", "enflame-device-plugin"},
		Schedulers:   []string{"gcushare-scheduler-extender", "gcushare-config-manager", "gcushare-scheduler-plugin"},
	},
	{
		Name: "iluvatar", Brand: "Iluvatar",
		NodeLabel: "iluvatar.com/gpu.present", Labels: `iluvatar\.com/(gpu|cuda|ix)\..+`,
		Devices: "iluvatar.com/gpu",
		Memory:  "iluvatar.com/gpu-memory", MemoryText: "GPU Memory", DeviceText: "iluvatar device",
		DeviceType: "chip",
		Plugins:    []string{"iluvatar-device-plugin", "ix-device-plugin"},
	},
	{
		Name: "nvidia", Brand: "NVIDIA",
		NodeLabel: "nvidia.com/gpu.present", Labels: `nvidia\.com/((gpu|cuda|gfd|mig)\.|mig-).+`,
		ChoosingLabels: `nvidia\.com/(gpu\.deploy\..+|gpu\.workload\.config|mig\.config.*)`,
		Devices:        "nvidia.com/gpu",
		Partitions:     "nvidia.com/mig-", PartitionBackend: "mig",
		Memory: "nvidia.com/gpu-memory", MemoryText: "GPU Memory", DeviceText: "nvidia device",
		DeviceType: "gpu",
		Plugins: []string{"nvidia-device-plugin", "nvidia-gpu-device-plugin", "hami-device-plugin", "volcano-device-plugin",
			"volcano-vgpu-device-plugin", "gpushare-device-plugin"},
		Schedulers: []string{"gpushare-schd-extender"},
	},
}

// VendorNames returns the names of all vendors, in order.
func VendorNames() []string {
	names := make([]string, len(Vendors))
	for i := range Vendors {
		names[i] = Vendors[i].Name
	}
	return names
}

// VendorNamed returns the vendor with that name, nil for an unknown one.
func VendorNamed(name string) *Vendor {
	return vendorWhere(func(v *Vendor) bool { return v.Name == name })
}

// VendorOfMemory returns the vendor whose units of memory the resource counts,
// nil for a resource of another name.
func VendorOfMemory(r Resource) *Vendor {
	return vendorWhere(func(v *Vendor) bool { return v.Memory == r })
}

func vendorWhere(is func(*Vendor) bool) *Vendor {
	for i := range Vendors {
		if is(&Vendors[i]) {
			return &Vendors[i]
		}
	}
	return nil
}

// Owns reports whether a name is in the vendor's domain: "enflame.com/gcu-count".
func (v *Vendor) Owns(name string) bool {
	domain, _, _ := strings.Cut(string(v.Devices), "/")
	return strings.HasPrefix(name, domain+"/")
}

// PartitionResource is the resource of the vendor's partitions of a profile.
func (v *Vendor) PartitionResource(profile string) Resource {
	return v.Partitions + Resource(ProfileName(profile))
}

// ProfileOf returns the name of the profile whose partitions the resource is made of
// (ProfileName), false for another resource.
func (v *Vendor) ProfileOf(r Resource) (string, bool) {
	name, ok := strings.CutPrefix(string(r), string(v.Partitions))
	if !ok || name == "" || v.Partitions == "" {
		return "", false
	}
	return name, true
}

// Or joins words as a sentence does: "a, b or c".
func Or(words ...string) string {
	last := len(words) - 1
	if last < 1 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " or " + words[last]
}
