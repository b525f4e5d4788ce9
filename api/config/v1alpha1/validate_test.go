package v1alpha1

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// resource is a configuration of one resource with more keys.
func resource(keys string) string {
	return head + "resources:\n- {name: nvidia.com/gpu, vendor: nvidia, " + keys + "}\n"
}

// vendor is a configuration with keys of one vendor.
func vendor(name, keys string) string {
	return head + "vendors: {" + name + ": {" + keys + "}}\n"
}

func two(a, b string) string {
	return head + "resources:\n- {name: a.com/x, vendor: nvidia, " + a + "}\n- {name: a.com/y, vendor: nvidia, " + b + "}\n"
}

// divided is a configuration of both, whose second resource is for claims.
func divided(plugin, claims string) string {
	return two("mode: exclusive, "+plugin, "mode: memory, allocationPath: dra, "+claims) + "allocationPath: both\n"
}

const mayBeSame = "resources[1].devices: resources[0] has allocationPath plugin and may choose the same devices, and a device belongs to " +
	"one path; choose devices for both that cannot be the same, by indexes, by ids or by models"

func TestEachMistakeNamesItsFieldAndWhatWouldBeRight(t *testing.T) {
	tests := map[string]struct {
		text string
		want string
	}{
		"unknown mode": {resource("mode: split"),
			`resources[0].mode: "split" is not known; use one of exclusive, timeSlicing, memory`},
		"unknown vendor": {head + "resources: [{name: a.com/b, vendor: acme}]",
			`resources[0].vendor: "acme" is not known; use one of enflame, iluvatar, nvidia`},
		"no vendor": {head + "resources: [{name: a.com/b}]", `resources[0].vendor: "" is not known`},
		"negative replicas": {resource("mode: timeSlicing, replicas: -1"),
			"resources[0].replicas: -1 is out of range; use 1 to 1024, or mode exclusive"},
		"no replicas": {resource("mode: timeSlicing"), "resources[0].replicas: 0 is out of range"},
		"absurd replicas": {resource("mode: timeSlicing, replicas: 1000000"),
			"resources[0].replicas: 1000000 is out of range"},
		"no truth": {resource("mode: timeSlicing, replicas: 2, failRequestsGreaterThanOne: many"),
			"line 4: cannot unmarshal !!str `many`, where true or false is expected"},
		"a part of a replica": {resource("mode: timeSlicing, replicas: 2.9"), "line 4: 2.9 is not a whole number"},
		"a part of an index":  {resource("mode: exclusive, devices: {indexes: [0, 1.5]}"), "line 4: 1.5 is not a whole number"},
		"a part of a rule's replica": {resource("mode: timeSlicing, replicas: 2, replicasFor: [{devices: {indexes: [0]}, replicas: 1.5}]"),
			"line 4: 1.5 is not a whole number"},
		"a part that is merged in": {head + "vendors:\nresources:\n- <<: {replicas: 2.5}\n  name: a.com/b\n  vendor: nvidia\n  mode: " +
			"timeSlicing\n", "line 5: 2.5 is not a whole number"},
		"replicas of exclusive": {resource("mode: exclusive, replicas: 4"),
			"resources[0].replicas: the key belongs to mode timeSlicing, and the mode is exclusive"},
		"replicas of memory": {resource("replicas: 4"),
			"resources[0].replicas: the key belongs to mode timeSlicing, and the mode is memory"},
		"rules of exclusive": {resource("mode: exclusive, replicasFor: [{replicas: 2}]"),
			"resources[0].replicasFor: the key belongs to mode timeSlicing"},
		"refusal of exclusive": {resource("mode: exclusive, failRequestsGreaterThanOne: true"),
			"resources[0].failRequestsGreaterThanOne: the key belongs to mode timeSlicing"},
		"allocation of memory": {resource("allocation: packed"),
			"resources[0].allocation: the key belongs to modes timeSlicing and exclusive"},
		"a path of a resource": {resource("allocationPath: dra"),
			"resources[0].allocationPath: the key belongs to allocationPath both of the node, which is plugin; leave it out"},
		"both with one path": {resource("") + "allocationPath: both\n",
			"allocationPath: with both, some resources have allocationPath plugin and the others dra; here all have the same"},
		"both with overlapping selectors": {resource("devices: {indexes: [0, 1]}") + "- {name: a.com/claims, vendor: nvidia, " +
			"mode: exclusive, allocationPath: dra, devices: {indexes: [1, 2]}}\nallocationPath: both\n",
			"resources[1].devices: resources[0] has allocationPath plugin and may choose the same devices"},
		"both without selectors": {resource("") + "- {name: a.com/claims, vendor: nvidia, " +
			"mode: exclusive, allocationPath: dra, devices: {indexes: [1, 2]}}\nallocationPath: both\n",
			"resources[1].devices: resources[0] has allocationPath plugin and may choose the same devices"},
		"both by uuid and by index": {divided("devices: {ids: [GPU-1]}", "devices: {indexes: [1]}"), mayBeSame},
		"both by two patterns":      {divided(`devices: {models: ["*A100*"]}`, `devices: {models: ["NVIDIA*"]}`), mayBeSame},
		"both by an exception that is too small": {divided("devices: {indexes: [0, 1]}", "devices: {except: {indexes: [0]}}"),
			mayBeSame},
		"both by two exceptions": {divided("devices: {except: {indexes: [0]}}", "devices: {except: {indexes: [1]}}"), mayBeSame},
		"both by a GPU and its MIG devices": {divided("devices: {indexes: [0]}", `devices: {partitions: ["0:1"]}`),
			mayBeSame},
		"both with an empty selector": {divided("devices: {}", "devices: {indexes: [0]}"), mayBeSame},
		"MPS of claims": {resource("isolation: cooperative") + "allocationPath: dra\n",
			"resources[0].isolation: isolation cooperative is not for claims, which allocationPath dra serves; use driver"},
		"unknown isolation": {resource("isolation: strong"),
			`resources[0].isolation: "strong" is not known; use one of none, cooperative, driver`},
		"isolation that is no choice": {resource("isolation: hardware"),
			`resources[0].isolation: "hardware" is not known; use one of none, cooperative, driver`},
		"isolation of exclusive": {resource("mode: exclusive, isolation: driver"),
			"resources[0].isolation: a container has a device of mode exclusive for itself, which is tier hardware; leave the key out"},
		"limits of time slices": {resource("mode: timeSlicing, replicas: 2, isolation: driver"),
			"resources[0].isolation: driver limits memory, and time slices have no memory of their own; use mode memory"},
		"MPS of time slices": {resource("mode: timeSlicing, replicas: 2, isolation: cooperative"),
			"resources[0].isolation: cooperative limits memory, and time slices have no memory of their own; use mode memory"},
		"MPS beside whole devices": {two("mode: memory, isolation: cooperative", "mode: exclusive"),
			"resources[0].isolation: resources[1] may offer the same devices, and with isolation cooperative a device is offered by one"},
		"isolation of another vendor": {head + "resources: [{name: a.com/b, vendor: enflame, isolation: driver}]",
			"resources[0].isolation: driver is for NVIDIA's devices; leave the key out for enflame"},
		"unit of exclusive": {resource(`mode: exclusive, memoryUnit: "1"`),
			"resources[0].memoryUnit: the key belongs to mode memory, and the mode is exclusive"},
		"count of exclusive": {resource("mode: exclusive, countResource: a.com/n"),
			"resources[0].countResource: the key belongs to mode memory"},
		"unknown allocation": {resource("mode: timeSlicing, replicas: 2, allocation: random"),
			`resources[0].allocation: "random" is not known; use one of distributed, packed`},
		"a rule for all": {resource("mode: timeSlicing, replicas: 2, replicasFor: [{replicas: 3}]"),
			"resources[0].replicasFor[0].devices: no device is named"},
		"a rule without replicas": {resource("mode: timeSlicing, replicas: 2, replicasFor: [{devices: {indexes: [0]}}]"),
			"resources[0].replicasFor[0].replicas: 0 is out of range"},
		"count collides": {head + "resources: [{name: a.com/x, vendor: enflame, countResource: a.com/x}]",
			`resources[0].countResource: "a.com/x" is used by resources[0] already`},
		"count of another": {two("mode: exclusive", "countResource: a.com/x"),
			`resources[1].countResource: "a.com/x" is used by resources[0] already`},
		"an empty model": {resource(`mode: exclusive, devices: {models: [" "]}`),
			`resources[0].devices.models: " " is no model`},
		"a replica's id": {resource(`mode: exclusive, devices: {ids: ["GPU-1::0"]}`),
			`resources[0].devices.ids: "GPU-1::0" names a replica`},
		"an empty id": {resource(`mode: exclusive, devices: {ids: [""]}`), `resources[0].devices.ids: "" is no uuid`},
		"a negative index": {resource("mode: exclusive, devices: {indexes: [0, -2]}"),
			"resources[0].devices.indexes: -2 is negative; devices are counted from 0"},
		"an exception of all": {resource("mode: exclusive, devices: {except: {}}"),
			"resources[0].devices.except: no device is named"},
		"exceptions of exceptions": {resource("mode: exclusive, devices: {except: {indexes: [1], except: {indexes: [2]}}}"),
			"resources[0].devices.except.except: an exception has no exceptions"},
		"a negative index in the rule": {resource("mode: timeSlicing, replicas: 2, replicasFor: [{devices: {indexes: [-1]}, replicas: 2}]"),
			"resources[0].replicasFor[0].devices.indexes: -1"},
		"a long domain": {head + "resources: [{name: " + strings.Repeat("a.", 130) + "com/x, vendor: nvidia}]",
			"is not the name of an extended resource"},
		"a long name": {head + "resources: [{name: a.com/" + strings.Repeat("x", 64) + ", vendor: nvidia}]",
			"is not the name of an extended resource"},
		"a name too long for its socket": {
			head + "resources: [{name: iluvatar.com/" + strings.Repeat("x", 63) + ", vendor: iluvatar}]",
			"resources[0].name: the socket of iluvatar.com/" + strings.Repeat("x", 63) +
				" below kubeletDir, /var/lib/kubelet/device-plugins/iluvatar-",
		},
		"a folder too long for any socket": {
			head + "kubeletDir: /" + strings.Repeat("k", 79), "kubeletDir: kubelet's socket /kkk",
		},
		"a folder too long for its resource": {
			head + "kubeletDir: /" + strings.Repeat("k", 66) + "\nresources: [{name: nvidia.com/gpu-memory, vendor: nvidia}]",
			"has 105 bytes, and it may have 104; use a name that is shorter by 1",
		},
		"settings of an unknown vendor": {vendor("acme", ""),
			`vendors.acme: there is no vendor "acme"; use one of enflame, iluvatar, nvidia`},
		"unknown injection": {vendor("nvidia", "injection: [magic]"),
			`vendors.nvidia.injection: "magic" is not known; use one of environment, deviceNodes, volumeMounts, cdi, cdiAnnotations`},
		"injection twice": {vendor("nvidia", "injection: [cdi, cdi]"), `vendors.nvidia.injection: "cdi" is there twice`},
		"two meanings of the variable": {vendor("nvidia", "injection: [environment, volumeMounts]"),
			"vendors.nvidia.injection: environment and volumeMounts both set the vendor's variable"},
		"auto of another vendor": {vendor("iluvatar", "injection: [auto]"),
			"vendors.iluvatar.injection: auto is for NVIDIA's devices alone"},
		"auto beside another way": {vendor("nvidia", "injection: [auto, cdi]"), "vendors.nvidia.injection: auto stands alone"},
		"auto for all":            {head + "injection: auto", `injection: "auto" is not known`},
		"mounts of another vendor": {vendor("iluvatar", "injection: [volumeMounts]"),
			"vendors.iluvatar.injection: volumeMounts is read by NVIDIA's container runtime alone"},
		"mounts for all": {head + "injection: volumeMounts", `injection: "volumeMounts" is not known`},
		"unknown ids": {vendor("nvidia", "deviceIDs: serial"),
			`vendors.nvidia.deviceIDs: "serial" is not known; use one of uuid, index`},
		"no kind": {vendor("nvidia", "injection: [cdi], cdiKind: gpu"),
			`vendors.nvidia.cdiKind: "gpu" is not a kind of CDI devices`},
		"a relative hook": {vendor("nvidia", "cdiHookPath: nvidia-ctk"),
			`vendors.nvidia.cdiHookPath: "nvidia-ctk" is not an absolute path`},
		"an unknown hook": {vendor("nvidia", "cdiDisableHooks: [ldconfig]"),
			`vendors.nvidia.cdiDisableHooks: "ldconfig" is not known; use one of all, apply-cuda-memory-limits`},
		"an unknown feature": {vendor("nvidia", "cdiFeatureFlags: [x]"),
			`vendors.nvidia.cdiFeatureFlags: "x" is not known; use one of disable-ipc-discoverer`},
		"hooks of another vendor": {vendor("enflame", "cdiHookPath: /usr/bin/x"),
			`vendors.enflame.cdiHookPath: only the CDI specification of NVIDIA's devices has hooks`},
		"an unused kind": {vendor("nvidia", "cdiKind: nvidia.com/gpu"),
			`vendors.nvidia.cdiKind: "nvidia.com/gpu" is never used`},
		"a relative root":          {vendor("nvidia", "driverRoot: run"), `vendors.nvidia.driverRoot: "run" is not an absolute path`},
		"a relative root of nodes": {vendor("nvidia", "devRoot: run"), `vendors.nvidia.devRoot: "run" is not an absolute path`},
		"DRS of another vendor":    {vendor("nvidia", `drs: true`), "vendors.nvidia.drs: nvidia devices have no DRS instances"},
		"a profile without DRS": {head + "resources: [{name: a.example/b, vendor: enflame, mode: exclusive, profile: 1g.6gb}]",
			"resources[0].profile: the key belongs to vendors.enflame.drs; set that to true or leave the profile out"},
		"a MIG device of Enflame's": {head + "vendors: {enflame: {drs: true}}\n" +
			"resources: [{name: a.example/b, vendor: enflame, mode: exclusive, profile: 1g.10gb+me}]",
			`resources[0].profile: "1g.10gb+me" is not the profile of a DRS instance; write one such as 1g.6gb`},
		"memory of a DRS instance": {head + "vendors: {enflame: {drs: true}}\n" +
			"resources: [{name: a.example/b, vendor: enflame, mode: memory, profile: 1g.6gb}]",
			"resources[0].profile: a DRS instance is for one container; use mode exclusive"},
		"a bad cause": {vendor("nvidia", `health: {ignore: ["xid 79"]}`),
			`vendors.nvidia.health.ignore: "xid 79" is not a cause`},
		"an empty cause": {vendor("nvidia", `health: {neverRecover: [""]}`),
			`vendors.nvidia.health.neverRecover: "" is not a cause`},
		"a word out of place": {vendor("nvidia", `health: {heed: [all]}`),
			`vendors.nvidia.health.heed: "all" has no meaning here; write *`},
		"a word for ignore": {vendor("nvidia", `health: {neverRecover: [all]}`),
			`vendors.nvidia.health.neverRecover: "all" has no meaning here; write *`},
		"a negative time": {vendor("nvidia", `health: {recoverAfter: -1s}`),
			"vendors.nvidia.health.recoverAfter: -1s is out of range"},
		"an endless time": {vendor("nvidia", `health: {recoverAfter: 100h}`),
			"vendors.nvidia.health.recoverAfter: 100h0m0s is out of range"},
		"unknown path":   {head + "allocationPath: csi", `allocationPath: "csi" is not known; use one of plugin, dra, both`},
		"unknown labels": {head + "labels: some", `labels: "some" is not known; use one of all, divvy, none`},
		"memory twice": {two("mode: memory", "mode: memory"),
			`resources[1].devices: resources[0] may share the memory of the same devices of "nvidia"`},
		"memory twice, by uuid and by index": {
			two("mode: memory, devices: {ids: [GPU-1]}", "mode: memory, devices: {indexes: [1]}"),
			"resources[1].devices: resources[0] may share the memory",
		},
		"memory twice, by a pattern and a model with a slash": {
			two(`mode: memory, devices: {models: ["NVIDIA A100 *"]}`, `mode: memory, devices: {models: ["NVIDIA A100 40/80"]}`),
			"resources[1].devices: resources[0] may share the memory",
		},
		"memory twice, by one model with brackets": {
			two(`mode: memory, devices: {models: ["NVIDIA [X]Y"]}`, `mode: memory, devices: {models: ["NVIDIA [X]Y"]}`),
			"resources[1].devices: resources[0] may share the memory",
		},
		"memory twice, by two patterns": {
			two(`mode: memory, devices: {models: ["*A100*"]}`, `mode: memory, devices: {models: ["NVIDIA*"]}`),
			"resources[1].devices: resources[0] may share the memory",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(tt.text), "node.yaml", vendors)
			var mistakes *MistakesError
			if !errors.As(err, &mistakes) {
				t.Fatalf("want *MistakesError, got %v", err)
			}
			if !slices.ContainsFunc(mistakes.Mistakes, func(m string) bool {
				return strings.HasPrefix(m, tt.want) ||
					strings.Contains(m, tt.want)
			}) {
				t.Errorf("missing %q in:\n%v", tt.want, err)
			}
			if len(mistakes.Mistakes) != 1 {
				t.Errorf("one mistake is told as %d:\n%v", len(mistakes.Mistakes), err)
			}
		})
	}
}

