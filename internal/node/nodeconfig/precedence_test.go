package nodeconfig

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

const head = "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\n"

// nvidiaWhole is a file of this program's own form with NVIDIA's GPUs.
const nvidiaWhole = head + "resources: [{name: nvidia.com/gpu, vendor: nvidia, mode: exclusive}]\n"

// from makes lookups in a map.
func from(env map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { v, ok := env[name]; return v, ok }
}

func collect(t *testing.T, env map[string]string, args ...string) Overrides {
	t.Helper()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	AddFlags(fs, vendors)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return Collect(fs, from(env), vendors)
}

func TestCommandLineGoesBeforeEnvironmentBeforeFileBeforeDefault(t *testing.T) {
	file := write(t, "node.yaml", nvidiaWhole+"logLevel: warn\nlisten: \":1\"\nstateDir: /file\nvendors: {nvidia: {deviceIDs: index, "+
		"driverRoot: /file, devRoot: /file}}\n")
	env := map[string]string{
		"DIVVY_LISTEN": ":2", "DIVVY_STATE_DIR": "/env", "DIVVY_NVIDIA_DRIVER_ROOT": "/env",
		"NVIDIA_DRIVER_ROOT": "/old", "NVIDIA_DEV_ROOT": "/old", "DIVVY_NVIDIA_RECOVER_AFTER": "3s",
	}
	c := load(t, collect(t, env, "--state-dir=/flag", "--health-interval", "7s", "--nvidia-library=/l", "--nvidia-health-ignore="),
		file).Config
	want := config.Default()
	want.LogLevel, want.Listen, want.StateDir = "warn", ":2", "/flag"
	want.HealthInterval = config.Duration(7 * time.Second)
	want.Libraries = map[string]string{"nvidia": "/l"}
	want.Resources = wholeGPUs
	want.Vendors = map[string]config.Vendor{"nvidia": {
		DeviceIDs: "index", DriverRoot: "/env", DevRoot: "/old",
		Health: config.Health{Ignore: []string{}, RecoverAfter: new(config.Duration(3 * time.Second))},
	}}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestEverySettingHasAFlagAndAVariable(t *testing.T) {
	values := map[string]string{
		"log-level": "debug", "listen": ":77", "injection": "environment", "health-interval": "9s", "labels": "none",
		"device-ids": "index", "cdi-kind": "a.com/b", "health-ignore": "xid-1", "health-heed": "xid-2", "recover-after": "1m",
		"cdi-disable-hooks": "chmod", "cdi-feature-flags": "disable-ipc-discoverer",
	}
	for _, s := range settings(vendors) {
		t.Run(s.flag, func(t *testing.T) {
			_, key, vendors := strings.Cut(s.flag, "-")
			value := values[s.flag]
			if value == "" && vendors {
				value = values[key]
			}
			if value == "" {
				value = "/somewhere"
			}
			env := map[string]string{}
			if strings.HasSuffix(s.flag, "-cdi-kind") {
				env[EnvName(strings.Replace(s.flag, "cdi-kind", "injection", 1))] = "cdi"
			}
			if strings.HasSuffix(s.flag, "-injection") {
				value = "environment,deviceNodes"
			}
			before := load(t, collect(t, env)).Config
			byFlag := load(t, collect(t, env, "--"+s.flag+"="+value)).Config
			env[EnvName(s.flag)] = value
			byEnv := load(t, collect(t, env)).Config
			if cmp.Equal(before, byFlag) {
				t.Error("the flag has no effect")
			}
			if diff := cmp.Diff(byFlag, byEnv); diff != "" {
				t.Errorf("flag and variable differ (-flag +variable):\n%s", diff)
			}
		})
	}
}

func TestValuesThatDoNotParseNameTheirVariable(t *testing.T) {
	env := map[string]string{
		"SPLIT_BOARD": "perhaps", "USE_VOLCANO": "2", "RESET_GPU": "-", "PASS_DEVICE_SPECS": "some", "FAIL_ON_INIT_ERROR": "x",
		"DEVICE_LIST_STRATEGY": "magic", "DEVICE_ID_STRATEGY": "name", "MIG_STRATEGY": "double", "DP_DISABLE_HEALTHCHECKS": "79,often",
		"DP_ENABLE_HEALTHCHECKS": "-1", "SHARED_DEVICES_ALLOCATION_POLICY": "any", "DEVICE_DISCOVERY_STRATEGY": "magic",
		"GDS_ENABLED": "yes please", "GDRCOPY_ENABLED": "y?", "MOFED_ENABLED": "z", "IMEX_REQUIRED": "q",
		"DIVVY_HEALTH_INTERVAL": "often", "DIVVY_NVIDIA_RECOVER_AFTER": "soon",
	}
	_, err := Load(nil, collect(t, env, "--iluvatar-recover-after=never"), vendors)
	if err == nil {
		t.Fatal("accepted")
	}
	for name := range env {
		if !strings.Contains(err.Error(), "environment variable "+name+": ") {
			t.Errorf("%s is not named in:\n%v", name, err)
		}
	}
	if !strings.Contains(err.Error(), `--iluvatar-recover-after: "never" is not a duration`) {
		t.Errorf("the flag is not named in:\n%v", err)
	}
}

func TestVariablesOfTheIXDevicePluginWork(t *testing.T) {
	file := write(t, "ix-config", "flags: {splitboard: false}")
	l := load(t, collect(t, map[string]string{"SPLIT_BOARD": "true", "USE_VOLCANO": "true", "RESET_GPU": "1"}), file)
	if !l.Config.Resources[0].SplitBoards {
		t.Error("SPLIT_BOARD has no effect")
	}
	hasAll(t, l.Warnings, "environment variable USE_VOLCANO: volcano", "environment variable RESET_GPU: devices are not reset")
	l = load(t, collect(t, map[string]string{"SPLIT_BOARD": "false", "USE_VOLCANO": "false", "RESET_GPU": ""}),
		write(t, "ix-config", "flags: {splitboard: true}"))
	if l.Config.Resources[0].SplitBoards || len(l.Warnings) > 0 {
		t.Errorf("SPLIT_BOARD=false: %+v %q", l.Config.Resources, l.Warnings)
	}
}

func TestEachVariableOfTheNVIDIAPluginWorksOrIsNamed(t *testing.T) {
	nodes := []config.Injection{config.InjectEnvironment, config.InjectDeviceNodes}
	tests := map[string]struct {
		value   string
		want    config.Vendor
		warning string
	}{
		"MIG_STRATEGY":       {value: "mixed", want: config.Vendor{MigStrategy: config.MigMixed}},
		"FAIL_ON_INIT_ERROR": {value: "true", warning: "waits for a driver"},
		"NVIDIA_DRIVER_ROOT": {value: "/run/nvidia/driver", want: config.Vendor{DriverRoot: "/run/nvidia/driver"}},
		"NVIDIA_DEV_ROOT":    {value: "/d", want: config.Vendor{DevRoot: "/d"}},
		"PASS_DEVICE_SPECS":  {value: "true", want: config.Vendor{Injection: nodes}},
		"DEVICE_LIST_STRATEGY": {value: "volume-mounts", want: config.Vendor{Injection: []config.Injection{config.InjectVolumeMounts,
			config.InjectDeviceNodes}}},
		"DEVICE_ID_STRATEGY":        {value: "index", want: config.Vendor{DeviceIDs: "index"}},
		"GDRCOPY_ENABLED":           {value: "true", warning: "GDRCopy"},
		"GDS_ENABLED":               {value: "true", warning: "GPUDirect"},
		"MOFED_ENABLED":             {value: "true", warning: "MOFED"},
		"CDI_ANNOTATION_PREFIX":     {value: "x/", warning: "annotations"},
		"NVIDIA_CDI_HOOK_PATH":      {value: "/x", want: config.Vendor{CDIHookPath: "/x"}},
		"NVIDIA_CTK_PATH":           {value: "/x", want: config.Vendor{CDIHookPath: "/x"}},
		"DRIVER_ROOT_CTR_PATH":      {value: "/x", warning: "no mount of its own"},
		"CONTAINER_DRIVER_ROOT":     {value: "/x", warning: "no mount of its own"},
		"MPS_ROOT":                  {value: "/x", warning: "MPS is not offered"},
		"DEVICE_DISCOVERY_STRATEGY": {value: "tegra", warning: "NVML alone"},
		"IMEX_CHANNEL_IDS":          {value: "0", warning: "IMEX"},
		"IMEX_REQUIRED":             {value: "true", warning: "IMEX"},
		"KUBELET_SOCKET":            {value: "/x", warning: "set kubeletDir"},
		"CDI_FEATURE_FLAGS": {value: "disable-ipc-discoverer, disable-nvsandboxutils",
			want: config.Vendor{CDIFeatureFlags: []string{"disable-ipc-discoverer", "disable-nvsandboxutils"}}},
		"CDI_DISABLE_HOOKS": {value: "enable-cuda-compat", want: config.Vendor{CDIDisableHooks: []string{"enable-cuda-compat"}}},
		"DP_DISABLE_HEALTHCHECKS": {value: "48,63",
			want: config.Vendor{Health: config.Health{Ignore: []string{"default", "xid-48", "xid-63"}}}},
		"DP_ENABLE_HEALTHCHECKS": {value: "13", want: config.Vendor{Health: config.Health{Heed: []string{"xid-13"}}}},
	}
	for _, s := range nvidiaSettings {
		for _, name := range s.env {
			if _, ok := tests[name]; !ok && name != "SHARED_DEVICES_ALLOCATION_POLICY" {
				t.Errorf("there is no case for %s", name)
			}
		}
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l := load(t, collect(t, map[string]string{name: tt.value}), write(t, "node.yaml", nvidiaWhole))
			if diff := cmp.Diff(tt.want, l.Config.Vendors["nvidia"]); diff != "" {
				t.Errorf("settings (-want +got):\n%s", diff)
			}
			switch {
			case tt.warning != "":
				hasAll(t, l.Warnings, "environment variable "+name+": ", tt.warning)
			case len(l.Warnings) > 0:
				t.Errorf("warnings: %q", l.Warnings)
			}
			// On a node without NVIDIA's devices it means nothing.
			l = load(t, collect(t, map[string]string{name: tt.value}))
			if len(l.Warnings) > 0 || len(l.Config.Vendors) > 0 {
				t.Errorf("without NVIDIA's devices: %q %v", l.Warnings, l.Config.Vendors)
			}
		})
	}
	packed := load(t, collect(t, map[string]string{"SHARED_DEVICES_ALLOCATION_POLICY": "packed"}), write(t, "c.yaml", fourSlices))
	if got := packed.Config.Resources[0].Allocation; got != config.PackedAllocation {
		t.Errorf("SHARED_DEVICES_ALLOCATION_POLICY: %q", got)
	}
}

