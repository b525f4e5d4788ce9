package v1alpha1

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// MemoryUnits are the sizes that a unit of memory sharing may have: in GB, and SixthOfDevice.
var MemoryUnits = []string{"1", "0.1", "0.01", "0.001", SixthOfDevice}

// SixthOfDevice is the unit that is a sixth of each device, whatever its memory.
const SixthOfDevice = "1/6"

// maxRecoverAfter bounds how long a device that is well again may be kept from
// pods; NeverRecover is for those that should stay away.
const maxRecoverAfter = 24 * time.Hour

// minUsageInterval and maxUsageInterval bound the time between two passes of measured use:
// a pass waits up to seconds for a library, and older numbers say little.
const minUsageInterval, maxUsageInterval = 5 * time.Second, 10 * time.Minute

// maxContextAllowanceMiB is more than a device has: its processes are never over.
const maxContextAllowanceMiB = 1 << 20

var (
	domainPattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)+$`)
	namePattern   = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	// cdiPattern is the form that the CDI specification gives to a vendor and a
	// class, with a slash between the two.
	cdiPattern = regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?$`)
	// causePattern is what the causes of ill health are written with.
	causePattern = regexp.MustCompile(`^[a-z0-9*-]+$`)
	// profilePattern is the form of the profiles of MIG devices, and partitionPattern
	// that of their numbers.
	profilePattern = regexp.MustCompile(`^([1-9][0-9]?c\.)?[1-9][0-9]?g\.[1-9][0-9]{0,3}gb([+.-][a-z]+([.,][a-z]+)*)?$`)
	// drsProfilePattern is the form of the profiles of DRS instances.
	drsProfilePattern = regexp.MustCompile(`^[1-9][0-9]?g\.[1-9][0-9]{0,3}gb$`)
	partitionPattern  = regexp.MustCompile(`^(0|[1-9][0-9]{0,3}):(0|[1-9][0-9]?)$`)
)

// maxDomain leaves room for the prefix "requests." that quotas put before a
// resource's name, whose domain may have 253 characters.
const maxDomain = 253 - len("requests.")

// Validate returns everything that is wrong with a completed configuration,
// each a sentence that begins with the field. vendors are the names of the
// backends that there are.
func Validate(c NodeConfig, vendors []string) []string {
	k := &checker{vendors: vendors, names: map[string]int{}}
	k.node(c)
	for _, vendor := range slices.Sorted(maps.Keys(c.Vendors)) {
		k.vendor("vendors."+vendor, vendor, c)
	}
	if len(c.Resources) == 0 {
		k.wrong("resources", "the list is empty; name at least one resource or leave the key out")
	}
	for i, r := range c.Resources {
		k.resource(i, r, c.PathOf(&r))
		k.profile(fmt.Sprintf("resources[%d].profile", i), r, c.Vendors[r.Vendor].Partitions())
	}
	k.paths(c)
	k.memoryTwice(c.Resources)
	k.cooperativeAlone(c.Resources)
	k.sockets(c)
	return k.mistakes
}

// checker collects mistakes.
type checker struct {
	vendors  []string
	mistakes []string
	names    map[string]int // names of resources, with the resource that has them
}

func (k *checker) wrong(field, format string, args ...any) {
	k.mistakes = append(k.mistakes, field+": "+fmt.Sprintf(format, args...))
}

func (k *checker) oneOf(field, got string, allowed ...string) {
	if !slices.Contains(allowed, got) {
		k.wrong(field, "%q is not known; use one of %s", got, strings.Join(allowed, ", "))
	}
}

func (k *checker) absolute(field, value string) {
	if !filepath.IsAbs(value) {
		k.wrong(field, "%q is not an absolute path", value)
	}
}

