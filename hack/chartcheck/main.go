// Chartcheck renders the chart with helm in several ways and checks what comes
// out: that good values render, that bad values are refused with a sentence
// that names them, and that the programs accept the files they are given.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	yaml "go.yaml.in/yaml/v3"

	"github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/pool"
)

func main() {
	helm := flag.String("helm", "helm", "helm 3 program")
	flag.Parse()
	if err := run(context.Background(), *helm, flag.Args(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "chartcheck:", err)
		os.Exit(1)
	}
}

// kubeVersion is what the chart is rendered for.
const kubeVersion = "1.37.1"

// divided are GPUs for kubelet and for claims, on a node that serves both.
const divided = `sharedResources=[{"name":"nvidia.com/gpu","vendor":"nvidia","mode":"exclusive","devices":{"indexes":[0]}},` +
	`{"name":"nvidia.com/claims","vendor":"nvidia","mode":"exclusive","allocationPath":"dra","devices":{"except":{"indexes":[0]}}}]`

// reviewed enables reviews of claims, with what it requires.
const reviewed = "node.allocationPath=dra,claims.admission.enabled=true"

// evicting enables eviction, with what it requires.
const evicting = "node.usage.enabled=true,node.usage.overuse.contextAllowanceMiB.enflame=0,extender.eviction.enabled=true"

