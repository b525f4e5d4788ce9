// Package v1alpha1 is the version of Divvy's configuration file that the node
// daemon reads: its types, their defaults, strict decoding and validation.
package v1alpha1

import (
	"cmp"
	"maps"
	"time"
)

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
	// Injection is how a container reaches its device, for vendors that say
	// nothing else.
	Injection Injection `yaml:"injection"`
	// HealthInterval is how often devices are looked for and their health is
	// asked.
	HealthInterval Duration `yaml:"healthInterval"`
	// Libraries gives the path of a vendor's library, by vendor, where it is
	// not in a usual place. It is used as it is, not below DriverRoot.
	Libraries map[string]string `yaml:"libraries"`
	// Labels says which labels describe the node's devices.
	Labels LabelPolicy `yaml:"labels"`
	// AllocationPath says how pods get the node's devices, PathPlugin by default.
	AllocationPath AllocationPath `yaml:"allocationPath"`
	// GPUOperator says that NVIDIA's GPU operator manages the node: while the node's labels
	// say that it replaces the driver or changes MIG devices, NVIDIA's library is not used
	// and the devices are unhealthy.
	GPUOperator bool `yaml:"gpuOperator"`
	// Usage says whether what containers use of the devices is measured.
	Usage Usage `yaml:"usage"`
	// Vendors holds what is particular to a vendor, by its name.
	Vendors map[string]Vendor `yaml:"vendors"`
	// Resources are what the node offers, one kubelet socket each.
	Resources []Resource `yaml:"resources"`
}

// Usage is the policy of measured use. The daemon needs the host's PID namespace for it.
type Usage struct {
	// Enabled measures the memory in use of each device, and which containers use it.
	Enabled bool `yaml:"enabled"`
	// Interval is the time between two passes over the devices, 5s to 10m.
	Interval Duration `yaml:"interval"`
	// Metrics is how much detail the metrics of measured use have.
	Metrics UsageMetrics `yaml:"metrics"`
	// Overuse is what happens to containers that use more than their allocation.
	Overuse Overuse `yaml:"overuse"`
}

// Overuse is the policy on containers that use more memory of a device than their allocation.
// They are always reported.
type Overuse struct {
	// Withhold takes the excess from the device's free units, so that the scheduler places no
	// pod into memory that is in use.
	Withhold bool `yaml:"withhold"`
	// ContextAllowanceMiB is how much device memory each process may use beside the container's
	// allocation, for its context, by vendor. The allowance of a vendor without an entry is
	// the least memory that any process was seen to use on a device of the same model, at
	// most 1 GiB; units are not withheld and pods not evicted because of such an allowance.
	ContextAllowanceMiB map[string]int `yaml:"contextAllowanceMiB"`
}

// UsageMetrics is a level of detail of the metrics of measured use.
type UsageMetrics string

// The levels of detail. Those of devices are always there.
const (
	// UsageMetricsNone has metrics of devices alone.
	UsageMetricsNone UsageMetrics = "none"
	// UsageMetricsNamespace adds the sums of each namespace.
	UsageMetricsNamespace UsageMetrics = "namespace"
	// UsageMetricsContainer adds metrics of each container, which name its pod.
	UsageMetricsContainer UsageMetrics = "container"
)