func (k *checker) node(c NodeConfig) {
	for _, p := range []struct{ field, path string }{
		{"driverRoot", c.DriverRoot}, {"kubeletDir", c.KubeletDir}, {"stateDir", c.StateDir},
		{"cdiDir", c.CDIDir}, {"grantKeyFile", c.GrantKeyFile},
	} {
		k.absolute(p.field, p.path)
	}
	if c.LogFile != "" {
		k.absolute("logFile", c.LogFile)
	}
	k.oneOf("logLevel", c.LogLevel, "error", "warn", "info", "debug")
	if _, port, err := net.SplitHostPort(c.Listen); err != nil {
		k.wrong("listen", "%q is not host:port", c.Listen)
	} else if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		k.wrong("listen", "%q is not a port from 1 to 65535", port)
	}
	k.oneOf("injection", string(c.Injection),
		string(InjectEnvironment), string(InjectDeviceNodes), string(InjectCDI), string(InjectCDIAnnotations))
	if d := time.Duration(c.HealthInterval); d < 100*time.Millisecond || d > time.Hour {
		k.wrong("healthInterval", "%v is out of range; use 100ms to 1h", d)
	}
	k.oneOf("allocationPath", string(c.AllocationPath), string(PathPlugin), string(PathDRA), string(PathBoth))
	k.oneOf("labels", string(c.Labels), string(LabelAll), string(LabelDivvy), string(LabelNone))
	if d := time.Duration(c.Usage.Interval); d < minUsageInterval || d > maxUsageInterval {
		k.wrong("usage.interval", "%v is out of range; use %v to %v", d, minUsageInterval, maxUsageInterval)
	}
	k.oneOf("usage.metrics", string(c.Usage.Metrics), string(UsageMetricsNone), string(UsageMetricsNamespace),
		string(UsageMetricsContainer))
	for _, vendor := range slices.Sorted(maps.Keys(c.Usage.Overuse.ContextAllowanceMiB)) {
		k.oneOf("usage.overuse.contextAllowanceMiB", vendor, k.vendors...)
		if n := c.Usage.Overuse.ContextAllowanceMiB[vendor]; n < 0 || n > maxContextAllowanceMiB {
			k.wrong("usage.overuse.contextAllowanceMiB."+vendor, "%d is out of range; use 0 to %d", n, maxContextAllowanceMiB)
		}
	}
	for _, vendor := range slices.Sorted(maps.Keys(c.Libraries)) {
		k.oneOf("libraries", vendor, k.vendors...)
		k.absolute("libraries."+vendor, c.Libraries[vendor])
	}
}

const (
	// nvidia is the vendor whose container runtime reads mounts, whose devices may be cut
	// into MIG devices, and whose CDI specifications have hooks.
	nvidia  = "nvidia"
	enflame = "enflame"
)

