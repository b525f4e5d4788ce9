package nodeconfig

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

var vendors = []string{"enflame", "iluvatar", "nvidia"}

// write puts a file into a folder of its own.
func write(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func load(t *testing.T, overrides Overrides, files ...string) Loaded {
	t.Helper()
	l, err := Load(files, overrides, vendors)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// hasAll fails the test for each text that no line contains.
func hasAll(t *testing.T, lines []string, texts ...string) {
	t.Helper()
	for _, want := range texts {
		if !slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, want) }) {
			t.Errorf("missing %q in:\n%s", want, strings.Join(lines, "\n"))
		}
	}
}

// ix is a resource of Iluvatar's file.
func ix(change func(*config.Resource)) []config.Resource {
	r := config.Resource{Name: "iluvatar.com/gpu", Vendor: "iluvatar", Mode: config.ModeExclusive}
	if change != nil {
		change(&r)
	}
	return []config.Resource{r}
}

func TestIXFileIsReadAsItIs(t *testing.T) {
	tests := map[string]struct {
		text     string
		want     []config.Resource
		warnings []string
	}{
		"that of the guide": {
			"version: \"4.2.0\"\nflags:\n  splitboard: false\nsharing:\n  timeSlicing:\n      replicas: 4 \n",
			ix(func(r *config.Resource) { r.Mode, r.Replicas = config.ModeTimeSlicing, 4 }), nil,
		},
		"split boards":    {"version: \"4.2.0\"\nflags: {splitboard: true}", ix(func(r *config.Resource) { r.SplitBoards = true }), nil},
		"without version": {"flags: {splitboard: true}", ix(func(r *config.Resource) { r.SplitBoards = true }), nil},
		"no replicas":     {"sharing: {timeSlicing: {replicas: 0}}", ix(nil), nil},
		"one replica keeps its number": {
			"sharing: {timeSlicing: {replicas: 1}}", ix(func(r *config.Resource) { r.Mode, r.Replicas = config.ModeTimeSlicing, 1 }), nil,
		},
		"renamed": {"resourceName: iluvatar.com/bi150", ix(func(r *config.Resource) { r.Name = "iluvatar.com/bi150" }), nil},
		"another version": {"version: 4.3.1\nflags: {splitboard: true}", ix(func(r *config.Resource) { r.SplitBoards = true }),
			[]string{`version: "4.3.1" is not looked at`}},
		"nothing after":  {"version: 4.2.0\n---\n# the end\n", ix(nil), nil},
		"only a version": {"version: 4.2.0", ix(nil), nil},
		"nothing":        {"", ix(nil), nil},
		"JSON": {`{"version": "4.2.0", "flags": {"splitboard": true}}`, ix(func(r *config.Resource) { r.SplitBoards = true }),
			nil},
		"letters of either case": {
			"Flags: {splitBoard: true}", ix(func(r *config.Resource) { r.SplitBoards = true }), nil,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l := load(t, nil, write(t, "ix-config", tt.text))
			if diff := cmp.Diff(tt.want, l.Config.Resources); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
			if len(l.Warnings) != len(tt.warnings) {
				t.Errorf("%d warnings: %q", len(l.Warnings), l.Warnings)
			}
			hasAll(t, l.Warnings, tt.warnings...)
		})
	}
}

// Defect 9 of the IX device plugin: sharing.mps, version and misspelt keys were
// taken and dropped.
func TestNothingOfTheIXFileIsDroppedInSilence(t *testing.T) {
	l := load(t, nil, write(t, "ix-config", "version: 9\nflags: {splitbord: true, usevolcano: true, reset_gpu: true}\nsharing: {mps: "+
		"{replicas: 2}}\ncolour: blue\n"))
	hasAll(t, l.Warnings,
		`line 2: the key "splitbord" is not known`, `line 4: the key "colour" is not known`,
		"flags.usevolcano: volcano chooses no devices here",
		"flags.reset_gpu: devices are not reset", "sharing.mps: it never had an effect", `version: "9" is not looked at`)
	for _, w := range l.Warnings {
		if !strings.Contains(w, "ix-config: ") {
			t.Errorf("a warning does not name its file: %s", w)
		}
	}
}

