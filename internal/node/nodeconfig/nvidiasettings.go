package nodeconfig

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

// Warnings that several settings share.
const (
	imexWarning = "IMEX channels are not given to containers; keep NVIDIA's plugin on nodes whose pods need them"
	gfdWarning  = "labels are kept by divvy-node itself, on the node and without a file, as soon as what they say changes; " +
		"the key labels of a NodeConfig says which; remove the setting"
)

// nvidiaSetting is one setting of NVIDIA's device plugin that is a single
// value, in its file and in its environment.
type nvidiaSetting struct {
	// field is where the file has it.
	field string
	// env are the plugin's environment variables for it.
	env []string
	// get returns its text in a file, and whether it is there.
	get func(*nvidiaFile) (string, bool)
	// apply brings the value into the settings of the vendor. A warning says
	// that it is not, or not quite, done; an error what is wrong with it.
	apply func(v *config.Vendor, value string) (warning string, err error)
}

func fromText(p func(*nvidiaFile) *string) func(*nvidiaFile) (string, bool) {
	return func(f *nvidiaFile) (string, bool) { s := p(f); return stringOf(s), s != nil }
}

func fromBool(p func(*nvidiaFile) *bool) func(*nvidiaFile) (string, bool) {
	return func(f *nvidiaFile) (string, bool) {
		b := p(f)
		return strconv.FormatBool(b != nil && *b), b != nil
	}
}

func notInFiles(*nvidiaFile) (string, bool) { return "", false }

// notDone makes the apply of a switch that this program has not: false is what
// it does anyway.
func notDone(warning string) func(*config.Vendor, string) (string, error) {
	return func(_ *config.Vendor, value string) (string, error) {
		on, err := parseBool(value)
		if err != nil || !on {
			return "", err
		}
		return warning, nil
	}
}

// unused makes the apply of a text that means nothing here unless it is one of
// the values that change nothing.
func unused(warning string, harmless ...string) func(*config.Vendor, string) (string, error) {
	return func(_ *config.Vendor, value string) (string, error) {
		if value == "" || slices.Contains(harmless, value) {
			return "", nil
		}
		return warning, nil
	}
}

func parseBool(text string) (bool, error) {
	b, err := strconv.ParseBool(strings.TrimSpace(text))
	if err != nil {
		return false, fmt.Errorf("%q is neither true nor false", text)
	}
	return b, nil
}

func unknown(value string, known ...string) error {
	return fmt.Errorf("%q is not known; use one of %s", value, strings.Join(known, ", "))
}