// Defect 2 of NVIDIA's device plugin: "all disabled, 94 enabled" watched nothing.
func TestAllChecksDisabledButOneWatchesThatOne(t *testing.T) {
	tests := map[string]struct {
		disable, enable string
		counts, ignored []string
	}{
		"all but 94":          {"all", "94", []string{"xid-94"}, []string{"xid-79", "xid-13", "ecc-double-bit"}},
		"XIDs but 94":         {"xids", "94", []string{"xid-94", "ecc-double-bit", "lost"}, []string{"xid-79", "xid-13"}},
		"all":                 {"all", "", nil, []string{"xid-94", "lost"}},
		"some more":           {"48, 63", "", []string{"xid-79"}, []string{"xid-48", "xid-63", "xid-13"}},
		"one of the defaults": {"", "13", []string{"xid-13", "xid-79"}, []string{"xid-31"}},
		"all enabled":         {"48", "xids", []string{"xid-48", "xid-13"}, nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			env := map[string]string{"DP_DISABLE_HEALTHCHECKS": tt.disable, "DP_ENABLE_HEALTHCHECKS": tt.enable}
			h := load(t, collect(t, env), write(t, "node.yaml", nvidiaWhole)).Config.Vendors["nvidia"].Health
			o := backend.Options{Ignore: h.Ignore, Heed: h.Heed}
			for _, cause := range slices.Concat(tt.counts, tt.ignored) {
				if got, want := o.Counts(cause, "xid-13", "xid-31"), slices.Contains(tt.counts, cause); got != want {
					t.Errorf("%s counts: %v, want %v (ignore %q, heed %q)", cause, got, want, h.Ignore, h.Heed)
				}
			}
		})
	}
}