// Defect 10 of the IX device plugin: any text was taken as a resource's name.
func TestIXResourceNameIsChecked(t *testing.T) {
	for _, tt := range [][2]string{
		{"resourceName: gpu", `resources[0].name: "gpu" is not the name of an extended resource`},
		{"resourceName: a.kubernetes.io/gpu", "in a domain that Kubernetes keeps for itself"},
		{"resourceName: iluvatar.com/gpu/x", "is not the name of an extended resource"},
		{"sharing: {timeSlicing: {replicas: -1}}", "sharing.timeSlicing.replicas: -1 is out of range; use 1 to " +
			"1024, or 0"},
		{"sharing: {timeSlicing: {replicas: 5000}}", "sharing.timeSlicing.replicas: 5000 is out of range"},
		{"sharing: {timeSlicing: {replicas: 3.7}}", "line 1: 3.7 is not a whole number"},
		{"Sharing: {TimeSlicing: {Replicas: 3.7}}", "line 1: 3.7 is not a whole number"},
		{"version: 4.2.0\n---\nresourceName: a.com/b", "the file holds more than one YAML document"},
		{"version: 4.2.0\n---\nresourceName: [", "did not find expected node content"},
		{"flags: [splitboard]\nresourceName: a.com/b", "line 1: cannot unmarshal !!seq, where keys are expected"},
		{"flags: {splitboard: maybe}", "cannot unmarshal !!str `maybe`, where true or false is expected"},
		{"resourceName: a.com/b\nresources: {gpus: []}", "the file has keys of the IX device plugin and of NVIDIA's"},
		{"resourceName: gpu\nsharing: {timeSlicing: {replicas: -1}}\na: b", "2 mistakes"},
	} {
		text, want := tt[0], tt[1]
		_, err := Load([]string{write(t, "ix-config", text)}, nil, vendors)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: want %q, got %v", text, want, err)
		}
	}
}

// sliced is NVIDIA's resource in time slices.
func sliced(change func(*config.Resource)) []config.Resource {
	r := config.Resource{Name: "nvidia.com/gpu", Vendor: "nvidia", Mode: config.ModeTimeSlicing, Replicas: 4}
	if change != nil {
		change(&r)
	}
	return []config.Resource{r}
}

const fourSlices = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"

var (
	wholeGPUs   = []config.Resource{{Name: "nvidia.com/gpu", Vendor: "nvidia", Mode: config.ModeExclusive}}
	environment = config.Vendor{Injection: []config.Injection{config.InjectEnvironment}}
)