// Vendor holds the settings of one vendor's devices.
type Vendor struct {
	// DriverRoot is the folder on the host that the vendor's driver is installed
	// in, where that is not "/": a driver that a container brought may be in
	// /run/nvidia/driver. This program looks for it below
	// NodeConfig.DriverRoot.
	DriverRoot string `yaml:"driverRoot"`
	// DevRoot is the folder on the host whose dev folder has the device nodes;
	// empty for DriverRoot, or "/" if that has no dev folder.
	DevRoot string `yaml:"devRoot"`
	// Injection is how a container reaches the devices; empty for
	// NodeConfig.Injection. Several ways may be combined, but for "auto".
	Injection []Injection `yaml:"injection"`
	// DeviceIDs is how environment variables name devices: "uuid" (the default)
	// or "index".
	DeviceIDs string `yaml:"deviceIDs"`
	// CDIKind is the vendor and class of CDI names, such as "nvidia.com/gpu".
	// When it is set, the specification of that kind is written by another program, such
	// as the vendor's toolkit's, and this program writes none.
	CDIKind string `yaml:"cdiKind"`
	// MigStrategy is how MIG devices are offered; empty for MigNone. NVIDIA only.
	MigStrategy MigStrategy `yaml:"migStrategy"`
	// DRS offers the instances of cards in DRS mode, the partitions of Enflame's cards: those
	// of each profile as "enflame.com/drs-gcu-<profile>". Enflame only.
	DRS bool `yaml:"drs"`
	// CDIHookPath is the program on the host that NVIDIA's CDI hooks run,
	// nvidia-cdi-hook or nvidia-ctk; empty to look for it.
	CDIHookPath string `yaml:"cdiHookPath"`
	// CDIDisableHooks are hooks, by the names of NVIDIA's toolkit, that the CDI
	// specification of this program does not have; "all" for every one.
	CDIDisableHooks []string `yaml:"cdiDisableHooks"`
	// CDIFeatureFlags are features, by the names of NVIDIA's toolkit, that are enabled
	// when the CDI specification is generated.
	CDIFeatureFlags []string `yaml:"cdiFeatureFlags"`
	// Health says what makes a device unhealthy and what brings it back.
	Health Health `yaml:"health"`
}

// Partitions is how the vendor's partitions are offered: MigStrategy, which is MigMixed for DRS.
func (v Vendor) Partitions() MigStrategy {
	if v.DRS {
		return MigMixed
	}
	return v.MigStrategy
}

// MigStrategy is how MIG devices, the partitions of NVIDIA's GPUs, are offered.
type MigStrategy string

// The strategies, as NVIDIA's device plugin has them.
const (
	// MigNone offers GPUs as a whole, also those in MIG mode.
	MigNone MigStrategy = "none"
	// MigSingle offers MIG devices in the place of GPUs. All GPUs are in MIG mode then
	// and all MIG devices alike, or no GPU is in MIG mode.
	MigSingle MigStrategy = "single"
	// MigMixed offers the MIG devices of each profile as a resource of their own,
	// "nvidia.com/mig-<profile>", and GPUs that are not in MIG mode as a whole.
	MigMixed MigStrategy = "mixed"
)

// CDIHooks returns the hooks of NVIDIA's CDI specifications, by the names that
// NVIDIA's toolkit gives them, and "all".
func CDIHooks() []string {
	return []string{
		"all", "apply-cuda-memory-limits", "chmod", "create-symlinks", "disable-device-node-modification", "enable-cuda-compat",
		"update-application-profile", "update-ldcache",
	}
}

// CDIFeatureFlags returns what can be switched on when NVIDIA's CDI specifications
// are generated, by the names that NVIDIA's toolkit gives it.
func CDIFeatureFlags() []string {
	return []string{
		"disable-ipc-discoverer", "disable-multiple-csv-devices", "disable-nvsandbox-utils", "disable-nvsandboxutils",
		"enable-coherent-annotations", "enable-explicit-driver-libraries", "no-additional-gids-for-device-nodes",
	}
}

// Health is the policy of health of one vendor's devices. Causes are the words
// that docs/health.md lists, such as "xid-79"; "*" in them stands for any text.
type Health struct {
	// Ignore are causes that do not count; "default" stands for those that the
	// vendor ignores by default and "all" for every cause. Nil is [default].
	Ignore []string `yaml:"ignore"`
	// Heed are causes that count although Ignore names them.
	Heed []string `yaml:"heed"`
	// RecoverAfter is how long a device must be well before it takes pods
	// again; nil is DefaultRecoverAfter.
	RecoverAfter *Duration `yaml:"recoverAfter"`
	// NeverRecover are causes after which the device is in quarantine: it takes no
	// pods until an administrator releases it with "kubectl divvy device release".
	// "default" stands for those that mean that a device of the vendor must be reset
	// or replaced, and an empty list for none. Nil is [default].
	NeverRecover []string `yaml:"neverRecover"`
}

// DefaultRecoverAfter is how long a device must be well before it takes pods
// again, where nothing else is said.
const DefaultRecoverAfter = Duration(10 * time.Second)