func (k *checker) vendor(at, name string, c NodeConfig) {
	v := c.Vendors[name]
	if !slices.Contains(k.vendors, name) {
		k.wrong(at, "there is no vendor %q; use one of %s", name, strings.Join(k.vendors, ", "))
	}
	if v.DriverRoot != "" {
		k.absolute(at+".driverRoot", v.DriverRoot)
	}
	if v.DevRoot != "" {
		k.absolute(at+".devRoot", v.DevRoot)
	}
	seen := map[Injection]bool{}
	for _, way := range v.Injection {
		k.oneOf(at+".injection", string(way), string(InjectEnvironment), string(InjectDeviceNodes),
			string(InjectVolumeMounts), string(InjectCDI), string(InjectCDIAnnotations), string(InjectAuto))
		if seen[way] {
			k.wrong(at+".injection", "%q is there twice; once is enough", way)
		}
		seen[way] = true
	}
	if seen[InjectEnvironment] && seen[InjectVolumeMounts] {
		k.wrong(at+".injection", "environment and volumeMounts both set the vendor's variable, one to the devices and one to a "+
			"folder; keep one of them")
	}
	if seen[InjectAuto] && name != nvidia {
		k.wrong(at+".injection", "auto is for NVIDIA's devices alone; use environment, deviceNodes or cdi")
	}
	if seen[InjectAuto] && len(v.Injection) > 1 {
		k.wrong(at+".injection", "auto stands alone; remove it, or the others")
	}
	if seen[InjectVolumeMounts] && name != nvidia {
		k.wrong(at+".injection", "volumeMounts is read by NVIDIA's container runtime alone; use environment, deviceNodes or cdi")
	}
	if v.DeviceIDs != "" {
		k.oneOf(at+".deviceIDs", v.DeviceIDs, "uuid", "index")
	}
	k.generatedCDI(at, name, v)
	if v.CDIKind != "" {
		if !cdiPattern.MatchString(v.CDIKind) {
			k.wrong(at+".cdiKind", "%q is not a kind of CDI devices; write vendor/class, such as nvidia.com/gpu", v.CDIKind)
		}
		cdi := seen[InjectCDI] || seen[InjectCDIAnnotations] || seen[InjectAuto]
		if len(v.Injection) == 0 {
			cdi = c.Injection == InjectCDI || c.Injection == InjectCDIAnnotations
		}
		if !cdi {
			k.wrong(at+".cdiKind", "%q is never used, as containers are given no CDI names; add cdi or cdiAnnotations to %s.injection, "+
				"or leave the key out",
				v.CDIKind, at)
		}
	}
	if v.MigStrategy != "" {
		k.oneOf(at+".migStrategy", string(v.MigStrategy), string(MigNone), string(MigSingle), string(MigMixed))
		if name != nvidia {
			k.wrong(at+".migStrategy", "%s devices have no MIG devices; leave the key out", name)
		}
	}
	if v.DRS && name != enflame {
		k.wrong(at+".drs", "%s devices have no DRS instances; leave the key out", name)
	}
	k.causes(at+".health.ignore", v.Health.Ignore, "all", "default")
	k.causes(at+".health.heed", v.Health.Heed)
	k.causes(at+".health.neverRecover", v.Health.NeverRecover, "default")
	if after := v.Health.RecoverAfter; after != nil && (*after < 0 || time.Duration(*after) > maxRecoverAfter) {
		k.wrong(at+".health.recoverAfter", "%v is out of range; use 0s to %v, or name causes in neverRecover", *after, maxRecoverAfter)
	}
}

// generatedCDI checks what is about the CDI specification that this program generates.
func (k *checker) generatedCDI(at, name string, v Vendor) {
	if v.CDIHookPath != "" {
		k.absolute(at+".cdiHookPath", v.CDIHookPath)
	}
	for _, hook := range v.CDIDisableHooks {
		k.oneOf(at+".cdiDisableHooks", hook, CDIHooks()...)
	}
	for _, flag := range v.CDIFeatureFlags {
		k.oneOf(at+".cdiFeatureFlags", flag, CDIFeatureFlags()...)
	}
	for _, one := range []struct {
		key string
		set bool
	}{
		{"cdiHookPath", v.CDIHookPath != ""},
		{"cdiDisableHooks", len(v.CDIDisableHooks) > 0},
		{"cdiFeatureFlags", len(v.CDIFeatureFlags) > 0},
	} {
		if one.set && name != nvidia {
			k.wrong(at+"."+one.key, "only the CDI specification of NVIDIA's devices has hooks and features; leave the key out")
		}
	}
}

// causes checks patterns of causes; words are those that may stand for several.
func (k *checker) causes(field string, patterns []string, words ...string) {
	for _, p := range patterns {
		switch {
		case !causePattern.MatchString(p):
			k.wrong(field, "%q is not a cause; write one such as xid-79 or over-temperature, with * for any text", p)
		case (p == "all" || p == "default") && !slices.Contains(words, p):
			k.wrong(field, "%q has no meaning here; write * for every cause", p)
		}
	}
}