// good values render, and everything in want stands in the result; none says that
// there is no configuration of divvy-node in it.
var good = []struct {
	name string
	set  []string
	want []string
	none bool
}{
	{name: "defaults", want: []string{
		"image: ghcr.io/divvy-gpu/divvy-node:", "hostNetwork: true", "runAsUser: 0", "--leader-elect\n", `memoryUnit: "1"`,
		"path: /var/log/topscloud/gcushare", "kind: ValidatingAdmissionPolicy", "--resources=enflame.com/gcu-memory",
		"--node-label=enflame.com/gcushare=true,divvy.dev/enabled=true",
	}},
	{
		name: "finest unit", set: []string{"--set-string", "memoryUnit=0.001"},
		want: []string{`memoryUnit: "0.001"`},
	},
	{
		name: "sixths of a card", set: []string{"--set", "sharedResources[0].name=enflame.com/shared-gcu,sharedResources[0].vendor=enflame",
			"--set-string", "sharedResources[0].memoryUnit=1/6"},
		want: []string{`memoryUnit: 1/6`, "--resources=enflame.com/shared-gcu"},
	},
	{
		name: "images of one's own", set: []string{"--set", "image.registry=example.com/x/,image.tag=v9,node.image.tag=v10"},
		want: []string{"image: example.com/x/divvy-node:v10", "image: example.com/x/divvy-control:v9"},
	},
	{
		name: "injection by CDI", set: []string{"--set", "node.injection=cdi"},
		want: []string{"injection: cdi", "path: /var/run/cdi"},
	},
	{
		name: "in place of kube-scheduler", set: []string{"--set", "scheduler.mode=replace,node.allocationPath=dra"},
		want: []string{"--replace-image=ghcr.io/divvy-gpu/divvy-scheduler-MINOR:", "--replace-flag=--policy=binpack", "--reports-only",
			"'system:kube-scheduler'"},
	},
	{
		name: "no log files", set: []string{"--set", "node.logDir=,extender.logDir="},
		want: []string{"runAsUser: 65532", "runAsNonRoot: true"},
	},
	{
		name: "key of one's own", set: []string{"--set", "grantKey.existingSecret=mine"},
		want: []string{"secretName: mine"},
	},
	{
		name: "one replica", set: []string{"--set", "extender.replicas=1"},
		want: []string{"type: Recreate"},
	},
	{
		name: "two replicas", set: []string{"--set", "extender.replicas=2,extender.hostNetwork=false"},
		want: []string{"--leader-elect", "resources: [leases]", "maxUnavailable: 1\n", "--leader-elect-duration=15s", "name: POD_IP",
			"kind: FlowSchema"},
	},
	{
		name: "control plane elsewhere", set: []string{"--set", "extender.allowBindFrom={10.0.0.0/24,fd00::/64}"},
		want: []string{"--allow-bind-from=10.0.0.0/24,fd00::/64"},
	},
	{
		name: "loopback alone", set: []string{"--set", "extender.listenAddress=127.0.0.1"},
		want: []string{"--listen=127.0.0.1:32766", `host: "127.0.0.1"`},
	},
	{
		name: "a label of one's own", set: []string{"--set", "node.nodeSelector.pool=gcu"},
		want: []string{"--node-label=pool=gcu", "pool: gcu"},
	},
	{
		name: "NVIDIA's GPU operator", set: []string{"--set", "node.gpuOperator.enabled=true,node.gpuOperator.clientLabel=true"},
		want: []string{"--node-label=nvidia.com/gpu.deploy.client=true", `nvidia.com/gpu.deploy.client: "true"`, "gpuOperator: true"},
	},
	{
		name: "measured use", set: []string{"--set", "node.usage.enabled=true,node.usage.metrics=container"},
		want: []string{"hostPID: true", "mountPath: /run/divvy", "enabled: true", "metrics: container", "interval: 15s"},
	},
	{
		name: "measured use of some nodes", set: []string{"--set", "node.configs.a.usage.enabled=true"},
		want: []string{"hostPID: true", "mountPath: /run/divvy"},
	},
	{
		name: "eviction",
		set:  []string{"--set", evicting + ",extender.eviction.exemptNamespaces={a,b}"},
		want: []string{"- --evict-memory-overuse\n", "--eviction-grace-period=2m\n", "--eviction-max-per-hour=3\n",
			"--eviction-exempt-namespaces=a,b\n", "resources: [pods/eviction]", "name: divvy-extender-eviction",
			"request.namespace in ['divvy-system', 'a', 'b']"},
	},
	{
		name: "eviction on some nodes", set: []string{"--set", "node.configs.a.usage.enabled=true,extender.eviction.enabled=true"},
		want: []string{"- --evict-memory-overuse\n", "divvy-extender must evict pods by UID"},
	},
	{
		name: "any label of two vendors",
		set: []string{"--set",
			"sharedResources[0].name=enflame.com/gcu-memory,sharedResources[0].vendor=enflame,sharedResources[1].name=nvidia.com/" +
				"gpu-memory,sharedResources[1].vendor=nvidia"},
		want: []string{"--node-label=enflame.com/gcushare=true,nvidia.com/gpu.present=true,divvy.dev/enabled=true",
			"--resources=enflame.com/gcu-memory,nvidia.com/gpu-memory"},
	},
	{
		name: "Iluvatar's file", set: []string{"--set", "node.ixConfigMap=ix-config"},
		want: []string{"--config=/ixconfig/ix-config", "mountPath: /ixconfig", "name: ix-config"},
	},
	{
		name: "configurations of one's own", set: []string{"--set", "node.existingConfigMap=mine"},
		want: []string{"--config-dir=/etc/divvy/configs", "name: mine"},
	},
	{
		name: "a library in an unusual place", set: []string{"--set", "node.libraries.enflame=/host/opt/libefml.so"},
		want: []string{"enflame: /host/opt/libefml.so"},
	},
	{
		name: "nodes by another label, as it was written before",
		set:  []string{"--set", `node.nodeSelector.enflame\.com/gcushare=null,node.nodeSelector.pool=gcu`},
		want: []string{"--node-label=pool=gcu", "pool: gcu"},
	},
	{
		name: "memory of different devices",
		set: []string{"--set-json", `sharedResources=[{"name":"nvidia.com/a","vendor":"nvidia","devices":{"indexes":[0]}},` +
			`{"name":"nvidia.com/b","vendor":"nvidia","devices":{"except":{"indexes":[0]}}},{"name":"enflame.com/a","vendor":"enflame"}]`},
		want: []string{"--resources=nvidia.com/a,nvidia.com/b,enflame.com/a"},
	},
	{
		name: "a kind with the injection of all", set: []string{"--set", "node.injection=cdi,node.vendors.nvidia.cdiKind=nvidia.com/gpu"},
		want: []string{"cdiKind: nvidia.com/gpu"},
	},
	{
		name: "MIG devices, those of a profile in time slices",
		set: []string{"--set", "node.vendors.nvidia.migStrategy=mixed", "--set-json",
			`sharedResources=[{"name":"nvidia.com/gpu","vendor":"nvidia","mode":"exclusive","devices":{"except":{"partitions":["0:1"]}}},` +
				`{"name":"nvidia.com/mig-1g.10gb","vendor":"nvidia","mode":"timeSlicing","replicas":2,"profile":"1g.10gb"}]`},
		want: []string{"migStrategy: mixed", "profile: 1g.10gb"},
	},
	{
		name: "MIG devices of a profile beside GPUs with MPS",
		set: []string{"--set", "node.vendors.nvidia.migStrategy=mixed", "--set-json", `sharedResources=[` +
			`{"name":"nvidia.com/gpu-memory","vendor":"nvidia","mode":"memory","isolation":"cooperative"},` +
			`{"name":"nvidia.com/mig-1g.10gb","vendor":"nvidia","mode":"exclusive","profile":"1g.10gb"}]`},
		want: []string{"migStrategy: mixed", "profile: 1g.10gb", "args: [mps]"},
	},
	{
		name: "DRS instances, those of a profile under GCUShare's name",
		set: []string{"--set", "node.vendors.enflame.drs=true", "--set-json",
			`sharedResources=[{"name":"enflame.com/drs-gcu","vendor":"enflame","mode":"exclusive","profile":"1g.6gb"}]`},
		want: []string{"drs: true", "profile: 1g.6gb"},
	},
	{
		name: "another kubelet directory", set: []string{"--set", "node.kubeletDir=/data/kubelet/"},
		want: []string{"path: /data/kubelet/device-plugins", "kubeletDir: /var/lib/kubelet"},
	},
	{
		name: "claims", set: []string{"--set", `node.allocationPath=dra,node.kubeletDir=/data/kubelet/,` +
			`deviceClasses.extendedResourceNames.gcu\.enflame\.divvy\.dev=enflame.com/gcu`},
		want: []string{"allocationPath: dra", "kubeletDir: /data/kubelet\n", "mountPath: /data/kubelet/plugins\n",
			"path: /data/kubelet/plugins_registry\n", "mountPath: /data/kubelet/device-plugins\n", "resources: [resourceslices]",
			"name: divvy-node-slices", "name: gcu.enflame.divvy.dev",
			"expression: device.driver == 'enflame.divvy.dev' && device.attributes['enflame.divvy.dev'].type == 'gcu'\n" +
				"  extendedResourceName: enflame.com/gcu\n"},
	},
	{
		name: "claims on some nodes", set: []string{"--set", "node.configs.moved.allocationPath=dra", "--set-json",
			`sharedResources=[{"name":"iluvatar.com/gpu","vendor":"iluvatar","mode":"exclusive"}]`},
		want: []string{"allocationPath: dra", "mountPath: /var/lib/kubelet/plugins\n", "name: divvy-node-slices",
			"expression: device.driver == 'iluvatar.divvy.dev' && device.attributes['iluvatar.divvy.dev'].type != 'slots' && " +
				"device.attributes['iluvatar.divvy.dev'].wholeBoard\n"},
	},
	{
		name: "claims beside units", set: []string{"--set", "node.allocationPath=both", "--set-json", `sharedResources=[` +
			`{"name":"enflame.com/gcu-memory","vendor":"enflame","mode":"memory","devices":{"indexes":[0]}},` +
			`{"name":"enflame.com/claims","vendor":"enflame","mode":"memory","allocationPath":"dra","allocation":"packed",` +
			`"devices":{"except":{"indexes":[0]}}}]`},
		want: []string{"allocationPath: both", "allocationPath: dra", "allocation: packed", "mountPath: /var/lib/kubelet/plugins\n"},
	},
	{
		name: "reviews of claims", set: []string{"--set", reviewed, "--set-json", `sharedResources=[` +
			`{"name":"enflame.com/gcu-memory","vendor":"enflame"},{"name":"nvidia.com/gpu-memory","vendor":"nvidia","memoryUnit":"0.1"}]`},
		want: []string{"- --claim-units=enflame.com/gcu-memory=enflame:1,nvidia.com/gpu-memory=nvidia:0.1\n",
			"- --mutating-config=divvy-claims\n", "name: units.divvy.dev", "name: claims.divvy.dev", "name: pods.claims.divvy.dev",
			"name: classes.claims.divvy.dev", "resources: [deviceclasses]",
			"['enflame.com/gcu-memory', 'nvidia.com/gpu-memory'].exists", "resources: [resourceclaimtemplates]"},
	},
	{
		name: "a class for nodes that move", set: []string{"--set",
			`node.configs.moved.allocationPath=dra,deviceClasses.extendedResourceNames.gpu\.nvidia\.divvy\.dev=nvidia.com/gpu`,
			"--set-json", `sharedResources=[{"name":"nvidia.com/gpu","vendor":"nvidia","mode":"exclusive"}]`},
		want: []string{"extendedResourceName: nvidia.com/gpu\n"},
	},
	{
		name: "a class for devices beside the plugin's", set: []string{"--set",
			`node.allocationPath=both,deviceClasses.extendedResourceNames.gpu\.nvidia\.divvy\.dev=nvidia.com/claims`,
			"--set-json", divided},
		want: []string{"extendedResourceName: nvidia.com/claims\n"},
	},
	{
		name: "nodes that return to the plugin", set: []string{"--set", "node.configs.default.allocationPath=plugin"},
		want: []string{"mountPath: /var/lib/kubelet/plugins\n", "resources: [resourceclaims]"},
	},
	{
		name: "a remote pool beside cards", set: []string{"--set", "pool.enabled=true,pool.totalGPUMemory=16000"},
		want: []string{
			"--resources=enflame.com/gcu-memory", "--total-gpu-memory=16000", "--units=1000", "name: bwki-webhook-svc",
			"name: bwkimua.bitfusion.io",
			"name: bwkival.bitfusion.io", `--namespace-selector={"matchLabels":{"divvy.dev/pool":"allowed"}}`,
			"pod-security.kubernetes.io/enforce: restricted",
		},
	},
	{
		name: "a remote pool alone", set: []string{"--set", "pool.enabled=true", "--set-json", "sharedResources=[]"},
		want: []string{"name: bitfusion-device-plugin", "--ignored-namespaces=kube-system,kube-public,kube-node-lease,bwki,divvy-system"},
		none: true,
	},
	{
		name: "a pool for every namespace",
		set:  []string{"--set", "pool.enabled=true", "--set-json", "pool.credentials.namespaceSelector={}"},
		want: []string{"--namespace-selector={}'"},
	},
	{
		name: "a pool for some namespaces",
		set: []string{"--set", "pool.enabled=true", "--set-json",
			`pool.credentials.namespaceSelector={"matchExpressions":[{"key":"team","operator":"In","values":["a","b"]}]}`},
		want: []string{`--namespace-selector={"matchExpressions":[{"key":"team","operator":"In","values":["a","b"]}]}'`},
	},
	{
		name: "a pool where the API server does not reach pods", set: []string{"--set", "pool.enabled=true,pool.webhook.hostNetwork=true"},
		want: []string{"pod-security.kubernetes.io/enforce: privileged", "maxSurge: 0"},
	},
	{
		name: "the original's table of clients",
		set: []string{"--set", "pool.enabled=true", "--set-json",
			`pool.catalog="BitfusionClients:\n- BitfusionVersion: \"450\"\n  OSVersion: ubuntu18\n` +
				`  BinaryPath: /bitfusion/a/usr/bin/bitfusion\n  EnvVariable: /bitfusion/a/opt/bitfusion/lib/\n"`},
		want: []string{"    BitfusionClients:\n    - BitfusionVersion: \"450\""},
	},
	{
		name: "a catalog of one's own", set: []string{"--set", "pool.enabled=true,pool.existingCatalog=mine"},
		want: []string{"name: mine"},
	},
}