func TestALaterFileGoesOverAnEarlierOne(t *testing.T) {
	base := write(t, "base.yaml", head+`logLevel: warn
stateDir: /base
vendors: {nvidia: {deviceIDs: index, driverRoot: /run/nvidia/driver}, iluvatar: {deviceIDs: index}}
resources:
- {name: enflame.com/gcu, vendor: enflame, mode: exclusive}
- {name: nvidia.com/gpu, vendor: nvidia, mode: exclusive}
`)
	own := write(t, "own.yaml", head+"logLevel: debug\n")
	ixFile := write(t, "ix-config", "flags: {splitboard: true}")
	nvidiaFile := write(t, "nvidia.yaml", fourSlices)
	c := load(t, nil, base, own, ixFile, nvidiaFile).Config
	want := config.Default()
	want.LogLevel, want.StateDir = "debug", "/base"
	want.Vendors = map[string]config.Vendor{
		"nvidia":   {DeviceIDs: "index", DriverRoot: "/run/nvidia/driver", Injection: environment.Injection},
		"iluvatar": {DeviceIDs: "index"},
	}
	want.Resources = slices.Concat(
		[]config.Resource{{Name: "enflame.com/gcu", Vendor: "enflame", Mode: config.ModeExclusive}},
		ix(func(r *config.Resource) { r.SplitBoards = true }), sliced(nil))
	if diff := cmp.Diff(want, c); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A kind of CDI names that the converter set, or that a file has for its own way,
// does not forbid another way on the command line.
func TestAnotherInjectionTakesTheKindOfCDIAway(t *testing.T) {
	const (
		converted = "version: v1\nflags: {plugin: {deviceListStrategy: cdi-cri}}\n"
		own       = nvidiaWhole + "injection: cdi\nvendors: {nvidia: {cdiKind: nvidia.com/gpu}}\n"
		ofVendor  = nvidiaWhole + "vendors: {nvidia: {injection: [cdi], cdiKind: nvidia.com/gpu}}\n"
		idle      = nvidiaWhole + "vendors: {nvidia: {cdiKind: nvidia.com/gpu}}\n"
	)
	for name, tt := range map[string]struct {
		text string
		env  map[string]string
		args []string
		kind string
		err  string
	}{
		"of a converted file": {converted, nil, []string{"--nvidia-injection=environment"}, "", ""},
		"of a converted variable": {nvidiaWhole, map[string]string{"DEVICE_LIST_STRATEGY": "cdi-cri"},
			[]string{"--nvidia-injection=environment"}, "", ""},
		"another program's, no longer": {ofVendor, map[string]string{"DEVICE_LIST_STRATEGY": "cdi-cri"}, nil, "", ""},
		"for all":                      {own, nil, []string{"--injection=environment"}, "", ""},
		"in a variable":                {ofVendor, map[string]string{"DIVVY_NVIDIA_INJECTION": "deviceNodes"}, nil, "", ""},
		"taken back by a flag": {own, map[string]string{"DIVVY_INJECTION": "environment"}, []string{"--injection=cdiAnnotations"},
			"nvidia.com/gpu", ""},
		"for all, not for NVIDIA":    {ofVendor, nil, []string{"--injection=environment"}, "nvidia.com/gpu", ""},
		"one way of CDI for another": {ofVendor, nil, []string{"--nvidia-injection=cdiAnnotations"}, "nvidia.com/gpu", ""},
		"asked for with the kind": {own, nil, []string{"--injection=environment", "--nvidia-cdi-kind=nvidia.com/gpu"},
			"", "is never used"},
		"of no use in the file": {idle, nil, []string{"--log-level=debug"}, "", "is never used"},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := Load([]string{write(t, "node.yaml", tt.text)}, collect(t, tt.env, tt.args...), vendors)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("want %q, got %v", tt.err, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := l.Config.Vendors[nvidia].CDIKind; got != tt.kind {
				t.Errorf("the kind is %q", got)
			}
		})
	}
}