func (k *checker) resource(i int, r Resource, path AllocationPath) {
	at := fmt.Sprintf("resources[%d].", i)
	k.name(at+"name", i, r.Name)
	k.oneOf(at+"vendor", r.Vendor, k.vendors...)
	k.oneOf(at+"mode", string(r.Mode), string(ModeExclusive), string(ModeTimeSlicing), string(ModeMemory))
	if r.Devices != nil {
		k.selector(at+"devices", *r.Devices, false)
	}

	known := slices.Contains([]Mode{ModeExclusive, ModeTimeSlicing, ModeMemory}, r.Mode)
	// only says that a key which is set has no meaning in the resource's mode.
	only := func(mode Mode, key string, set bool) {
		if set && known && r.Mode != mode {
			k.wrong(at+key, "the key belongs to mode %s, and the mode is %s; leave it out or change the mode", mode, r.Mode)
		}
	}
	only(ModeMemory, "memoryUnit", r.MemoryUnit != "")
	only(ModeMemory, "countResource", r.CountResource != "")
	only(ModeTimeSlicing, "replicas", r.Replicas != 0)
	only(ModeTimeSlicing, "replicasFor", len(r.ReplicasFor) > 0)
	only(ModeTimeSlicing, "failRequestsGreaterThanOne", r.FailRequestsGreaterThanOne)
	k.isolation(at+"isolation", r)
	if path == PathDRA && r.Isolation == IsolationCooperative {
		k.wrong(at+"isolation", "isolation %s is not for claims, which allocationPath %s serves; use %s, or allocationPath %s",
			r.Isolation, path, IsolationDriver, PathPlugin)
	}
	if r.Allocation != "" {
		k.oneOf(at+"allocation", string(r.Allocation), string(DistributedAllocation), string(PackedAllocation))
		if r.Mode == ModeMemory && path != PathDRA {
			k.wrong(at+"allocation", "the key belongs to modes %s and %s, and the mode is %s; leave it out or change the mode, or set "+
				"allocationPath %s", ModeTimeSlicing, ModeExclusive, r.Mode, PathDRA)
		}
	}

	if r.CountResource != "" {
		k.name(at+"countResource", i, r.CountResource)
	}
	switch r.Mode {
	case ModeMemory:
		if !slices.Contains(MemoryUnits, r.MemoryUnit) {
			k.wrong(at+"memoryUnit", "%q is not known; use one of %s", r.MemoryUnit, strings.Join(MemoryUnits, ", "))
		}
	case ModeTimeSlicing:
		k.replicas(at+"replicas", r.Replicas)
		for j, rule := range r.ReplicasFor {
			at := fmt.Sprintf("%sreplicasFor[%d].", at, j)
			if rule.Devices.isZero() {
				k.wrong(at+"devices", "no device is named, so the rule is for all; put its number into replicas instead")
			}
			k.selector(at+"devices", rule.Devices, false)
			k.replicas(at+"replicas", rule.Replicas)
		}
	case ModeExclusive:
	}
}

// isolation checks the tier of a resource's devices.
func (k *checker) isolation(field string, r Resource) {
	switch r.Isolation {
	case "", IsolationNone:
	case IsolationCooperative, IsolationDriver:
		switch {
		case r.Vendor != nvidia:
			k.wrong(field, "%s is for NVIDIA's devices; leave the key out for %s", r.Isolation, r.Vendor)
		case r.Mode == ModeExclusive:
			k.wrong(field, "a container has a device of mode %s for itself, which is tier hardware; leave the key out", r.Mode)
		case r.Mode == ModeTimeSlicing:
			k.wrong(field, "%s limits memory, and time slices have no memory of their own; use mode %s", r.Isolation, ModeMemory)
		}
	default:
		k.oneOf(field, string(r.Isolation), string(IsolationNone), string(IsolationCooperative), string(IsolationDriver))
	}
}