// nvidiaSettings are all of them, but what is about resources. The order is
// that of application: device nodes are added to what the strategy says.
var nvidiaSettings = []nvidiaSetting{
	{
		"flags.migStrategy", []string{"MIG_STRATEGY"}, fromText(func(f *nvidiaFile) *string { return f.Flags.MigStrategy }),
		func(v *config.Vendor, value string) (string, error) {
			switch strategy := config.MigStrategy(value); strategy {
			case config.MigNone, config.MigSingle, config.MigMixed, "":
				v.MigStrategy = strategy
				return "", nil
			}
			return "", unknown(value, string(config.MigNone), string(config.MigSingle), string(config.MigMixed))
		},
	},
	{
		"flags.failOnInitError", []string{"FAIL_ON_INIT_ERROR"}, fromBool(func(f *nvidiaFile) *bool { return f.Flags.FailOnInitError }),
		notDone("divvy-node waits for a driver that is not there and says so in its log and in /readyz, whatever is set here; remove the " +
			"setting"),
	},
	{
		"flags.mpsRoot", []string{"MPS_ROOT"}, fromText(func(f *nvidiaFile) *string { return f.Flags.MPSRoot }),
		unused("sharing by MPS is not offered, so its folder is not used; remove the setting"),
	},
	{
		"flags.nvidiaDriverRoot", []string{"NVIDIA_DRIVER_ROOT"}, fromText(func(f *nvidiaFile) *string { return f.Flags.NVIDIADriverRoot }),
		func(v *config.Vendor, value string) (string, error) {
			v.DriverRoot = value
			return "", nil
		},
	},
	{
		"flags.nvidiaDevRoot", []string{"NVIDIA_DEV_ROOT"}, fromText(func(f *nvidiaFile) *string { return f.Flags.NVIDIADevRoot }),
		func(v *config.Vendor, value string) (string, error) {
			v.DevRoot = value
			return "", nil
		},
	},
	{
		"flags.gdrcopyEnabled", []string{"GDRCOPY_ENABLED"}, fromBool(func(f *nvidiaFile) *bool { return f.Flags.GDRCopyEnabled }),
		notDone("GDRCopy is not turned on in containers; set NVIDIA_GDRCOPY=enabled in the pods that use it"),
	},
	{
		"flags.gdsEnabled", []string{"GDS_ENABLED"}, fromBool(func(f *nvidiaFile) *bool { return f.Flags.GDSEnabled }),
		notDone("GPUDirect Storage is not turned on in containers; set NVIDIA_GDS=enabled in the pods that use it"),
	},
	{
		"flags.mofedEnabled", []string{"MOFED_ENABLED"}, fromBool(func(f *nvidiaFile) *bool { return f.Flags.MOFEDEnabled }),
		notDone("MOFED devices are not given to containers; set NVIDIA_MOFED=enabled in the pods that use them"),
	},
	{
		"flags.useNodeFeatureAPI", nil, fromBool(func(f *nvidiaFile) *bool { return f.Flags.UseNodeFeatureAPI }),
		notDone(gfdWarning),
	},
	{
		"flags.deviceDiscoveryStrategy", []string{"DEVICE_DISCOVERY_STRATEGY"},
		fromText(func(f *nvidiaFile) *string { return f.Flags.DeviceDiscoveryStrategy }),
		func(_ *config.Vendor, value string) (string, error) {
			switch value {
			case "auto", "nvml", "":
				return "", nil
			case "tegra", "vfio":
				return "devices are found by NVML alone; keep NVIDIA's plugin on nodes that need " + value, nil
			}
			return "", unknown(value, "auto", "nvml", "tegra", "vfio")
		},
	},
	{
		"flags.plugin.deviceListStrategy", []string{"DEVICE_LIST_STRATEGY"}, func(f *nvidiaFile) (string, bool) {
			if l := f.Flags.Plugin.DeviceListStrategy; l != nil {
				return strings.Join(*l, ","), true
			}
			return "", false
		},
		applyListStrategy,
	},
	{
		"flags.plugin.passDeviceSpecs", []string{"PASS_DEVICE_SPECS"},
		fromBool(func(f *nvidiaFile) *bool { return f.Flags.Plugin.PassDeviceSpecs }),
		func(v *config.Vendor, value string) (string, error) {
			pass, err := parseBool(value)
			if err != nil {
				return "", err
			}
			ways := withoutNodes(v.Injection)
			if len(ways) == 0 {
				ways = []config.Injection{config.InjectEnvironment}
			}
			if pass && slices.ContainsFunc(ways, func(w config.Injection) bool { return !isCDI(w) }) {
				// With CDI alone the plugin passes none: CDI brings them.
				ways = append(ways, config.InjectDeviceNodes)
			}
			v.Injection = ways
			return "", nil
		},
	},
	{
		"flags.plugin.deviceIDStrategy", []string{"DEVICE_ID_STRATEGY"},
		fromText(func(f *nvidiaFile) *string { return f.Flags.Plugin.DeviceIDStrategy }),
		func(v *config.Vendor, value string) (string, error) {
			switch value {
			case "uuid", "index", "":
				v.DeviceIDs = value
				return "", nil
			}
			return "", unknown(value, "uuid", "index")
		},
	},
	{
		"flags.plugin.cdiAnnotationPrefix", []string{"CDI_ANNOTATION_PREFIX"},
		fromText(func(f *nvidiaFile) *string { return f.Flags.Plugin.CDIAnnotationPrefix }),
		unused("annotations with CDI names always begin with cdi.k8s.io/, which every runtime reads; remove the setting", "cdi.k8s.io/"),
	},
	{
		"flags.plugin.nvidiaCTKPath", []string{"NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"},
		fromText(func(f *nvidiaFile) *string { return f.Flags.Plugin.NVIDIACTKPath }),
		func(v *config.Vendor, value string) (string, error) {
			v.CDIHookPath = value
			if value == "/usr/bin/nvidia-ctk" || value == "/usr/bin/nvidia-cdi-hook" {
				v.CDIHookPath = "" // the plugin's defaults, which are among the places that are searched
			}
			return "", nil
		},
	},
	{
		"flags.plugin.containerDriverRoot", []string{"DRIVER_ROOT_CTR_PATH", "CONTAINER_DRIVER_ROOT"},
		fromText(func(f *nvidiaFile) *string { return f.Flags.Plugin.ContainerDriverRoot }),
		unused("divvy-node looks for the driver in nvidiaDriverRoot below the host's root, which is mounted at driverRoot; no mount of "+
			"its own is needed",
			"/driver-root", "/"),
	},
	{
		"flags.plugin.sharedDevicesAllocationPolicy", []string{"SHARED_DEVICES_ALLOCATION_POLICY"},
		fromText(func(f *nvidiaFile) *string { return f.Flags.Plugin.SharedDevicesAllocationPolicy }),
		func(_ *config.Vendor, value string) (string, error) {
			if value != "" && value != string(config.DistributedAllocation) && value != string(config.PackedAllocation) {
				return "", unknown(value, string(config.DistributedAllocation), string(config.PackedAllocation))
			}
			return "", nil // it belongs to the resource
		},
	},
	{"flags.gfd.oneshot", nil, fromBool(func(f *nvidiaFile) *bool { return f.Flags.GFD.Oneshot }), notDone(gfdWarning)},
	{"flags.gfd.noTimestamp", nil, fromBool(func(f *nvidiaFile) *bool { return f.Flags.GFD.NoTimestamp }), notDone(gfdWarning)},
	{"flags.gfd.sleepInterval", nil, fromText(func(f *nvidiaFile) *string { return f.Flags.GFD.SleepInterval }), unused(gfdWarning)},
	{"flags.gfd.outputFile", nil, fromText(func(f *nvidiaFile) *string { return f.Flags.GFD.OutputFile }), unused(gfdWarning)},
	{"flags.gfd.machineTypeFile", nil, fromText(func(f *nvidiaFile) *string { return f.Flags.GFD.MachineTypeFile }), unused(gfdWarning)},
	// What follows is in no file.
	{"", []string{"IMEX_CHANNEL_IDS"}, notInFiles, unused(imexWarning, "[]")},
	{"", []string{"IMEX_REQUIRED"}, notInFiles, notDone(imexWarning)},
	{"", []string{"CDI_FEATURE_FLAGS"}, notInFiles, func(v *config.Vendor, value string) (string, error) {
		v.CDIFeatureFlags = splitList(value)
		return "", nil
	}},
	{"", []string{"CDI_DISABLE_HOOKS"}, notInFiles, func(v *config.Vendor, value string) (string, error) {
		v.CDIDisableHooks = splitList(value)
		return "", nil
	}},
	{
		"", []string{"KUBELET_SOCKET"}, notInFiles,
		unused("kubelet's socket is device-plugins/kubelet.sock below kubeletDir; set kubeletDir",
			"/var/lib/kubelet/device-plugins/kubelet.sock"),
	},
	{"", []string{"DP_DISABLE_HEALTHCHECKS"}, notInFiles, func(v *config.Vendor, value string) (string, error) {
		ignore, err := xids(value, "all", "xid-*")
		if err == nil && ignore != nil && !slices.Equal(ignore, []string{"all"}) {
			ignore = append([]string{"default"}, ignore...)
		}
		if err == nil && ignore != nil {
			v.Health.Ignore = ignore
		}
		return "", err
	}},
	{"", []string{"DP_ENABLE_HEALTHCHECKS"}, notInFiles, func(v *config.Vendor, value string) (string, error) {
		heed, err := xids(value, "*", "xid-*")
		if err == nil && heed != nil {
			v.Health.Heed = heed
		}
		return "", err
	}},
}