// nvidiaCases has a case or more for each field of the file: it works, which
// the settings or resources show, or a warning names it.
var nvidiaCases = map[string][]struct {
	text      string
	settings  func(*config.Vendor)
	resources []config.Resource
	warning   string
}{
	"version": {{text: "version: v1"}},
	"flags.migStrategy": {
		{text: "flags: {migStrategy: none}", settings: func(v *config.Vendor) { v.MigStrategy = config.MigNone }},
		{text: "flags: {migStrategy: single}", settings: func(v *config.Vendor) { v.MigStrategy = config.MigSingle }},
		{text: "flags: {migStrategy: mixed}", settings: func(v *config.Vendor) { v.MigStrategy = config.MigMixed }},
	},
	"flags.failOnInitError": {
		{text: "flags: {failOnInitError: false}"},
		{text: "flags: {failOnInitError: true}", warning: "flags.failOnInitError: divvy-node waits for a driver"},
	},
	"flags.mpsRoot": {{text: "flags: {mpsRoot: /run/nvidia/mps}", warning: "flags.mpsRoot: sharing by MPS is not offered"}},
	"flags.nvidiaDriverRoot": {
		{text: "flags: {nvidiaDriverRoot: /run/nvidia/driver}", settings: func(v *config.Vendor) { v.DriverRoot = "/run/nvidia/driver" }},
	},
	"flags.nvidiaDevRoot": {{text: "flags: {nvidiaDevRoot: /}", settings: func(v *config.Vendor) { v.DevRoot = "/" }}},
	"flags.gdrcopyEnabled": {{text: "flags: {gdrcopyEnabled: true}", warning: "flags.gdrcopyEnabled: GDRCopy is not turned on"},
		{text: "flags: {gdrcopyEnabled: false}"}},
	"flags.gdsEnabled":   {{text: "flags: {gdsEnabled: true}", warning: "flags.gdsEnabled: GPUDirect Storage is not turned on"}},
	"flags.mofedEnabled": {{text: "flags: {mofedEnabled: true}", warning: "flags.mofedEnabled: MOFED devices are not given"}},
	"flags.useNodeFeatureAPI": {{text: "flags: {useNodeFeatureAPI: true}",
		warning: "flags.useNodeFeatureAPI: labels are kept by divvy-node"}},
	"flags.deviceDiscoveryStrategy": {
		{text: "flags: {deviceDiscoveryStrategy: auto}"}, {text: "flags: {deviceDiscoveryStrategy: nvml}"},
		{text: "flags: {deviceDiscoveryStrategy: tegra}", warning: "flags.deviceDiscoveryStrategy: devices are found by NVML alone"},
	},
	"flags.plugin.passDeviceSpecs": {
		{text: "flags: {plugin: {passDeviceSpecs: false}}"},
		{text: "flags: {plugin: {passDeviceSpecs: true}}", settings: func(v *config.Vendor) {
			v.Injection = []config.Injection{config.InjectEnvironment, config.InjectDeviceNodes}
		}},
	},
	"flags.plugin.deviceListStrategy": {
		{text: "flags: {plugin: {deviceListStrategy: envvar}}"},
		{text: "flags: {plugin: {deviceListStrategy: [envvar]}}"},
		{text: "flags: {plugin: {deviceListStrategy: volume-mounts}}", settings: func(v *config.Vendor) {
			v.Injection = []config.Injection{config.InjectVolumeMounts}
		}},
		{text: "flags: {plugin: {deviceListStrategy: [volume-mounts, envvar], passDeviceSpecs: true}}", settings: func(v *config.Vendor) {
			v.Injection = []config.Injection{config.InjectVolumeMounts, config.InjectDeviceNodes}
		}, warning: "flags.plugin.deviceListStrategy: envvar has no effect beside volume-mounts"},
		{text: "flags: {plugin: {deviceListStrategy: \"cdi-annotations,cdi-cri\", passDeviceSpecs: true}}",
			settings: func(v *config.Vendor) {
				v.Injection = []config.Injection{config.InjectCDIAnnotations, config.InjectCDI}
			}},
	},
	"flags.plugin.deviceIDStrategy": {
		{text: "flags: {plugin: {deviceIDStrategy: index}}", settings: func(v *config.Vendor) { v.DeviceIDs = "index" }},
	},
	"flags.plugin.cdiAnnotationPrefix": {
		{text: "flags: {plugin: {cdiAnnotationPrefix: cdi.k8s.io/}}"},
		{text: "flags: {plugin: {cdiAnnotationPrefix: x.io/}}",
			warning: "flags.plugin.cdiAnnotationPrefix: annotations with CDI names always begin with"},
	},
	"flags.plugin.nvidiaCTKPath": {
		{text: "flags: {plugin: {nvidiaCTKPath: /usr/bin/nvidia-ctk}}"},
		{text: "flags: {plugin: {nvidiaCTKPath: /opt/nvidia-ctk}}",
			settings: func(v *config.Vendor) { v.CDIHookPath = "/opt/nvidia-ctk" }},
	},
	"flags.plugin.containerDriverRoot": {
		{text: "flags: {plugin: {containerDriverRoot: /driver-root}}"},
		{text: "flags: {plugin: {containerDriverRoot: /d}}",
			warning: "flags.plugin.containerDriverRoot: divvy-node looks for the driver in"},
	},
	"flags.plugin.sharedDevicesAllocationPolicy": {
		{text: "flags: {plugin: {sharedDevicesAllocationPolicy: distributed}}\n" + fourSlices, resources: sliced(nil)},
		{
			text:      "flags: {plugin: {sharedDevicesAllocationPolicy: packed}}\n" + fourSlices,
			resources: sliced(func(r *config.Resource) { r.Allocation = config.PackedAllocation }),
		},
	},
	"flags.gfd.oneshot":         {{text: "flags: {gfd: {oneshot: true}}", warning: "flags.gfd.oneshot: labels are kept by divvy-node"}},
	"flags.gfd.noTimestamp":     {{text: "flags: {gfd: {noTimestamp: true}}", warning: "flags.gfd.noTimestamp: labels"}},
	"flags.gfd.sleepInterval":   {{text: "flags: {gfd: {sleepInterval: infinite}}", warning: "flags.gfd.sleepInterval: labels"}},
	"flags.gfd.outputFile":      {{text: "flags: {gfd: {outputFile: /x}}", warning: "flags.gfd.outputFile: labels"}},
	"flags.gfd.machineTypeFile": {{text: "flags: {gfd: {machineTypeFile: /x}}", warning: "flags.gfd.machineTypeFile: labels"}},
	"resources.gpus.pattern": {
		{text: "resources: {gpus: [{pattern: \"*\", name: nvidia.com/gpu}]}"},
		{text: "resources: {gpus: [{pattern: \"*A100*\", name: a100}]}",
			warning: "resources.gpus: the names of models (\"*A100*\" is nvidia.com/a100) have no effect"},
	},
	"resources.gpus.name": {{text: "resources: {gpus: [{pattern: \"*\", name: card}]}", warning: "resources.gpus: the names of models"}},
	"resources.mig.pattern": {
		{text: "resources: {mig: [{pattern: 1g.5gb+me, name: mig-1g.5gb.me}]}"},
		{text: "resources: {mig: [{pattern: \"*\", name: gpu}]}",
			warning: "resources.mig: the names of profiles (\"*\" is nvidia.com/gpu)"},
	},
	"resources.mig.name": {{text: "resources: {mig: [{pattern: 1g.5gb, name: small}]}",
		warning: "resources.mig: the names of profiles (\"1g.5gb\" is nvidia.com/small) have no effect"}},
	"imex.channelIDs": {{text: "imex: {channelIDs: [0]}", warning: "imex: IMEX channels are not given"},
		{text: "imex: {channelIDs: []}"}},
	"imex.required": {{text: "imex: {required: true}", warning: "imex: IMEX channels"}, {text: "imex: {required: false}"}},
	"sharing.timeSlicing.renameByDefault": {
		{
			text:      "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}",
			resources: sliced(func(r *config.Resource) { r.Name = "nvidia.com/gpu.shared" }),
		},
	},
	"sharing.timeSlicing.failRequestsGreaterThanOne": {
		{
			text:      "sharing: {timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}",
			resources: sliced(func(r *config.Resource) { r.FailRequestsGreaterThanOne = true }),
		},
	},
	"sharing.timeSlicing.resources.name": {
		{text: "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}", resources: sliced(nil)},
		{text: "sharing: {timeSlicing: {resources: [{name: mig-1g.5gb, replicas: 4}]}}",
			warning: "no device is offered as nvidia.com/mig-1g.5gb without migStrategy mixed"},
		{
			text:     "flags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: mig-1g.5gb.me, replicas: 4}]}}",
			settings: func(v *config.Vendor) { v.MigStrategy = config.MigMixed },
			resources: append(slices.Clone(wholeGPUs), sliced(func(r *config.Resource) {
				r.Name, r.Profile = "nvidia.com/mig-1g.5gb.me", "1g.5gb.me"
			})...),
		},
		{
			text: "flags: {migStrategy: mixed}\nsharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 4}, " +
				"{name: nvidia.com/mig-2g.10gb, replicas: 4}]}}",
			settings: func(v *config.Vendor) { v.MigStrategy = config.MigMixed },
			resources: append(sliced(func(r *config.Resource) { r.Name = "nvidia.com/gpu.shared" }), sliced(func(r *config.Resource) {
				r.Name, r.Profile = "nvidia.com/mig-2g.10gb.shared", "2g.10gb"
			})...),
		},
		{text: "sharing: {timeSlicing: {resources: [{name: card, replicas: 4}]}}", warning: `resources[0]: no device is offered as "card"`},
	},
	"sharing.timeSlicing.resources.rename": {
		{
			text:      "sharing: {timeSlicing: {resources: [{name: gpu, rename: slice, replicas: 4}]}}",
			resources: sliced(func(r *config.Resource) { r.Name = "nvidia.com/slice" }),
			warning:   "rename: nvidia.com/slice is used as it is written, while NVIDIA's plugin overwrites it",
		},
	},
	"sharing.timeSlicing.resources.devices": {
		{text: "sharing: {timeSlicing: {resources: [{name: gpu, devices: all, replicas: 4}]}}", resources: sliced(nil)},
		{
			text: "sharing: {timeSlicing: {resources: [{name: gpu, devices: 2, replicas: 4}]}}",
			resources: sliced(func(r *config.Resource) {
				r.Replicas, r.ReplicasFor = 1, []config.ReplicaRule{{Devices: config.DeviceSelector{Indexes: []int{0, 1}}, Replicas: 4}}
			}),
			warning: "devices: only the devices that are named are shared",
		},
		{
			text: "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, devices: [1, GPU-2], replicas: 4}]}}",
			resources: []config.Resource{
				sliced(func(r *config.Resource) {
					r.Name, r.Devices = "nvidia.com/gpu.shared", &config.DeviceSelector{Indexes: []int{1}, IDs: []string{"GPU-2"}}
				})[0],
				{Name: "nvidia.com/gpu", Vendor: "nvidia", Mode: config.ModeExclusive,
					Devices: &config.DeviceSelector{Except: &config.DeviceSelector{Indexes: []int{1}, IDs: []string{"GPU-2"}}}},
			},
			warning: "devices: only the devices that are named are shared",
		},
		{
			text: "flags: {migStrategy: single}\n" +
				"sharing: {timeSlicing: {resources: [{name: gpu, devices: [\"0:1\", MIG-3], replicas: 4}]}}",
			settings: func(v *config.Vendor) { v.MigStrategy = config.MigSingle },
			resources: sliced(func(r *config.Resource) {
				r.Replicas, r.ReplicasFor = 1, []config.ReplicaRule{
					{Devices: config.DeviceSelector{Partitions: []string{"0:1"}, IDs: []string{"MIG-3"}}, Replicas: 4},
				}
			}),
			warning: "devices: only the devices that are named are shared",
		},
	},
	"sharing.timeSlicing.resources.replicas": {{text: fourSlices, resources: sliced(nil)}},
	"sharing.mps.renameByDefault": {{text: "sharing: {mps: {renameByDefault: true}}",
		warning: "sharing.mps: sharing by MPS is not offered"}},
	"sharing.mps.failRequestsGreaterThanOne": {{text: "sharing: {mps: {failRequestsGreaterThanOne: false}}",
		warning: "sharing.mps: sharing by MPS"}},
	"sharing.mps.resources.name": {{text: "sharing: {mps: {resources: [{name: gpu, replicas: 4}]}}",
		warning: "sharing.mps: sharing by MPS"}},
	"sharing.mps.resources.rename": {{text: "sharing: {mps: {resources: [{rename: x}]}}",
		warning: "sharing.mps: sharing by MPS"}},
	"sharing.mps.resources.devices": {{text: "sharing: {mps: {resources: [{devices: all}]}}",
		warning: "sharing.mps: sharing by MPS"}},
	"sharing.mps.resources.replicas": {{text: "sharing: {mps: {resources: [{replicas: 4}]}}",
		warning: "sharing.mps: sharing by MPS"}},
}