// paths checks how the devices are divided between units and claims.
func (k *checker) paths(c NodeConfig) {
	count := map[AllocationPath]int{}
	for i := range c.Resources {
		r, at := &c.Resources[i], fmt.Sprintf("resources[%d].", i)
		count[c.PathOf(r)]++
		if r.AllocationPath != "" {
			k.oneOf(at+"allocationPath", string(r.AllocationPath), string(PathPlugin), string(PathDRA))
			if c.AllocationPath != PathBoth {
				k.wrong(at+"allocationPath", "the key belongs to allocationPath %s of the node, which is %s; leave it out", PathBoth,
					c.AllocationPath)
			}
		}
		for j := range c.Resources[:i] {
			other := &c.Resources[j]
			if r.Vendor == other.Vendor && c.PathOf(r) != c.PathOf(other) && !disjoint(r.Devices, other.Devices) {
				k.wrong(at+"devices", "resources[%d] has allocationPath %s and may choose the same devices, and a device belongs to one "+
					"path; choose devices for both that cannot be the same, by indexes, by ids or by models", j, c.PathOf(other))
			}
		}
	}
	if c.AllocationPath == PathBoth && len(c.Resources) > 0 && (count[PathDRA] == 0 || count[PathPlugin] == 0) {
		k.wrong("allocationPath", "with %s, some resources have allocationPath %s and the others %s; here all have the same, so use that",
			PathBoth, PathPlugin, PathDRA)
	}
}

// cooperativeAlone rejects other resources that may be made of the devices of a cooperative one:
// only programs that the vendor's service serves can use such a device. A resource with a profile is
// made of MIG devices, of GPUs that a cooperative resource does not offer.
func (k *checker) cooperativeAlone(resources []Resource) {
	for i, r := range resources {
		for j, other := range resources {
			if r.Isolation == IsolationCooperative && r.Mode == ModeMemory && other.Mode != ModeMemory && r.Vendor == other.Vendor &&
				r.Profile == "" && other.Profile == "" && !disjoint(r.Devices, other.Devices) {
				k.wrong(fmt.Sprintf("resources[%d].isolation", i), "resources[%d] may offer the same devices, and with isolation %s a "+
					"device is offered by one resource alone; choose devices for both that cannot be the same, by indexes, by ids or "+
					"by models", j, r.Isolation)
			}
		}
	}
}

// profile checks the profile of a resource of MIG devices.
func (k *checker) profile(field string, r Resource, strategy MigStrategy) {
	switch {
	case r.Profile == "":
	case r.Vendor == enflame:
		k.profileOfDRS(field, r, strategy == MigMixed)
	case r.Vendor != nvidia:
		k.wrong(field, "%s devices have no profiles; leave the key out", r.Vendor)
	case !profilePattern.MatchString(r.Profile):
		k.wrong(field, "%q is not the profile of a MIG device; write one such as 1g.10gb or 1g.10gb+me, as nvidia-smi mig -lgip lists them",
			r.Profile)
	case strings.Contains(r.Profile, "c."):
		k.wrong(field, "%q is a part of a GPU instance, and only MIG devices that have all of theirs are offered; write %s", r.Profile,
			r.Profile[strings.Index(r.Profile, "c.")+2:])
	case strategy != MigMixed:
		k.wrong(field, "the key belongs to vendors.%s.migStrategy %s; set that or leave the profile out", r.Vendor, MigMixed)
	case r.Mode == ModeMemory:
		k.wrong(field, "MIG devices are not shared by units of memory; use mode %s or %s", ModeExclusive, ModeTimeSlicing)
	}
}

// profileOfDRS checks the profile of a resource of DRS instances.
func (k *checker) profileOfDRS(field string, r Resource, offered bool) {
	switch {
	case !drsProfilePattern.MatchString(r.Profile):
		k.wrong(field, "%q is not the profile of a DRS instance; write one such as 1g.6gb, as efsmi --drs --list-profile lists them",
			r.Profile)
	case !offered:
		k.wrong(field, "the key belongs to vendors.%s.drs; set that to true or leave the profile out", r.Vendor)
	case r.Mode != ModeExclusive:
		k.wrong(field, "a DRS instance is for one container; use mode %s", ModeExclusive)
	}
}