// bad values are refused, with a text that names what is wrong.
var bad = []struct {
	name string
	set  []string
	want string
}{
	{"unknown unit", []string{"--set-string", "memoryUnit=0.5"}, "memoryUnit"},
	{"unit that is a number", []string{"--set-json", "memoryUnit=0.1"}, "memoryUnit"},
	{"misspelt key", []string{"--set", "memroyUnit=1"}, "memroyUnit"},
	{"misspelt inner key", []string{"--set", "node.injektion=cdi"}, "injektion"},
	{"unknown injection", []string{"--set", "node.injection=magic"}, "injection"},
	{"unknown path", []string{"--set", "node.allocationPath=claims"}, "allocationPath"},
	{"claims beside a dedicated scheduler", []string{"--set", "node.allocationPath=dra,scheduler.mode=dedicated"},
		"allocationPath dra and scheduler.mode dedicated exclude each other"},
	{"in place of an old kube-scheduler", []string{"--set", "scheduler.mode=replace", "--kube-version", "1.34.2"},
		"scheduler.mode=replace: there is no divvy-scheduler for Kubernetes v1.34.2"},
	{"claims before 1.34", []string{"--set", "node.allocationPath=dra", "--kube-version", "1.33.4"},
		"allocationPath dra requires Kubernetes 1.34, and the cluster has v1.33.4"},
	{"a class that does not exist", []string{"--set",
		`node.allocationPath=dra,deviceClasses.extendedResourceNames.gpu\.nvidia\.divvy\.dev=nvidia.com/gpu`},
		"there is no class gpu.nvidia.divvy.dev; the classes are drs.enflame.divvy.dev, gcu.enflame.divvy.dev, gcu-slots.enflame"},
	{"a class for units of memory", []string{"--set",
		`node.allocationPath=dra,deviceClasses.extendedResourceNames.gcu\.enflame\.divvy\.dev=enflame.com/gcu-memory`},
		"enflame.com/gcu-memory counts units of memory"},
	{"two classes for one resource", []string{"--set", `node.allocationPath=dra,deviceClasses.extendedResourceNames.` +
		`gcu\.enflame\.divvy\.dev=a.example/b,deviceClasses.extendedResourceNames.drs\.enflame\.divvy\.dev=a.example/b`},
		"drs.enflame.divvy.dev and gcu.enflame.divvy.dev both have a.example/b"},
	{"a class for what the plugin of the same node offers", []string{"--set",
		`node.allocationPath=both,deviceClasses.extendedResourceNames.gpu\.nvidia\.divvy\.dev=nvidia.com/gpu`, "--set-json", divided},
		"deviceClasses.extendedResourceNames: nvidia.com/gpu is also a resource with allocationPath plugin in sharedResources, " +
			"beside devices"},
	{"a class for what the plugin of some nodes offers", []string{"--set",
		`node.configs.b.allocationPath=both,deviceClasses.extendedResourceNames.gpu\.nvidia\.divvy\.dev=nvidia.com/gpu`, "--set-json",
		strings.Replace(divided, "sharedResources", "node.configs.b.resources", 1)},
		"nvidia.com/gpu is also a resource with allocationPath plugin in node.configs.b"},
	{"reviews without claims", []string{"--set", "claims.admission.enabled=true"},
		"no node has allocationPath dra, so there are no claims"},
	{"reviews of claims before 1.36", []string{"--set", reviewed, "--kube-version", "1.35.2"},
		"claims.admission.enabled requires Kubernetes 1.36"},
	{"reviews without an extender", []string{"--set", reviewed, "--set-json",
		`sharedResources=[{"name":"nvidia.com/gpu","vendor":"nvidia","mode":"exclusive"}]`}, "there is no resource of mode memory"},
	{"claims of a part of each device", []string{"--set", reviewed + ",memoryUnit=1/6"},
		"enflame.com/gcu-memory has memoryUnit 1/6, a part of each device"},
	{"claims of two sizes of a unit", []string{"--set", reviewed, "--set-json",
		`node.configs.fine.resources=[{"name":"enflame.com/gcu-memory","vendor":"enflame","memoryUnit":"0.1"}]`},
		"enflame.com/gcu-memory differs between sharedResources and node.configs"},
	{"a class without claims", []string{"--set", `deviceClasses.extendedResourceNames.gcu\.enflame\.divvy\.dev=enflame.com/gcu`},
		"no node has allocationPath dra"},
	{"unknown policy", []string{"--set", "extender.policy=random"}, "policy"},
	{"demand without a share", []string{"--set-json", `extender.demand=[{"units":8}]`}, "missing property 'share'"},
	{"demand of which resource",
		[]string{"--set-json",
			`sharedResources=[{"name":"a.b/c","vendor":"enflame","mode":"memory"},{"name":"a.b/d","vendor":"nvidia","mode":"memory"}]`,
			"--set-json", `extender.demand=[{"units":8,"share":1}]`}, "extender.demand[0]: resource is required"},
	{"network that is none", []string{"--set", "extender.allowBindFrom={everywhere}"}, "allowBindFrom"},
	{"relative folder", []string{"--set", "node.stateDir=divvy"}, "stateDir"},
	{"unknown vendor", []string{"--set", "sharedResources[0].name=a.example/b,sharedResources[0].vendor=acme"}, "vendor"},
	{"unknown mode", []string{"--set",
		"sharedResources[0].name=a.example/b,sharedResources[0].vendor=enflame,sharedResources[0].mode=half"}, "mode"},
	{"isolation that is no choice", []string{"--set",
		"sharedResources[0].name=a.example/b,sharedResources[0].vendor=nvidia,sharedResources[0].isolation=hardware"}, "isolation"},
	{"isolation of another vendor", []string{"--set",
		"sharedResources[0].name=a.example/b,sharedResources[0].vendor=enflame,sharedResources[0].isolation=driver"},
		"isolation driver is for devices of nvidia"},
	{"MPS of time slices", []string{"--set", "sharedResources[0].name=a.example/b,sharedResources[0].vendor=nvidia," +
		"sharedResources[0].mode=timeSlicing,sharedResources[0].replicas=2,sharedResources[0].isolation=cooperative"},
		"isolation cooperative is not for mode timeSlicing"},
	{"MPS beside whole devices", jsonSet("sharedResources", `[{"name":"nvidia.com/gpu","vendor":"nvidia","mode":"exclusive"},`+
		`{"name":"nvidia.com/gpu-memory","vendor":"nvidia","mode":"memory","isolation":"cooperative"}]`),
		"no other resource may offer the same devices, and nvidia.com/gpu may"},
	{"limits of time slices", []string{"--set", "sharedResources[0].name=a.example/b,sharedResources[0].vendor=nvidia," +
		"sharedResources[0].mode=timeSlicing,sharedResources[0].replicas=2,sharedResources[0].isolation=driver"},
		"isolation driver is not for mode timeSlicing"},
	{"replicas of a whole device",
		[]string{"--set", "sharedResources[0].name=a.example/b,sharedResources[0].vendor=enflame,sharedResources[0].mode=exclusive," +
			"sharedResources[0].replicas=2"}, "replicas is for mode timeSlicing"},
	{"turns without a number",
		[]string{"--set", "sharedResources[0].name=a.example/b,sharedResources[0].vendor=enflame,sharedResources[0].mode=timeSlicing"},
		"needs replicas"},
	{"absurd replicas", []string{"--set",
		"sharedResources[0].name=a.example/b,sharedResources[0].vendor=enflame,sharedResources[0].mode=timeSlicing," +
			"sharedResources[0].replicas=100000"}, "replicas"},
	{"bad cause", []string{"--set", "node.vendors.nvidia.health.ignore={XID 79}"}, "ignore"},
	{"two sources of configurations", []string{"--set", "node.existingConfigMap=a,node.configs.b.logLevel=debug"},
		"node.existingConfigMap"},
	{"a text that is no configuration", []string{"--set-string", "node.configs.a=nonsense"}, "node.configs.a"},
	{"one name twice", jsonSet("sharedResources",
		`[{"name":"a.example/b","vendor":"nvidia","mode":"exclusive"},{"name":"a.example/b","vendor":"enflame","mode":"exclusive"}]`),
		"sharedResources: duplicate name"},
	{"a name as a count", jsonSet("sharedResources", `[{"name":"a.example/b","vendor":"nvidia","countResource":"a.example/b"}]`),
		"sharedResources: duplicate name"},
	{"one name twice in a named configuration", jsonSet("node.configs.a.resources",
		`[{"name":"a.example/b","vendor":"nvidia","mode":"exclusive"},{"name":"a.example/b","vendor":"nvidia","mode":"exclusive"}]`),
		"node.configs.a.resources: duplicate name"},
	{"the same memory twice",
		jsonSet("sharedResources",
			`[{"name":"a.example/b","vendor":"nvidia"},{"name":"a.example/c","vendor":"nvidia","devices":{"indexes":[0]}}]`),
		"shares the memory of all devices of nvidia"},
	{"a domain of Kubernetes", jsonSet("sharedResources", `[{"name":"x.kubernetes.io/b","vendor":"nvidia"}]`), "sharedResources"},
	{"a name too long for its socket", jsonSet("sharedResources", `[{"name":"iluvatar.com/`+strings.Repeat("x", 63)+
		`","vendor":"iluvatar"}]`), "too long for the path of a socket"},
	{"a folder too long for sockets", []string{"--set", "node.kubeletDir=/" + strings.Repeat("k", 80)},
		"too long for the path of a socket"},
	{"a rare look", []string{"--set", "node.healthInterval=5h"}, "healthInterval"},
	{"a hasty look", []string{"--set", "node.healthInterval=1ms"}, "healthInterval"},
	{"no interval", []string{"--set", "node.healthInterval=0s"}, "healthInterval"},
	{"hasty passes", []string{"--set", "node.usage.interval=4s"}, "usage/interval"},
	{"rare passes", []string{"--set", "node.configs.a.usage.interval=11m"}, "usage"},
	{"eviction of what is not measured", []string{"--set", "extender.eviction.enabled=true"},
		"extender.eviction.enabled: no node measures use, so no pod would be evicted; set node.usage.enabled=true"},
	{"eviction without a context allowance", []string{"--set", "node.usage.enabled=true,extender.eviction.enabled=true"},
		"set node.usage.overuse.contextAllowanceMiB"},
	{"a hasty eviction", []string{"--set", "extender.eviction.gracePeriod=29s"}, "eviction/gracePeriod"},
	{"eviction without a limit", []string{"--set", "extender.eviction.maxPerNodeAndHour=0"}, "eviction/maxPerNodeAndHour"},
	{"an exempt namespace that cannot be", []string{"--set", "extender.eviction.exemptNamespaces={Kube_System}"},
		"eviction/exemptNamespaces"},
	{"a detail that metrics lack", []string{"--set", "node.usage.metrics=pod"}, "usage/metrics"},
	{"an exception of nothing", jsonSet("sharedResources", `[{"name":"a.example/b","vendor":"nvidia","devices":{"except":{}}}]`), "except"},
	{"an exception of an exception",
		jsonSet("sharedResources",
			`[{"name":"a.example/b","vendor":"nvidia","devices":{"except":{"indexes":[1],"except":{"indexes":[0]}}}}]`), "except"},
	{"the uuid of a replica", jsonSet("sharedResources", `[{"name":"a.example/b","vendor":"nvidia","devices":{"ids":["GPU-1::0"]}}]`),
		"ids"},
	{"a rule for no device",
		jsonSet("sharedResources",
			`[{"name":"a.example/b","vendor":"nvidia","mode":"timeSlicing","replicas":2,"replicasFor":[{"devices":{},"replicas":3}]}]`),
		"replicasFor"},
	{"a word for several causes", []string{"--set", "node.vendors.nvidia.health.heed={all}"}, "heed"},
	{"a long wait", []string{"--set", "node.vendors.nvidia.health.recoverAfter=48h"}, "recoverAfter"},
	{"mounts for Iluvatar", []string{"--set", "node.vendors.iluvatar.injection={volumeMounts}"}, "injection"},
	{"auto for Iluvatar", []string{"--set", "node.vendors.iluvatar.injection={auto}"}, "injection"},
	{"auto beside another way", []string{"--set", "node.vendors.nvidia.injection={auto,cdi}"}, "injection"},
	{"two meanings of a variable", []string{"--set", "node.vendors.nvidia.injection={environment,volumeMounts}"}, "injection"},
	{"mounts for all in a named configuration", []string{"--set", "node.configs.a.injection=volumeMounts"}, "injection"},
	{"a MIG strategy that does not exist", []string{"--set", "node.vendors.nvidia.migStrategy=double"}, "migStrategy"},
	{"MIG devices of Iluvatar", []string{"--set", "node.vendors.iluvatar.migStrategy=mixed"}, "migStrategy"},
	{"DRS instances of NVIDIA", []string{"--set", "node.vendors.nvidia.drs=true"}, "drs"},
	{"DRS instances of Iluvatar", []string{"--set", "node.vendors.iluvatar.drs=true"}, "drs"},
	{"a part of a GPU instance",
		jsonSet("sharedResources", `[{"name":"a.example/b","vendor":"nvidia","mode":"exclusive","profile":"1c.2g.10gb"}]`), "profile"},
	{"an unknown CDI hook", []string{"--set", "node.vendors.nvidia.cdiDisableHooks[0]=ldconfig"}, "cdiDisableHooks"},
	{"CDI hooks of another vendor", []string{"--set", "node.vendors.enflame.cdiHookPath=/usr/bin/hook"},
		"vendors.enflame.cdiHookPath: only the CDI specification of NVIDIA's devices"},
	{"a kind of CDI without CDI", []string{"--set", "node.vendors.nvidia.cdiKind=nvidia.com/gpu"}, "vendors.nvidia.cdiKind is never used"},
	{"a kind of CDI without CDI in a named configuration",
		[]string{"--set", "node.injection=cdi,node.vendors.nvidia.cdiKind=nvidia.com/gpu,node.configs.a.injection=environment"},
		"node.configs.a: vendors.nvidia.cdiKind is never used"},
	{"no resource and no pool", jsonSet("sharedResources", "[]"), "nothing would be installed"},
	{"a configuration that nothing reads", append(jsonSet("sharedResources", "[]"),
		"--set", "pool.enabled=true,node.ixConfigMap=ix-config"), "node.ixConfigMap has no effect"},
	{"a GPU's memory with its unit", []string{"--set", "pool.totalGPUMemory=16000M"}, "totalGPUMemory"},
	{"a GPU's memory as text", []string{"--set-string", "pool.totalGPUMemory=16000"}, "totalGPUMemory"},
	{"a policy that does not exist", []string{"--set", "pool.webhook.failurePolicy.mutating=Open"}, "failurePolicy"},
	{"no units", []string{"--set", "pool.node.units=0"}, "units"},
	{"half a unit", jsonSet("pool.node.units", "0.5"), "units"},
	{"a misspelt key of the pool", []string{"--set", "pool.catalogue=x"}, "catalogue"},
	{"an operator that does not exist", jsonSet("pool.credentials.namespaceSelector", `{"matchExpressions":[{"key":"a","operator":"Is"}]}`),
		"namespaceSelector"},
	{"an operator without its values", jsonSet("pool.credentials.namespaceSelector", `{"matchExpressions":[{"key":"a","operator":"In"}]}`),
		"namespaceSelector"},
	{"two catalogs", []string{"--set", "pool.enabled=true,pool.existingCatalog=a,pool.catalog=b: c"}, "pool.existingCatalog"},
	{"a text that is no catalog", []string{"--set", "pool.enabled=true,pool.catalog=nonsense"}, "pool.catalog"},
	{"a namespace with a dot", []string{"--set-string", "pool.namespace=a.b"}, "namespace"},
	{"bad resource name", []string{"--set", "sharedResources[0].name=gcu,sharedResources[0].vendor=enflame"}, "sharedResources"},
}