func TestEachFieldOfTheNVIDIAFileWorksOrIsNamed(t *testing.T) {
	for field, cases := range nvidiaCases {
		for _, tt := range cases {
			t.Run(field+" "+tt.text, func(t *testing.T) {
				text := tt.text
				if !strings.HasPrefix(text, "version") {
					text = "version: v1\n" + text
				}
				l := load(t, nil, write(t, "config.yaml", text))
				want := environment
				if tt.settings != nil {
					tt.settings(&want)
				}
				if diff := cmp.Diff(want, l.Config.Vendors["nvidia"]); diff != "" {
					t.Errorf("settings (-want +got):\n%s", diff)
				}
				resources := tt.resources
				if resources == nil {
					resources = wholeGPUs
				}
				if diff := cmp.Diff(resources, l.Config.Resources); diff != "" {
					t.Errorf("resources (-want +got):\n%s", diff)
				}
				switch {
				case tt.warning != "":
					hasAll(t, l.Warnings, tt.warning)
				case len(l.Warnings) > 0:
					t.Errorf("warnings: %q", l.Warnings)
				}
			})
		}
	}
}

func TestNoFieldOfTheNVIDIAFileIsForgotten(t *testing.T) {
	var leaves []string
	var walk func(prefix string, typ reflect.Type)
	walk = func(prefix string, typ reflect.Type) {
		for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice && typ.Elem().Kind() == reflect.Struct {
			typ = typ.Elem()
		}
		if typ.Kind() != reflect.Struct || typ == reflect.TypeFor[nvidiaDevices]() {
			leaves = append(leaves, prefix)
			return
		}
		for f := range typ.Fields() {
			walk(strings.TrimPrefix(prefix+"."+f.Tag.Get("yaml"), "."), f.Type)
		}
	}
	walk("", reflect.TypeFor[nvidiaFile]())
	slices.Sort(leaves)
	if diff := cmp.Diff(leaves, slices.Sorted(maps.Keys(nvidiaCases))); diff != "" {
		t.Errorf("the fields of the file and those with a case differ (-file +cases):\n%s", diff)
	}
}