func TestAnOldFileKeepsTheWayThatItsKindOfCDIIsFor(t *testing.T) {
	base := write(t, "base.yaml", head+"injection: cdi\nvendors: {nvidia: {cdiKind: nvidia.com/gpu}}\n")
	got := load(t, nil, base, write(t, "v1.yaml", "version: v1\n")).Config.Vendors[nvidia]
	want := config.Vendor{Injection: []config.Injection{config.InjectCDI}, CDIKind: "nvidia.com/gpu"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	got = load(t, nil, base, write(t, "v1.yaml", "version: v1\nflags: {plugin: {deviceListStrategy: envvar}}\n")).Config.Vendors[nvidia]
	if diff := cmp.Diff(environment, got); diff != "" {
		t.Errorf("a strategy of its own (-want +got):\n%s", diff)
	}
}

func TestAnEmptyNamedConfigurationChangesNothing(t *testing.T) {
	l := load(t, nil, write(t, "base.yaml", nvidiaWhole), write(t, "empty", "# nothing\n"))
	if diff := cmp.Diff(wholeGPUs, l.Config.Resources); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	hasAll(t, l.Warnings, "empty: the file is empty, so the other files hold")
}

func TestOldFilesAloneOfferTheirDevicesAlone(t *testing.T) {
	c := load(t, nil, write(t, "ix-config", "flags: {splitboard: true}")).Config
	if diff := cmp.Diff(ix(func(r *config.Resource) { r.SplitBoards = true }), c.Resources); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(config.Default(), load(t, nil).Config); diff != "" {
		t.Errorf("no file at all (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(config.Default(), load(t, nil, write(t, "node.yaml", head)).Config); diff != "" {
		t.Errorf("a file that names no resources (-want +got):\n%s", diff)
	}
}

func TestMistakesOfAllFilesAreToldAtOnce(t *testing.T) {
	a := write(t, "a.yaml", head+"colour: blue\nlogLevel: loud\n")
	b := write(t, "ix-config", "resourceName: gpu\nsharing: {timeSlicing: {replicas: -2}}")
	_, err := Load([]string{a, b}, collect(t, map[string]string{"SPLIT_BOARD": "?"}), vendors)
	if err == nil {
		t.Fatal("accepted")
	}
	hasAll(t, []string{err.Error()}, a+`: line 3: unknown key "colour"`, `logLevel: "loud" is not known`,
		b+": sharing.timeSlicing.replicas: -2 is out of range", `resources[0].name: "gpu"`, "environment variable SPLIT_BOARD")
}

func TestFindCompletesPlacesFromTheEnvironment(t *testing.T) {
	tests := map[string]struct {
		given    Places
		env      map[string]string
		want     Places
		warnings int
	}{
		"flags": {given: Places{Files: []string{"/a"}}, env: map[string]string{"DIVVY_CONFIG": "/b"},
			want: Places{Files: []string{"/a"}}},
		"variables": {env: map[string]string{"DIVVY_CONFIG": "/a,/b", "DIVVY_CONFIG_DIR": "/d"},
			want: Places{Files: []string{"/a", "/b"}, Dir: "/d"}},
		"NVIDIA's": {env: map[string]string{"CONFIG_FILE": "/config/config.yaml"},
			want: Places{Files: []string{"/config/config.yaml"}}},
		"NVIDIA's is unused": {given: Places{Dir: "/d"}, env: map[string]string{"CONFIG_FILE": "/n"}, want: Places{Dir: "/d"}, warnings: 1},
		"NVIDIA's is named": {given: Places{Files: []string{"/n"}}, env: map[string]string{"CONFIG_FILE": "/n"},
			want: Places{Files: []string{"/n"}}},
		"nothing": {want: Places{}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, warnings := tt.given.Find(from(tt.env))
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if len(warnings) != tt.warnings {
				t.Errorf("warnings: %q", warnings)
			}
		})
	}
}