// jsonSet makes helm's flags that set one value to what a JSON text says.
func jsonSet(key, text string) []string { return []string{"--set-json", key + "=" + text} }

func run(ctx context.Context, helm string, args []string, out io.Writer) error {
	if len(args) != 1 {
		return errors.New("say which chart: chartcheck -helm PROGRAM CHART")
	}
	chart := args[0]
	if _, err := output(ctx, helm, "lint", "--strict", "--quiet", "--kube-version", kubeVersion, chart); err != nil {
		return fmt.Errorf("helm lint: %w", err)
	}
	var problems []error
	for _, c := range good {
		configs := 1
		if c.none {
			configs = 0
		}
		if err := renders(ctx, helm, chart, c.set, c.want, configs); err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", c.name, err))
		}
	}
	for _, c := range bad {
		text, err := template(ctx, helm, chart, c.set)
		switch {
		case err == nil:
			problems = append(problems, fmt.Errorf("%s: rendered %d bytes; it should have been refused", c.name, len(text)))
		case !strings.Contains(err.Error(), c.want):
			problems = append(problems, fmt.Errorf("%s: refused without naming %s: %w", c.name, c.want, err))
		}
	}
	if err := errors.Join(problems...); err != nil {
		return err
	}
	fmt.Fprintf(out, "chart: helm lint, %d ways to render and %d values to refuse checked\n", len(good), len(bad))
	return nil
}

