package nodeconfig

import (
	"fmt"

	yaml "go.yaml.in/yaml/v3"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

const (
	iluvatar = "iluvatar"
	// ixResource is the resource of a file that names none.
	ixResource = "iluvatar.com/gpu"
)

// ixFile is the configuration of Iluvatar's device plugin, releases 4.2 to 4.4.
type ixFile struct {
	// Version had to be "4.2.0" in release 4.2 and is ignored by later ones.
	Version      string `yaml:"version"`
	ResourceName string `yaml:"resourceName"`
	Flags        struct {
		SplitBoard bool `yaml:"splitboard"`
		UseVolcano bool `yaml:"usevolcano"`
		ResetGPU   bool `yaml:"reset_gpu"`
	} `yaml:"flags"`
	Sharing struct {
		TimeSlicing struct {
			// Replicas is 0 for devices that are not shared.
			Replicas int `yaml:"replicas"`
		} `yaml:"timeSlicing"`
		MPS *struct {
			Replicas int `yaml:"replicas"`
		} `yaml:"mps"`
	} `yaml:"sharing"`
}

// Warnings about what Iluvatar's plugin did and this program does not.
const (
	volcanoWarning = "volcano chooses no devices here: the scheduler's extender of Divvy places memory, and kubelet's topology " +
		"manager with the links between devices places whole ones; remove the setting"
	resetWarning = "devices are not reset before each container: a reset inside of kubelet's question would hold up every pod of the " +
		"node; reset a device by hand with ixsmi -r while no container has it"
)

// convertIX brings Iluvatar's file into this program's form.
func convertIX(data []byte, root *yaml.Node) (o old, mistakes []string) {
	o.vendor = iluvatar
	var f ixFile
	o.warnings, mistakes = decodeOld(data, root, &f)
	if f.Version != "" && f.Version != "4.2.0" {
		o.warn("version", "%q is not looked at; the file is read as release 4.4 reads it", f.Version)
	}
	if f.Flags.UseVolcano {
		o.warn("flags.usevolcano", volcanoWarning)
	}
	if f.Flags.ResetGPU {
		o.warn("flags.reset_gpu", resetWarning)
	}
	if f.Sharing.MPS != nil {
		o.warn("sharing.mps", "it never had an effect, and has none here; remove it")
	}
	r := config.Resource{Name: f.ResourceName, Vendor: iluvatar, Mode: config.ModeExclusive, SplitBoards: f.Flags.SplitBoard}
	if r.Name == "" {
		r.Name = ixResource
	}
	if n := f.Sharing.TimeSlicing.Replicas; n != 0 {
		r.Mode, r.Replicas = config.ModeTimeSlicing, n
		if n < 0 || n > config.MaxReplicas {
			mistakes = append(mistakes, fmt.Sprintf("sharing.timeSlicing.replicas: %d is out of range; use 1 to %d, or 0 for devices "+
				"that are not shared", n, config.MaxReplicas))
			r.Replicas = 1 // the mistake is told once
		}
	}
	o.resources = []config.Resource{r}
	return o, mistakes
}

// old is what the file of another device plugin says of its vendor.
type old struct {
	vendor string
	// settings are those of the vendor from now on, nil for those before.
	settings  *config.Vendor
	resources []config.Resource
	warnings  []string
	// profiles are the resources of MIG devices that it shares, and mps is true when it
	// shares devices by MPS. What becomes of them depends on the strategy, which the
	// environment may set.
	profiles []string
	mps      bool
}

// warn adds a warning about a field.
func (o *old) warn(field, format string, args ...any) {
	o.warnings = append(o.warnings, field+": "+fmt.Sprintf(format, args...))
}
