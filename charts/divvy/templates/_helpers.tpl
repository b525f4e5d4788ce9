{{/* Labels that select the pods of one program; (list $ "divvy-node"). They
are few because a selector can never be changed. */}}
{{- define "divvy.selector" -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end }}

{{/* Labels of an object that belongs to one program; (list $ "divvy-node"). */}}
{{- define "divvy.labels" -}}
{{- $root := index . 0 -}}
{{ include "divvy.selector" . }}
app.kubernetes.io/part-of: divvy
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Reference of an image; (list $ .Values.node.image). */}}
{{- define "divvy.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- printf "%s/%s:%s" ($root.Values.image.registry | trimSuffix "/") $image.repository (coalesce $image.tag $root.Values.image.tag $root.Chart.AppVersion) -}}
{{- end }}

{{/* Name of the Secret with the key of the grants. */}}
{{- define "divvy.grantSecret" -}}
{{- .Values.grantKey.existingSecret | default "divvy-grant-key" -}}
{{- end }}

{{/* How many extenders there are: two, but one where the cluster is one node, which has
each port once. A cluster that cannot be asked (helm template) counts as large. */}}
{{- define "divvy.extender.replicas" -}}
{{- if kindIs "invalid" .Values.extender.replicas -}}
{{- $nodes := (lookup "v1" "Node" "" "").items | default list -}}
{{- /* Noted, so that nodes are listed once. */ -}}
{{- $_ := set .Values.extender "replicas" (ternary 1 2 (eq (len $nodes) 1)) -}}
{{- end -}}
{{- int .Values.extender.replicas -}}
{{- end }}

{{/* "true" when the extender elects a leader, else nothing. Beside a scheduler of its own
it always does: during an update there are two, however many replicas are wanted. */}}
{{- define "divvy.extender.elects" -}}
{{- if or (eq .Values.scheduler.mode "dedicated") .Values.extender.leaderElection (gt (include "divvy.extender.replicas" . | int) 1) -}}true{{- end -}}
{{- end }}

{{/* The account that the extender runs as: its own, or that of the scheduler whose
pods it is in. */}}
{{- define "divvy.extender.account" -}}
{{- ternary "divvy-scheduler" "divvy-extender" (eq .Values.scheduler.mode "dedicated") -}}
{{- end }}

{{/* The named configurations of node.configs as JSON, name -> text of the file. The
daemon lays them over divvy.node.config, so a map needs only what differs. */}}
{{- define "divvy.node.configs" -}}
{{- $root := . -}}
{{- $out := dict -}}
{{- range $name, $config := .Values.node.configs -}}
{{- if kindIs "string" $config -}}
{{- with (fromYaml $config).Error -}}
{{- fail (printf "node.configs.%s: %s" $name .) -}}
{{- end -}}
{{- $out = set $out $name $config -}}
{{- else -}}
{{- $file := merge (dict "apiVersion" "config.divvy.dev/v1alpha1" "kind" "NodeConfig") (deepCopy $config) -}}
{{- if $file.resources -}}
{{- $resources := list -}}
{{- range $i, $r := $file.resources -}}
{{- $resources = append $resources (include "divvy.resource" (list $root (printf "node.configs.%s.resources[%d]" $name $i) $r) | fromYaml) -}}
{{- end -}}
{{- $file = set $file "resources" $resources -}}
{{- include "divvy.checkResources" (list $root (printf "node.configs.%s.resources" $name) $resources) -}}
{{- end -}}
{{- $vendors := include "divvy.node.vendors" $root | fromJson -}}
{{- range $vendor, $settings := $file.vendors -}}
{{- $vendors = set $vendors $vendor $settings -}}
{{- end -}}
{{- include "divvy.checkVendors" (list (printf "node.configs.%s" $name) $vendors ($file.injection | default $root.Values.node.injection)) -}}
{{- $out = set $out $name (toYaml $file) -}}
{{- end -}}
{{- end -}}
{{- $out | toJson -}}
{{- end }}

{{/* "true" when some node measures what is in use of its devices, else nothing. */}}
{{- define "divvy.node.measures" -}}
{{- $on := .Values.node.usage.enabled -}}
{{- range include "divvy.node.configs" . | fromJson -}}
{{- $on = or $on (dig "usage" "enabled" false (fromYaml .)) -}}
{{- end -}}
{{- if $on -}}
true
{{- end -}}
{{- end }}

{{/* "true" when some node serves ResourceClaims or has just served them, else nothing: an
entry of node.configs that says plugin is of a node on which pods may still have claims. */}}
{{- define "divvy.node.claims" -}}
{{- $on := ne .Values.node.allocationPath "plugin" -}}
{{- range include "divvy.node.configs" . | fromJson -}}
{{- $on = or $on (hasKey (fromYaml .) "allocationPath") -}}
{{- end -}}
{{- if $on -}}
true
{{- end -}}
{{- end }}

{{/* The resources of units of memory that claims can stand for, as a JSON list of
resource=vendor:size; empty unless claims are reviewed. */}}
{{- define "divvy.claims.units" -}}
{{- $units := list -}}
{{- if .Values.claims.admission.enabled -}}
{{- if not (include "divvy.node.claims" .) -}}
{{- fail "claims.admission.enabled: no node has allocationPath dra, so there are no claims; set node.allocationPath=dra, or remove it" -}}
{{- end -}}
{{- $sizes := dict -}}
{{- range include "divvy.resources" . | fromJsonArray -}}
{{- if eq (.mode | default "memory") "memory" -}}
{{- $size := .memoryUnit | default $.Values.memoryUnit -}}
{{- $unit := printf "%s=%s:%s" .name .vendor $size -}}
{{- if contains "/" $size -}}
{{- fail (printf "claims.admission.enabled: %s has memoryUnit %s, a part of each device, and claims name an amount; use another memoryUnit" .name $size) -}}
{{- end -}}
{{- if ne $unit (get $sizes .name | default $unit) -}}
{{- fail (printf "claims.admission.enabled: %s differs between sharedResources and node.configs (%s, %s), so its units are no fixed amount; use one memoryUnit" .name (get $sizes .name) $unit) -}}
{{- end -}}
{{- $sizes = set $sizes .name $unit -}}
{{- $units = append $units $unit -}}
{{- end -}}
{{- end -}}
{{- if not $units -}}
{{- fail "claims.admission.enabled: there is no resource of mode memory, so there is no extender that could review claims; remove it" -}}
{{- end -}}
{{- end -}}
{{- $units | uniq | toJson -}}
{{- end }}

{{/* A condition in CEL that is true for pods with a container that requests units of one of the
resources of mode memory. */}}
{{- define "divvy.claims.requestUnits" -}}
{{- $resources := list -}}
{{- range include "divvy.claims.units" . | fromJsonArray -}}
{{- $resources = append $resources (squote (splitn "=" 2 .)._0) -}}
{{- end -}}
[object.spec.?containers.orValue(null), object.spec.?initContainers.orValue(null)].exists(group,
      group != null && group.exists(c, [{{ join ", " $resources }}].exists(r,
      c.?resources.?limits[?r].hasValue() || c.?resources.?requests[?r].hasValue())))
{{- end }}

{{/* Where the daemon sees kubelet's folder. It names its socket to kubelet, which needs the
same path. */}}
{{- define "divvy.node.kubeletDir" -}}
{{- if include "divvy.node.claims" . -}}
{{- .Values.node.kubeletDir | trimSuffix "/" -}}
{{- else -}}
/var/lib/kubelet
{{- end -}}
{{- end }}

{{/* "true" when some node limits the memory of containers in the driver, else nothing. */}}
{{- define "divvy.node.limits" -}}
{{- include "divvy.node.isolates" (list . "driver") -}}
{{- end }}

{{/* "true" when some node needs MPS, else nothing. */}}
{{- define "divvy.node.cooperative" -}}
{{- include "divvy.node.isolates" (list . "cooperative") -}}
{{- end }}

{{/* "true" when some resource has an isolation, else nothing; (list $ "driver"). */}}
{{- define "divvy.node.isolates" -}}
{{- $on := false -}}
{{- $isolation := index . 1 -}}
{{- range include "divvy.resources" (index . 0) | fromJsonArray -}}
{{- $on = or $on (eq (.isolation | default "none") $isolation) -}}
{{- end -}}
{{- if $on -}}
true
{{- end -}}
{{- end }}

{{/* All resources that some node may offer, as a JSON list of their entries. */}}
{{- define "divvy.resources" -}}
{{- $all := list -}}
{{- range .Values.sharedResources -}}
{{- $all = append $all . -}}
{{- end -}}
{{- range include "divvy.node.configs" . | fromJson -}}
{{- $file := fromYaml . -}}
{{- if eq (toString $file.kind) "NodeConfig" -}}
{{- $all = concat $all ($file.resources | default list) -}}
{{- end -}}
{{- end -}}
{{- $all | toJson -}}
{{- end }}

{{/* The resources that the extender manages, those of mode memory, joined by
commas. */}}
{{- define "divvy.memoryResources" -}}
{{- $names := list -}}
{{- range include "divvy.resources" . | fromJsonArray -}}
{{- if eq (.mode | default "memory") "memory" -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end -}}
{{- concat $names .Values.extender.managedResources | uniq | join "," -}}
{{- end }}

{{/* The table of the vendors as a JSON list, of internal/core/accel/vendors.go. */}}
{{- define "divvy.vendorTable" -}}
{{- .Files.Get "files/vendors.yaml" | fromYamlArray | toJson -}}
{{- end }}

{{/* The vendors whose devices some node may offer, as a JSON list. The chart does
not see into ConfigMaps of one's own, so these may be anybody's. */}}
{{- define "divvy.vendors" -}}
{{- $vendors := list -}}
{{- range include "divvy.resources" . | fromJsonArray -}}
{{- $vendors = append $vendors .vendor -}}
{{- end -}}
{{- range include "divvy.node.configs" . | fromJson -}}
{{- $file := fromYaml . -}}
{{- if ne (toString $file.kind) "NodeConfig" -}}
{{- /* A file of NVIDIA's or of Iluvatar's plugin; where that is not sure, of
either. */ -}}
{{- if ne (toString $file.version) "v1" -}}
{{- $vendors = append $vendors "iluvatar" -}}
{{- end -}}
{{- if or (not $file.version) (eq (toString $file.version) "v1") -}}
{{- $vendors = append $vendors "nvidia" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.node.ixConfigMap -}}
{{- $vendors = append $vendors "iluvatar" -}}
{{- end -}}
{{- if .Values.node.existingConfigMap -}}
{{- range include "divvy.vendorTable" . | fromJsonArray -}}
{{- $vendors = append $vendors .name -}}
{{- end -}}
{{- end -}}
{{- $vendors | uniq | sortAlpha | toJson -}}
{{- end }}

{{/* The labels, as a JSON map, all of which a node needs for the daemon to run
there; empty when any of divvy.node.anyLabel is enough. */}}
{{- define "divvy.node.selector" -}}
{{- $s := dict -}}
{{- range $key, $value := .Values.node.nodeSelector -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $s = set $s $key $value -}}
{{- end -}}
{{- end -}}
{{- if .Values.node.gpuOperator.enabled -}}
{{- $s = set $s "nvidia.com/gpu.present" "true" -}}
{{- end -}}
{{- $s | toJson -}}
{{- end }}

{{/* The labels, as a JSON list of key=value, any of which is enough for the
daemon to run on a node. */}}
{{- define "divvy.node.anyLabel" -}}
{{- $labels := list -}}
{{- $vendors := include "divvy.vendors" . | fromJsonArray -}}
{{- range include "divvy.vendorTable" . | fromJsonArray -}}
{{- if has .name $vendors -}}
{{- $labels = append $labels (printf "%s=true" .nodeLabel) -}}
{{- end -}}
{{- end -}}
{{- append $labels "divvy.dev/enabled=true" | toJson -}}
{{- end }}

{{/* The affinity of the daemon's pods: the labels above and what the values add,
both of which must hold. A node that says divvy.dev/enabled=false gets none: the
daemon itself writes some of the labels that it is chosen by, so taking a label
away is not always a way to be rid of it. */}}
{{- define "divvy.node.affinity" -}}
{{- $ours := list -}}
{{- if include "divvy.node.selector" . | fromJson -}}
{{- $ours = list list -}}
{{- else -}}
{{- range include "divvy.node.anyLabel" . | fromJsonArray -}}
{{- $kv := splitn "=" 2 . -}}
{{- $ours = append $ours (list (dict "key" $kv._0 "operator" "In" "values" (list $kv._1))) -}}
{{- end -}}
{{- end -}}
{{- $affinity := deepCopy .Values.node.affinity -}}
{{- $node := $affinity.nodeAffinity | default dict -}}
{{- $key := "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- $theirs := (get $node $key | default dict).nodeSelectorTerms | default (list dict) -}}
{{- $enabled := dict "key" "divvy.dev/enabled" "operator" "NotIn" "values" (list "false") -}}
{{- $terms := list -}}
{{- range $their := $theirs -}}
{{- range $our := $ours -}}
{{- $term := deepCopy $their -}}
{{- $term = set $term "matchExpressions" (concat $our (list $enabled) ($their.matchExpressions | default list)) -}}
{{- $terms = append $terms $term -}}
{{- end -}}
{{- end -}}
{{- $node = set $node $key (dict "nodeSelectorTerms" $terms) -}}
{{- set $affinity "nodeAffinity" $node | toYaml -}}
{{- end }}

{{/* The labels, as key=value and joined by commas, any of which the extender asks
of a node. A node that lost them gets no pods, even while its inventory is still
there. */}}
{{- define "divvy.extender.nodeLabel" -}}
{{- $s := include "divvy.node.selector" . | fromJson -}}
{{- if and .Values.node.gpuOperator.enabled .Values.node.gpuOperator.clientLabel -}}
nvidia.com/gpu.deploy.client=true
{{- else if not $s -}}
{{- include "divvy.node.anyLabel" . | fromJsonArray | join "," -}}
{{- else if hasKey $s "enflame.com/gcushare" -}}
enflame.com/gcushare={{ get $s "enflame.com/gcushare" }}
{{- else if eq (len $s) 1 -}}
{{- range $k, $v := $s }}{{ $k }}={{ $v }}{{ end -}}
{{- end -}}
{{- end }}

{{/* What the daemon sees of the host's files: libraries of drivers, and /sys and
/proc in them. */}}
{{- define "divvy.node.hostMounts" -}}
- name: host
  mountPath: /host
  readOnly: true
  mountPropagation: {{ .Values.node.hostMountPropagation }}
{{- if include "divvy.node.limits" . }}
# The program that container runtimes run on the host to limit a container, and its records.
- name: hook
  mountPath: /host/var/lib/divvy/hook
- name: limits
  mountPath: /host/run/divvy/limits
{{- end }}
{{- if include "divvy.node.cooperative" . }}
# What divvy-mps is to do, and what it reports.
- name: mps
  mountPath: /host/run/divvy/mps
{{- end }}
{{- if and .Values.node.gpuOperator.enabled (ne (dir .Values.node.gpuOperator.driverRoot) "/") }}
# The operator's driver container mounts its root below this folder, perhaps
# later.
- name: driver
  mountPath: /host{{ dir .Values.node.gpuOperator.driverRoot }}
  readOnly: true
  mountPropagation: HostToContainer
{{- end }}
{{- end }}

{{/* Prometheus annotations; (list $ 9400). */}}
{{- define "divvy.scrape" -}}
{{- if (index . 0).Values.metrics.scrapeAnnotations -}}
prometheus.io/scrape: "true"
prometheus.io/port: {{ index . 1 | quote }}
prometheus.io/path: /metrics
{{- end -}}
{{- end }}

{{/* One entry of a list of resources, complete and checked;
(list $ "sharedResources[0]" entry). */}}
{{- define "divvy.resource" -}}
{{- $root := index . 0 -}}
{{- $at := index . 1 -}}
{{- $r := deepCopy (index . 2) -}}
{{- $mode := $r.mode | default "memory" -}}
{{- $r = set $r "mode" $mode -}}
{{- range $key, $of := dict "memoryUnit" "memory" "countResource" "memory" "replicas" "timeSlicing" "replicasFor" "timeSlicing" "failRequestsGreaterThanOne" "timeSlicing" "allocation" "timeSlicing" -}}
{{- /* Claims of memory have an order of devices; divvy-node checks what node.configs says. */ -}}
{{- $claims := and (eq $key "allocation") (eq $mode "memory") (or (ne $root.Values.node.allocationPath "plugin") (hasPrefix "node.configs" $at)) -}}
{{- if and (not $claims) (hasKey $r $key) (ne $mode $of) -}}
{{- fail (printf "%s (%s): %s is for mode %s, and the mode is %s" $at $r.name $key $of $mode) -}}
{{- end -}}
{{- end -}}
{{- if ne ($r.isolation | default "none") "none" -}}
{{- if ne $r.vendor "nvidia" -}}
{{- fail (printf "%s (%s): isolation %s is for devices of nvidia" $at $r.name $r.isolation) -}}
{{- end -}}
{{- if ne $mode "memory" -}}
{{- fail (printf "%s (%s): isolation %s is not for mode %s" $at $r.name $r.isolation $mode) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $mode "timeSlicing") (not $r.replicas) -}}
{{- fail (printf "%s (%s): mode timeSlicing needs replicas" $at $r.name) -}}
{{- end -}}
{{- if eq $mode "memory" -}}
{{- $r = set $r "memoryUnit" ($r.memoryUnit | default $root.Values.memoryUnit) -}}
{{- end -}}
{{- toYaml $r -}}
{{- end }}

{{/* Refuses lists of resources that divvy-node would refuse on every node;
(list $ "sharedResources" resources). */}}
{{- define "divvy.checkResources" -}}
{{- $root := index . 0 -}}
{{- $at := index . 1 -}}
{{- $names := list -}}
{{- $memory := dict -}}
{{- range index . 2 -}}
{{- $names = concat $names (list .name .countResource | compact) -}}
{{- if eq (.mode | default "memory") "memory" -}}
{{- $memory = set $memory .vendor (append (get $memory .vendor | default list) .) -}}
{{- end -}}
{{- /* Linux gives the path of a socket 107 bytes; three are left for another
socket beside one that cannot be taken. Kubelet and the daemon see the folder
under two names. */ -}}
{{- $parts := splitn "/" 2 .name -}}
{{- $socket := printf "/device-plugins/%s-%s.sock" (splitn "." 2 $parts._0)._0 $parts._1 -}}
{{- range list "/var/lib/kubelet" ($root.Values.node.kubeletDir | trimSuffix "/") -}}
{{- if gt (len (printf "%s%s" . $socket)) 104 -}}
{{- fail (printf "%s: %s%s is too long for the path of a socket, which has 104 bytes; use a shorter name" $at . $socket) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail (printf "%s: duplicate name: %s" $at (join ", " $names)) -}}
{{- end -}}
{{- range $vendor, $resources := $memory -}}
{{- range $resources -}}
{{- if and (gt (len $resources) 1) (not .devices) -}}
{{- fail (printf "%s: %s shares the memory of all devices of %s, and another resource shares memory of the same; choose devices for both" $at .name $vendor) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $all := index . 2 -}}
{{- range $one := $all -}}
{{- range $all -}}
{{- if and (eq ($one.isolation | default "none") "cooperative") (eq .vendor $one.vendor) (ne .name $one.name) (not (or .profile $one.profile)) (not (and .devices $one.devices)) -}}
{{- fail (printf "%s: with isolation cooperative of %s, no other resource may offer the same devices, and %s may; choose devices for both" $at $one.name .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Refuses settings of vendors that divvy-node would refuse;
(list "node" vendors injection). */}}
{{- define "divvy.checkVendors" -}}
{{- $at := index . 0 -}}
{{- $injection := index . 2 -}}
{{- range $vendor, $settings := index . 1 -}}
{{- $ways := $settings.injection | default (list $injection) -}}
{{- range $key := list "cdiHookPath" "cdiDisableHooks" "cdiFeatureFlags" -}}
{{- if and (ne $vendor "nvidia") (index $settings $key) -}}
{{- fail (printf "%s: vendors.%s.%s: only the CDI specification of NVIDIA's devices has hooks and features; remove the key" $at $vendor $key) -}}
{{- end -}}
{{- end -}}
{{- if and $settings.cdiKind (not (or (has "cdi" $ways) (has "cdiAnnotations" $ways) (has "auto" $ways))) -}}
{{- fail (printf "%s: vendors.%s.cdiKind is never used, because containers are not given CDI names; add cdi or cdiAnnotations to vendors.%s.injection" $at $vendor $vendor) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The vendors' settings as a JSON map. The GPU operator's driver is not in the
host's root. */}}
{{- define "divvy.node.vendors" -}}
{{- $vendors := deepCopy .Values.node.vendors -}}
{{- with .Values.node.gpuOperator -}}
{{- if .enabled -}}
{{- $vendors = merge $vendors (dict "nvidia" (dict "driverRoot" .driverRoot)) -}}
{{- end -}}
{{- end -}}
{{- $vendors | toJson -}}
{{- end }}

{{/* The configuration file of divvy-node, api/config/v1alpha1. Paths are those
inside the container. */}}
{{- define "divvy.node.config" -}}
{{- $node := .Values.node -}}
{{- include "divvy.checkResources" (list $ "sharedResources" .Values.sharedResources) -}}
{{- include "divvy.checkVendors" (list "node" (include "divvy.node.vendors" . | fromJson) $node.injection) -}}
apiVersion: config.divvy.dev/v1alpha1
kind: NodeConfig
driverRoot: /host
kubeletDir: {{ include "divvy.node.kubeletDir" . }}
stateDir: /var/lib/divvy
cdiDir: /var/run/cdi
{{- if $node.logDir }}
logFile: {{ $node.logDir | trimSuffix "/" }}/gcushare-device-plugin.log
{{- end }}
logLevel: {{ $node.logLevel }}
listen: ":9400"
grantKeyFile: /etc/divvy/grant/key
injection: {{ $node.injection }}
{{- if ne $node.allocationPath "plugin" }}
allocationPath: {{ $node.allocationPath }}
{{- end }}
healthInterval: {{ $node.healthInterval }}
labels: {{ $node.labels }}
{{- if $node.gpuOperator.enabled }}
gpuOperator: true
{{- end }}
{{- if $node.usage.enabled }}
usage:
  {{- toYaml $node.usage | nindent 2 }}
{{- end }}
{{- with $node.libraries }}
libraries:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "divvy.node.vendors" . | fromJson }}
vendors:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
{{- range $i, $r := .Values.sharedResources }}
-{{ include "divvy.resource" (list $ (printf "sharedResources[%d]" $i) $r) | indent 2 | trimPrefix " " }}
{{- end }}
{{- end }}

{{/* "true" when the chart installs anything for devices of the cluster's own nodes,
else nothing: a cluster that has none may use a remote pool alone. */}}
{{- define "divvy.local" -}}
{{- if .Values.sharedResources -}}
true
{{- else -}}
{{- $left := list -}}
{{- range $key, $value := dict "node.configs" .Values.node.configs "node.existingConfigMap" .Values.node.existingConfigMap "node.ixConfigMap" .Values.node.ixConfigMap "extender.managedResources" .Values.extender.managedResources -}}
{{- if $value -}}
{{- $left = append $left $key -}}
{{- end -}}
{{- end -}}
{{- if $left -}}
{{- fail (printf "sharedResources is empty, so divvy-node is not installed and %s has no effect; add a resource, or remove that value" (join ", " ($left | sortAlpha))) -}}
{{- end -}}
{{- if not .Values.pool.enabled -}}
{{- fail "sharedResources is empty and pool.enabled is false, so nothing would be installed; add a resource, or set pool.enabled=true" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The namespaces whose pods the pool leaves alone, as a JSON list: those that the
values name, that of the nodes' leases, and Divvy's own. */}}
{{- define "divvy.pool.ignored" -}}
{{- concat .Values.pool.ignoredNamespaces (list "kube-node-lease" .Values.pool.namespace .Release.Namespace) | uniq | toJson -}}
{{- end }}

{{/* The selector of the namespaces that get copies of the secrets, as JSON. The
default is not in values.yaml, because helm would add what somebody writes there to
it, and {} could not mean all. */}}
{{- define "divvy.pool.namespaceSelector" -}}
{{- $s := .Values.pool.credentials.namespaceSelector -}}
{{- if kindIs "invalid" $s -}}
{{- $s = dict "matchLabels" (dict "divvy.dev/pool" "allowed") -}}
{{- end -}}
{{- $s | toJson -}}
{{- end }}

{{/* The text of the catalog of clients. */}}
{{- define "divvy.pool.catalog" -}}
{{- $c := .Values.pool.catalog -}}
{{- if not $c -}}
{{- .Files.Get "files/pool-catalog.yaml" -}}
{{- else if kindIs "string" $c -}}
{{- with (fromYaml $c).Error -}}
{{- fail (printf "pool.catalog: %s" .) -}}
{{- end -}}
{{- $c -}}
{{- else -}}
{{- toYaml $c -}}
{{- end -}}
{{- end }}

{{/* Where both webhooks are called: in every namespace but the ignored, for pods
that have to do with the pool, and with the same condition. */}}
{{- define "divvy.pool.matching" -}}
namespaceSelector:
  matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: NotIn
    values:
    {{- range include "divvy.pool.ignored" . | fromJsonArray }}
    - {{ . }}
    {{- end }}
rules:
- apiGroups: [""]
  apiVersions: [v1]
  operations: [CREATE]
  resources: [pods]
  scope: Namespaced
# The API server itself asks this, before it calls anybody: for other pods it does
# not matter whether the webhooks are there.
matchConditions:
- name: pod-of-the-pool
  expression: |-
    {{- .Files.Get "files/pool-pods.cel" | trim | nindent 4 }}
{{- end }}

{{/* The affinity of the webhooks' pods: on different nodes where that is possible,
unless the values say something about other pods themselves. */}}
{{- define "divvy.pool.affinity" -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "divvy.selector" (list . "bitfusion-webhook") | fromYaml)) -}}
{{- $apart := dict "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term))) -}}
{{- $affinity := deepCopy .Values.pool.webhook.affinity -}}
{{- if not (hasKey $affinity "podAntiAffinity") -}}
{{- $affinity = merge $affinity $apart -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end }}

{{/* The annotations that Divvy alone writes, on pods and on nodes, as JSON lists.
internal/core/wire, internal/node/agent and internal/node/nodelabels write them. */}}
{{- define "divvy.annotations.pods" -}}
{{- $keys := list "divvy.dev/grant" "divvy.dev/held" -}}
{{- range include "divvy.vendorTable" . | fromJsonArray -}}
{{- $keys = concat $keys .annotations -}}
{{- end -}}
{{- $keys | toJson -}}
{{- end }}
{{- define "divvy.annotations.nodes" -}}
{{- list "divvy.dev/inventory" "divvy.dev/node-setup" "divvy.dev/quarantine" "divvy.dev/ending" "divvy.dev/memory-overuse" "divvy.dev/labels" "divvy.dev/counts" "divvy.dev/claim-drivers" | toJson -}}
{{- end }}