// renders checks that values render, with so many configurations of divvy-node.
func renders(ctx context.Context, helm, chart string, set, want []string, wantConfigs int) error {
	text, err := template(ctx, helm, chart, set)
	if err != nil {
		return err
	}
	for _, w := range want {
		if !strings.Contains(string(text), w) {
			return fmt.Errorf("%q is missing in what was rendered", w)
		}
	}
	configs := 0
	for dec := yaml.NewDecoder(bytes.NewReader(text)); ; {
		// Decoding refuses keys that occur twice, which helm does not.
		var object struct {
			Kind     string            `yaml:"kind"`
			Metadata map[string]any    `yaml:"metadata"`
			Data     map[string]string `yaml:"data"`
			Rest     map[string]any    `yaml:",inline"`
		}
		if err := dec.Decode(&object); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return fmt.Errorf("not good YAML: %w", err)
		}
		if text, ok := object.Data["bitfusion-client-config.yaml"]; ok {
			if _, err := pool.DecodeCatalog([]byte(text)); err != nil {
				return fmt.Errorf("the webhooks would refuse their catalog: %w", err)
			}
		} else if text, ok := object.Data["config.yaml"]; ok && object.Kind == "ConfigMap" {
			configs++
			if _, err := v1alpha1.Parse([]byte(text), "config.yaml", accel.VendorNames()); err != nil {
				return fmt.Errorf("divvy-node would refuse its configuration: %w", err)
			}
		}
	}
	if configs != wantConfigs {
		return fmt.Errorf("%d configurations of divvy-node were rendered, %d expected", configs, wantConfigs)
	}
	return nil
}

func template(ctx context.Context, helm, chart string, set []string) ([]byte, error) {
	args := []string{"template", "divvy", chart, "--namespace", "divvy-system", "--kube-version", kubeVersion}
	return output(ctx, helm, append(args, set...)...)
}

// output runs a program; an error holds what it printed.
func output(ctx context.Context, program string, args ...string) ([]byte, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%w\n%s%s", err, &stdout, &stderr)
	}
	return stdout.Bytes(), nil
}