func (k *checker) replicas(field string, n int) {
	if n < 1 || n > MaxReplicas {
		k.wrong(field, "%d is out of range; use 1 to %d, or mode exclusive for devices that are not shared", n, MaxReplicas)
	}
}

func (k *checker) name(field string, i int, value string) {
	domain, base, ok := strings.Cut(value, "/")
	if !ok || !domainPattern.MatchString(domain) || len(domain) > maxDomain || !namePattern.MatchString(base) {
		k.wrong(field, "%q is not the name of an extended resource; write domain/name, such as enflame.com/gcu-memory", value)
	} else if domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io") {
		k.wrong(field, "%q is in a domain that Kubernetes keeps for itself", value)
	}
	if first, dup := k.names[value]; dup {
		k.wrong(field, "%q is used by resources[%d] already; give each its own name", value, first)
	} else {
		k.names[value] = i
	}
}

func (k *checker) selector(field string, s DeviceSelector, inner bool) {
	for _, m := range s.Models {
		if strings.TrimSpace(m) == "" {
			k.wrong(field+".models", "%q is no model; write the product name, with * for any text", m)
		}
	}
	for _, id := range s.IDs {
		switch {
		case strings.TrimSpace(id) != id || id == "":
			k.wrong(field+".ids", "%q is no uuid of a device", id)
		case strings.Contains(id, "::"):
			k.wrong(field+".ids", "%q names a replica; write the device's uuid, without :: and what follows", id)
		}
	}
	for _, n := range s.Indexes {
		if n < 0 {
			k.wrong(field+".indexes", "%d is negative; devices are counted from 0", n)
		}
	}
	for _, p := range s.Partitions {
		if !partitionPattern.MatchString(p) {
			k.wrong(field+".partitions", "%q is no MIG device; write the number of its GPU and its own, such as 0:1", p)
		}
	}
	if s.Except == nil {
		return
	}
	switch {
	case inner:
		k.wrong(field+".except", "an exception has no exceptions; name the devices in %s", strings.TrimSuffix(field, ".except"))
	case s.Except.isZero():
		k.wrong(field+".except", "no device is named, so all are taken out; name some or leave the key out")
	default:
		k.selector(field+".except", *s.Except, true)
	}
}

func (s DeviceSelector) isZero() bool {
	return len(s.Models) == 0 && len(s.IDs) == 0 && len(s.Indexes) == 0 && len(s.Partitions) == 0 && s.Except == nil
}

const (
	// maxSocket is how long the path of a Unix socket may be on Linux: sun_path of
	// unix(7), less the zero byte at its end.
	maxSocket = 107
	// maxResourceSocket leaves room for the "~2" of a resource whose socket
	// cannot be taken, and for a few more attempts.
	maxResourceSocket = maxSocket - len("~99")
)

// sockets refuses paths that no socket can have. Such a resource would never
// reach kubelet. What stands below kubeletDir is named as package deviceplugin
// names it.
func (k *checker) sockets(c NodeConfig) {
	dir := filepath.Join(c.KubeletDir, "device-plugins")
	const kubelet = "kubelet.sock"
	if path := filepath.Join(dir, kubelet); len(path) > maxSocket {
		k.wrong("kubeletDir", "kubelet's socket %s has %d bytes, and a socket's path may have %d; use a shorter folder", path, len(path),
			maxSocket)
		return
	}
	taken := map[string]bool{kubelet: true}
	for i, r := range c.Resources {
		domain, name, _ := strings.Cut(r.Name, "/")
		label, _, _ := strings.Cut(domain, ".")
		socket := label + "-" + name + ".sock"
		if taken[socket] {
			socket = strings.ReplaceAll(r.Name, "/", "_") + ".sock"
		}
		taken[socket] = true
		// A name that is no name has been told of.
		if path := filepath.Join(dir, socket); len(path) > maxResourceSocket && namePattern.MatchString(name) && len(domain) <= maxDomain {
			k.wrong(fmt.Sprintf("resources[%d].name", i), "the socket of %s below kubeletDir, %s, has %d bytes, and it may have %d; "+
				"use a name that is shorter by %d", r.Name, path, len(path), maxResourceSocket, len(path)-maxResourceSocket)
		}
	}
}