// AllocationPath is a way in which pods get devices of a node.
type AllocationPath string

const (
	// PathPlugin offers the resources to kubelet's device manager.
	PathPlugin AllocationPath = "plugin"
	// PathDRA offers the devices that the resources choose to ResourceClaims.
	PathDRA AllocationPath = "dra"
	// PathBoth divides the devices by the resources: each says its path.
	PathBoth AllocationPath = "both"
)

// PathOf returns the path of one of the node's resources.
func (c *NodeConfig) PathOf(r *Resource) AllocationPath {
	if c.AllocationPath == PathBoth {
		return cmp.Or(r.AllocationPath, PathPlugin)
	}
	return cmp.Or(c.AllocationPath, PathPlugin)
}

// LabelPolicy says which labels the node gets.
type LabelPolicy string

// The policies of labels.
const (
	// LabelAll gives the node the labels of the vendors' feature discovery and
	// those of Divvy. Labels that another client set are kept.
	LabelAll LabelPolicy = "all"
	// LabelDivvy gives the node those in the domain divvy.dev alone.
	LabelDivvy LabelPolicy = "divvy"
	// LabelNone gives the node none.
	LabelNone LabelPolicy = "none"
)

// Resource is one extended resource that the node offers. Several resources may
// be made of the same devices: a device of which a container holds something of
// one resource is then withdrawn from the others until it is free again.
type Resource struct {
	// Name is the resource name that pods request.
	Name string `yaml:"name"`
	// Vendor is the backend whose devices it is made of.
	Vendor string `yaml:"vendor"`
	// Mode is how devices are shared.
	Mode Mode `yaml:"mode"`
	// Devices chooses among the vendor's devices; nil for all.
	Devices *DeviceSelector `yaml:"devices"`
	// AllocationPath is PathPlugin (when empty) or PathDRA where that of the node is PathBoth. The
	// devices of the two differ.
	AllocationPath AllocationPath `yaml:"allocationPath"`
	// Profile is the profile of the MIG devices that it is made of, such as "1g.10gb",
	// with "." or "+" before an attribute, or of the DRS instances, such as "1g.6gb"; empty
	// for other devices. With MigMixed or DRS only.
	// Profiles that no resource names get one each, of mode exclusive.
	Profile string `yaml:"profile"`
	// SplitBoards makes each chip of a board a device of its own; otherwise a
	// board of several chips is one device. Memory is always a chip's own, so
	// mode memory splits boards whatever this says.
	SplitBoards bool `yaml:"splitBoards"`

	// Isolation is what keeps the containers on a device apart; empty for IsolationNone. All
	// containers on the devices are limited, whatever their pods require. NVIDIA only.
	Isolation Isolation `yaml:"isolation"`

	// MemoryUnit is the size of one unit in GB (2^30 bytes): "1", "0.1",
	// "0.01" or "0.001", or "1/6" for a sixth of each device, whatever its memory. Mode
	// memory only.
	MemoryUnit string `yaml:"memoryUnit"`
	// CountResource names an extended resource in which the node's number of
	// devices is shown, "" for none. Mode memory only.
	CountResource string `yaml:"countResource"`

	// Replicas is how many pods may share one device in time slices, 1 to MaxReplicas.
	// Mode timeSlicing only.
	Replicas int `yaml:"replicas"`
	// ReplicasFor gives other numbers of replicas to some devices; the first
	// that matches counts. Mode timeSlicing only.
	ReplicasFor []ReplicaRule `yaml:"replicasFor"`
	// FailRequestsGreaterThanOne rejects containers that request more than one
	// replica: more replicas are no more of a device. Mode timeSlicing only.
	FailRequestsGreaterThanOne bool `yaml:"failRequestsGreaterThanOne"`
	// Allocation is how replicas are chosen, and MIG devices among several GPUs;
	// DistributedAllocation when empty. In mode memory it is for claims alone, and
	// PackedAllocation when empty.
	Allocation Allocation `yaml:"allocation"`
}

// Isolation is a tier of isolation that a resource's shared devices are to have.
type Isolation string