func TestParseAccepts(t *testing.T) {
	tests := map[string]string{
		"whole cards beside memory":   two("mode: exclusive", "mode: memory"),
		"whole cards twice":           two("mode: exclusive", "mode: exclusive, splitBoards: true"),
		"a whole number with a point": resource("mode: timeSlicing, replicas: 2.0"),
		"one replica":                 resource("mode: timeSlicing, replicas: 1"),
		"the most replicas":           resource("mode: timeSlicing, replicas: 1024"),
		"some devices with one replica": resource("mode: timeSlicing, replicas: 4, " +
			"replicasFor: [{devices: {indexes: [0]}, replicas: 1}]"),
		"no ill health counts":              vendor("nvidia", "health: {ignore: [all], heed: [xid-94]}"),
		"the vendor's fatal causes":         vendor("nvidia", `health: {neverRecover: [default, xid-94]}`),
		"no cause is for good":              vendor("nvidia", `health: {neverRecover: []}`),
		"any cause is for good":             vendor("nvidia", `health: {neverRecover: ["*"]}`),
		"the specification of another":      vendor("nvidia", "injection: [cdiAnnotations], cdiKind: nvidia.com/gpu"),
		"a kind with the injection for all": head + "injection: cdi\nvendors: {nvidia: {cdiKind: nvidia.com/gpu}}\n",
		"two ways of CDI":                   vendor("nvidia", "injection: [cdi, cdiAnnotations]"),
		"memory of different indexes":       two("mode: memory, devices: {indexes: [0]}", "mode: memory, devices: {indexes: [1, 2]}"),
		"memory of different ids":           two("mode: memory, devices: {ids: [a]}", "mode: memory, devices: {ids: [b]}"),
		"memory of different models":        two("mode: memory, devices: {models: [A]}", "mode: memory, devices: {models: [B]}"),
		"memory of a model and a pattern":   two("mode: memory, devices: {models: [A]}", `mode: memory, devices: {models: ["B*"]}`),
		"memory of different patterns":      two(`mode: memory, devices: {models: ["A*"]}`, `mode: memory, devices: {models: ["B*"]}`),
		"memory of the rest": two("mode: memory, devices: {indexes: [0]}",
			"mode: memory, devices: {except: {indexes: [0]}}"),
		"a model with a bracket": resource(`mode: exclusive, devices: {models: ["["]}`),
		"the longest socket": head + "kubeletDir: /" + strings.Repeat("k", 65) +
			"\nresources: [{name: nvidia.com/gpu-memory, vendor: nvidia}]",
		"MIG devices of a profile beside GPUs with MPS": head + "vendors: {nvidia: {migStrategy: mixed}}\nresources: " +
			"[{name: a.com/x, vendor: nvidia, isolation: cooperative}, {name: a.com/y, vendor: nvidia, mode: exclusive, profile: 1g.10gb}]",
		"both by indexes":  divided("devices: {indexes: [0]}", "devices: {indexes: [1, 2]}"),
		"both by ids":      divided("devices: {ids: [GPU-1]}", "devices: {ids: [GPU-2]}"),
		"both by models":   divided(`devices: {models: ["A*"]}`, "devices: {models: [B]}"),
		"both by the rest": divided("devices: {indexes: [0, 1]}", "devices: {except: {indexes: [0, 1]}}"),
		"both of two vendors": head + "resources:\n- {name: a.com/x, vendor: nvidia}\n- {name: a.com/y, vendor: enflame, " +
			"allocationPath: dra}\nallocationPath: both\n",
		"a selector of all": resource("mode: exclusive, devices: {}"),
	}
	for name, text := range tests {
		t.Run(name, func(t *testing.T) {
			if _, err := Parse([]byte(text), "node.yaml", vendors); err != nil {
				t.Error(err)
			}
		})
	}
}