// xids turns a list of XIDs into causes; all and everyXID stand for the words
// "all" and "xids" in it. It is nil for an empty text.
func xids(value, all, everyXID string) ([]string, error) {
	var out []string
	for _, one := range splitList(strings.ToLower(value)) {
		switch one {
		case "all":
			return []string{all}, nil
		case "xids":
			out = append(out, everyXID)
		default:
			if _, err := strconv.ParseUint(one, 10, 32); err != nil {
				return nil, fmt.Errorf("%q is not the number of an XID; write numbers, xids or all", one)
			}
			out = append(out, "xid-"+one)
		}
	}
	return out, nil
}

func isCDI(w config.Injection) bool {
	return w == config.InjectCDI || w == config.InjectCDIAnnotations
}

// applyListStrategy sets how a container reaches its devices.
func applyListStrategy(v *config.Vendor, value string) (warning string, err error) {
	names := map[string]config.Injection{
		"envvar":          config.InjectEnvironment,
		"volume-mounts":   config.InjectVolumeMounts,
		"cdi-annotations": config.InjectCDIAnnotations,
		"cdi-cri":         config.InjectCDI,
	}
	var ways []config.Injection
	for _, name := range splitList(value) {
		way, ok := names[name]
		if !ok {
			return "", unknown(name, "envvar", "volume-mounts", "cdi-annotations", "cdi-cri")
		}
		if !slices.Contains(ways, way) {
			ways = append(ways, way)
		}
	}
	if len(ways) == 0 {
		return "", nil
	}
	var warnings []string
	if slices.Contains(ways, config.InjectVolumeMounts) && slices.Contains(ways, config.InjectEnvironment) {
		ways = slices.DeleteFunc(ways, func(w config.Injection) bool { return w == config.InjectEnvironment })
		warnings = append(warnings, "envvar has no effect beside volume-mounts, which sets the same variable; remove it")
	}
	if nodes := slices.Contains(v.Injection, config.InjectDeviceNodes); nodes &&
		slices.ContainsFunc(ways, func(w config.Injection) bool { return !isCDI(w) }) {
		ways = append(ways, config.InjectDeviceNodes)
	}
	v.Injection, v.CDIKind = ways, ""
	return strings.Join(warnings, "; "), nil
}