func TestNVIDIAFileWithMistakesIsRefused(t *testing.T) {
	tests := [][2]string{
		{"version: v2\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}", `version: "v2" is not known; write v1`},
		{"flags: {migStrategy: double}", `flags.migStrategy: "double" is not known; use one of none, single, mixed`},
		{"flags: {migStrategy: mixed}\nsharing: {mps: {resources: [{name: gpu, replicas: 4}]}}",
			"sharing.mps: MPS cannot be combined with migStrategy mixed"},
		{"flags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: mig-tiny, replicas: 4}]}}",
			`resources[1].profile: "tiny" is not the profile of a MIG device`},
		{"flags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: mig-1c.2g.10gb, replicas: 4}]}}",
			`resources[1].profile: "1c.2g.10gb" is a part of a GPU instance`},
		{"flags: {migStrategy: mixed}\n" +
			"sharing: {timeSlicing: {resources: [{name: mig-1g.5gb, replicas: 4}, {name: mig-1g.5gb, replicas: 2}]}}",
			"resources[1].name: nvidia.com/mig-1g.5gb is there twice"},
		{"sharing: {timeSlicing: {resources: [{name: gpu, devices: [\"0:99\"], replicas: 4}]}}", `"0:99" names no devices`},
		{"flags: {deviceDiscoveryStrategy: magic}",
			`flags.deviceDiscoveryStrategy: "magic" is not known; use one of auto, nvml, tegra, vfio`},
		{"flags: {plugin: {deviceListStrategy: [envvar, magic]}}",
			`flags.plugin.deviceListStrategy: "magic" is not known; use one of envvar, volume-mounts, cdi-annotations, cdi-cri`},
		{"flags: {plugin: {deviceIDStrategy: name}}", `flags.plugin.deviceIDStrategy: "name" is not known; use one of uuid, index`},
		{"flags: {plugin: {sharedDevicesAllocationPolicy: any}}",
			`flags.plugin.sharedDevicesAllocationPolicy: "any" is not known; use one of distributed, packed`},
		{"flags: {plugin: {passDeviceSpecs: perhaps}}", "cannot unmarshal !!str `perhaps`, where true or false is expected"},
		{"version: v1\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 3.7}]}}", "line 2: 3.7 is not a whole number"},
		{"version: v2\nflags: {}", `version: "v2" is not known; write v1`},
		{"version: v1\nresources: []", "line 2: cannot unmarshal !!seq, where keys are expected"},
		{"version: v1\nresources: {gpus: many}", "line 2: cannot unmarshal !!str `many`, where a list is expected"},
		{"version: v1\n---\nversion: v1\nsharing: {}", "the file holds more than one YAML document; one is read"},
		{"version: v1\nsharing: {timeSlicing: {}}", "sharing.timeSlicing.resources: the list is empty"},
		{"sharing: {timeSlicing: {resources: [{replicas: 2}]}}", "sharing.timeSlicing.resources[0].name: the name is missing"},
		{"sharing: {timeSlicing: {resources: [{name: gpu}]}}",
			"sharing.timeSlicing.resources[0].replicas: 0 is out of range; use 2 to 1024"},
		{"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}", "sharing.timeSlicing.resources[0].replicas: 1 is out of range"},
		{"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: none}]}}", `"none" names no devices`},
		{"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [-1]}]}}", `"-1" names no devices`},
		{"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: nvidia.com/gpu, replicas: 3}]}}",
			"resources[1].name: nvidia.com/gpu is there twice"},
		{"version: v1\nflags: [", "did not find expected node content"},
	}
	for _, tt := range tests {
		text, want := tt[0], tt[1]
		_, err := Load([]string{write(t, "config.yaml", text)}, nil, vendors)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: want %q, got %v", text, want, err)
		}
	}
}

