// Package v1alpha1 is the version of Divvy's configuration file that the node
// daemon reads: its types, their defaults, strict decoding and validation.
package v1alpha1

import "time"

// APIVersion and Kind head every configuration file of this package.
const (
	APIVersion = "config.divvy.dev/v1alpha1"
	Kind       = "NodeConfig"
)

// NodeConfig configures one divvy-node.
type NodeConfig struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string `yaml:"kind"`

	// DriverRoot is where the host's file system is mounted, "/" outside a
	// container. Vendor libraries are looked for below it.
	DriverRoot string `yaml:"driverRoot"`
	// KubeletDir is kubelet's root directory; its device-plugins and
	// pod-resources folders hold the sockets.
	KubeletDir string `yaml:"kubeletDir"`
	// StateDir keeps what must survive a restart: which unit ids belong to
	// which device.
	StateDir string `yaml:"stateDir"`
	// CDIDir receives the CDI specification when Injection is "cdi".
	CDIDir string `yaml:"cdiDir"`
	// LogFile is a file on the host that receives the log beside stderr,
	// rotated; "" for stderr alone.
	LogFile string `yaml:"logFile"`
	// LogLevel is error, warn, info or debug.
	LogLevel string `yaml:"logLevel"`
	// Listen is the address of probes and metrics, host:port.
	Listen string `yaml:"listen"`
	// GrantKeyFile holds the key (32 bytes or more) that grants are signed
	// with; the extender has the same.
	GrantKeyFile string `yaml:"grantKeyFile"`
	// Injection is how a container reaches its device.
	Injection Injection `yaml:"injection"`
	// HealthInterval is how often devices are looked for and their health is
	// asked.
	HealthInterval Duration `yaml:"healthInterval"`
	// Libraries gives the path of a vendor's library, by vendor, where it is
	// not in a usual place. It is used as it is, not below DriverRoot.
	Libraries map[string]string `yaml:"libraries"`
	// Resources are what the node offers, one kubelet socket each.
	Resources []Resource `yaml:"resources"`
}

// Resource is one extended resource that the node offers.
type Resource struct {
	// Name is the resource name that pods request.
	Name string `yaml:"name"`
	// Vendor is the backend whose devices it is made of.
	Vendor string `yaml:"vendor"`
	// Mode is how devices are shared.
	Mode Mode `yaml:"mode"`
	// MemoryUnit is the size of one unit in GB (2^30 bytes): "1", "0.1",
	// "0.01" or "0.001". Mode memory only.
	MemoryUnit string `yaml:"memoryUnit"`
	// CountResource names an extended resource in which the node's number of
	// devices is shown, "" for none.
	CountResource string `yaml:"countResource"`
}

// Injection is how a container reaches the device that it was given. The
// vendor's environment variable is always set.
type Injection string

// The ways of injection.
const (
	// InjectEnvironment sets the vendor's environment variable only; the
	// vendor's container runtime does the rest.
	InjectEnvironment Injection = "environment"
	// InjectDeviceNodes adds the device nodes.
	InjectDeviceNodes Injection = "deviceNodes"
	// InjectCDI names CDI devices, for runtimes that read /var/run/cdi.
	InjectCDI Injection = "cdi"
)

// Mode is how a resource shares devices.
type Mode string

// ModeMemory shares a device by units of its memory.
const ModeMemory Mode = "memory"

// Duration is a time.Duration written as in Go, such as "5s".
type Duration time.Duration

// Default returns the configuration that an empty file stands for: Enflame
// memory sharing in units of 1 GB.
func Default() NodeConfig {
	return NodeConfig{
		APIVersion:     APIVersion,
		Kind:           Kind,
		DriverRoot:     "/",
		KubeletDir:     "/var/lib/kubelet",
		StateDir:       "/var/lib/divvy",
		CDIDir:         "/var/run/cdi",
		LogLevel:       "info",
		Listen:         ":9400",
		GrantKeyFile:   "/etc/divvy/grant/key",
		Injection:      InjectDeviceNodes,
		HealthInterval: Duration(5 * time.Second),
		Resources: []Resource{{
			Name:          "enflame.com/gcu-memory",
			Vendor:        "enflame",
			Mode:          ModeMemory,
			MemoryUnit:    "1",
			CountResource: "enflame.com/gcu-count",
		}},
	}
}