// The tiers that can be configured.
const (
	// IsolationNone limits no container.
	IsolationNone Isolation = "none"
	// IsolationCooperative bounds programs that use the vendor's library as it is shipped, by a
	// service of the vendor: memory and compute time. Mode memory only.
	IsolationCooperative Isolation = "cooperative"
	// IsolationDriver limits the memory of each container in the kernel driver. Mode memory
	// only.
	IsolationDriver Isolation = "driver"
)

// DeviceSelector chooses devices. A device is chosen when it matches any entry
// of Models, IDs, Indexes or Partitions (or all four are empty) and Except does not
// choose it. What chooses a GPU chooses its MIG devices too.
type DeviceSelector struct {
	// Models are product names as the vendor spells them, with "*" for any
	// text.
	Models []string `yaml:"models"`
	// IDs are the devices' uuids.
	IDs []string `yaml:"ids"`
	// Indexes are the vendor's numbers of the devices.
	Indexes []int `yaml:"indexes"`
	// Partitions are MIG devices by the numbers of their GPU and on it: "0:1".
	Partitions []string `yaml:"partitions"`
	// Except takes devices out again.
	Except *DeviceSelector `yaml:"except"`
}

// MaxReplicas bounds how many pods may share one device in time slices. More are a
// slip of the pen: each would get a thousandth of the device's time. It also
// keeps 64 devices within what kubelet accepts in one message, 4 MiB.
const MaxReplicas = 1024

// ReplicaRule gives some devices a number of replicas of their own.
type ReplicaRule struct {
	Devices  DeviceSelector `yaml:"devices"`
	Replicas int            `yaml:"replicas"`
}

// Allocation is how replicas are chosen for a container.
type Allocation string

// The ways to choose replicas.
const (
	// DistributedAllocation takes the device that the fewest pods share, and MIG
	// devices of the GPU with the fewest in use.
	DistributedAllocation Allocation = "distributed"
	// PackedAllocation takes the device that the most pods share, and MIG devices of
	// the GPU with the most in use.
	PackedAllocation Allocation = "packed"
)

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
	// InjectVolumeMounts names the devices by mounts instead of the variable's
	// value, for runtimes that are told to trust nothing else (NVIDIA).
	InjectVolumeMounts Injection = "volumeMounts"
	// InjectCDI names CDI devices in kubelet's own field, for runtimes that
	// read /var/run/cdi.
	InjectCDI Injection = "cdi"
	// InjectAuto is the way that the node's container runtime calls for. It stands alone, for
	// NVIDIA; the daemon replaces it before anything else reads the configuration.
	InjectAuto Injection = "auto"
	// InjectCDIAnnotations names CDI devices in annotations of the container,
	// for older kubelets.
	InjectCDIAnnotations Injection = "cdiAnnotations"
)

// Mode is how a resource shares devices.
type Mode string

// The sharing modes.
const (
	// ModeExclusive gives a device to one container as a whole.
	ModeExclusive Mode = "exclusive"
	// ModeTimeSlicing gives a device to several containers, which take turns.
	// It isolates neither memory nor time.
	ModeTimeSlicing Mode = "timeSlicing"
	// ModeMemory shares a device by units of its memory.
	ModeMemory Mode = "memory"
)

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
		Labels:         LabelAll,
		AllocationPath: PathPlugin,
		HealthInterval: Duration(5 * time.Second),
		Usage:          Usage{Interval: Duration(15 * time.Second), Metrics: UsageMetricsNamespace},
		Resources: []Resource{{
			Name:          "enflame.com/gcu-memory",
			Vendor:        "enflame",
			Mode:          ModeMemory,
			MemoryUnit:    "1",
			CountResource: "enflame.com/gcu-count",
		}},
	}
}

// WithInjection returns a copy of the configuration in which a vendor's devices reach containers
// in these ways.
func (c NodeConfig) WithInjection(vendor string, ways []Injection) NodeConfig {
	v := c.Vendors[vendor]
	v.Injection = ways
	c.Vendors = maps.Clone(c.Vendors)
	if c.Vendors == nil {
		c.Vendors = map[string]Vendor{}
	}
	c.Vendors[vendor] = v
	return c
}