// Defect 15 of NVIDIA's device plugin: a block mps made it forget timeSlicing
// without a word.
func TestMPSDoesNotWinOverTimeSlicingInSilence(t *testing.T) {
	both := "sharing:\n  mps: {resources: [{name: gpu, replicas: 8}]}\n  timeSlicing: {resources: [{name: gpu, replicas: 4}]}\n"
	l := load(t, nil, write(t, "config.yaml", both))
	if diff := cmp.Diff(sliced(nil), l.Config.Resources); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	hasAll(t, l.Warnings, "sharing.mps: sharing by MPS is not offered", "the time slices of the same file hold")
	// Nor do time slices take the place of mps in silence.
	l = load(t, nil, write(t, "config.yaml", "sharing: {mps: {resources: [{name: gpu, replicas: 8}]}}"))
	if diff := cmp.Diff(wholeGPUs, l.Config.Resources); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	hasAll(t, l.Warnings, "GPUs are offered whole")
}

// Defect 16 of NVIDIA's device plugin: its usage left out cdi-cri, and an error
// about one strategy named others.
func TestARefusedStrategyNamesAllThatThereAre(t *testing.T) {
	_, err := Load([]string{write(t, "c", "flags: {plugin: {deviceListStrategy: cdi}}")}, nil, vendors)
	for _, strategy := range []string{"envvar", "volume-mounts", "cdi-annotations", "cdi-cri"} {
		if err == nil || !strings.Contains(err.Error(), strategy) {
			t.Errorf("missing %s in: %v", strategy, err)
		}
	}
}