// memoryTwice refuses two memory resources that may be made of one device. The
// node would withdraw a device from the one while the other is in use, but the
// scheduler's extender counts each resource by itself and would grant the same
// memory twice, again and again, for the node to refuse.
func (k *checker) memoryTwice(resources []Resource) {
	for i, r := range resources {
		for j, other := range resources[:i] {
			if r.Mode != ModeMemory || other.Mode != ModeMemory || r.Vendor != other.Vendor || r.Vendor == "" {
				continue
			}
			if !disjoint(r.Devices, other.Devices) {
				k.wrong(fmt.Sprintf("resources[%d].devices", i), "resources[%d] may share the memory of the same devices of %q, and the "+
					"scheduler would promise it twice; choose devices for both that cannot be the same, by indexes, by ids or by models", j,
					r.Vendor)
			}
		}
	}
}

// disjoint reports whether no device can be chosen by both. It knows only what
// the selectors say: a uuid and an index may be the same device.
func disjoint(a, b *DeviceSelector) bool {
	a, b = cmp.Or(a, &DeviceSelector{}), cmp.Or(b, &DeviceSelector{})
	if a.Except != nil && takesOut(*a.Except, *b) || b.Except != nil && takesOut(*b.Except, *a) {
		return true
	}
	if len(a.Partitions)+len(b.Partitions) > 0 {
		return false
	}
	kinds := func(s *DeviceSelector) [3]bool {
		return [3]bool{len(s.Models) > 0, len(s.IDs) > 0, len(s.Indexes) > 0}
	}
	one := map[[3]bool]bool{{true, false, false}: true, {false, true, false}: true, {false, false, true}: true}
	if kinds(a) != kinds(b) || !one[kinds(a)] {
		return false
	}
	return !slices.ContainsFunc(a.IDs, func(id string) bool { return slices.Contains(b.IDs, id) }) &&
		!slices.ContainsFunc(a.Indexes, func(n int) bool { return slices.Contains(b.Indexes, n) }) &&
		!slices.ContainsFunc(a.Models, func(m string) bool {
			return slices.ContainsFunc(b.Models, func(n string) bool { return mayMatchBoth(m, n) })
		})
}

// takesOut reports whether an exception names all that s chooses.
func takesOut(except, s DeviceSelector) bool {
	if len(s.Models)+len(s.IDs)+len(s.Indexes) == 0 || len(s.Partitions) > 0 {
		return false
	}
	return containsAll(except.Models, s.Models) && containsAll(except.IDs, s.IDs) && containsAll(except.Indexes, s.Indexes)
}

func containsAll[T comparable](all, some []T) bool {
	return !slices.ContainsFunc(some, func(v T) bool { return !slices.Contains(all, v) })
}

// mayMatchBoth reports whether some model may match two patterns. It errs to
// the side of true.
func mayMatchBoth(a, b string) bool {
	if !strings.Contains(a, "*") {
		a, b = b, a
	}
	if !strings.Contains(b, "*") {
		return MatchModel(a, b)
	}
	// Both have stars: what stands before the first and after the last decides.
	headA, _, _ := strings.Cut(a, "*")
	headB, _, _ := strings.Cut(b, "*")
	tailA, tailB := a[strings.LastIndex(a, "*")+1:], b[strings.LastIndex(b, "*")+1:]
	return (strings.HasPrefix(headA, headB) || strings.HasPrefix(headB, headA)) &&
		(strings.HasSuffix(tailA, tailB) || strings.HasSuffix(tailB, tailA))
}