func TestUnknownKeysOfTheNVIDIAFileAreNamed(t *testing.T) {
	l := load(t, nil, write(t, "config.json", "{\"version\": \"v1\",\n\"flags\": {\"migstrategy\": \"none\", \"colour\": 1}}"))
	hasAll(t, l.Warnings, `line 2: the key "colour" is not known and has no effect`)
	if len(l.Warnings) != 1 {
		t.Errorf("warnings: %q", l.Warnings)
	}
}

func TestTheFormOfAFileIsSeen(t *testing.T) {
	tests := map[string]struct{ name, text, want string }{
		"neither":           {"c.yaml", "flags: {colour: red}", "add version: v1 for NVIDIA's"},
		"ours without head": {"c.yaml", "resourcs: []", `apiVersion: "" is not served`},
		"a head forgotten": {"c.yaml", "resources:\n- name: nvidia.com/gpu\n  vendor: nvidia\n",
			`apiVersion: "" is not served; write config.divvy.dev/v1alpha1`},
		"an empty file":      {"c.yaml", "", `apiVersion: "" is not served`},
		"both":               {"c.yaml", "flags: {splitboard: true, migStrategy: none}", "of the IX device plugin and of NVIDIA's"},
		"a list":             {"c.yaml", "- a", "cannot unmarshal"},
		"ours of the future": {"c.yaml", "apiVersion: config.divvy.dev/v9\nkind: NodeConfig", `"config.divvy.dev/v9" is not served`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := Load([]string{write(t, tt.name, tt.text)}, nil, vendors)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("want %q, got %v", tt.want, err)
			}
			if err != nil && strings.Contains(err.Error(), "nodeconfig.") {
				t.Errorf("the words of Go: %v", err)
			}
		})
	}
}

func FuzzLoad(f *testing.F) {
	for _, cases := range nvidiaCases {
		f.Add("version: v1\n" + cases[0].text)
	}
	f.Add("version: v1\nsharing: &s {timeSlicing: {resources: [{replicas: 2.5, devices: 1.5}]}}\n---\nimex: {channelIDs: [0.5]}")
	f.Add("flags: {splitboard: true}\nsharing: {timeSlicing: {replicas: 4}}")
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text string) {
		path := filepath.Join(dir, "config.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		l, err := Load([]string{path}, nil, vendors)
		if err != nil {
			return
		}
		encoded, err := config.Encode(l.Config)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := config.Parse(encoded, "encoded", vendors); err != nil {
			t.Errorf("the new form of %q is refused: %v\n%s", text, err, encoded)
		}
	})
}
