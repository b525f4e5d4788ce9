{{/* The settings of the extender as JSON, with what its place decides: beside a
scheduler of its own no other client binds, and nothing of the host is used. */}}
{{- define "divvy.extender.settings" -}}
{{- $e := deepCopy .Values.extender -}}
{{- $e = set $e "replicas" (include "divvy.extender.replicas" . | int) -}}
{{- if eq .Values.scheduler.mode "dedicated" -}}
{{- $e = set $e "allowBindFrom" list -}}
{{- $e = set $e "logDir" "" -}}
{{- $e = set $e "listenAddress" "" -}}
{{- $e = set $e "runAsUser" 65532 -}}
{{- end -}}
{{- if kindIs "invalid" $e.runAsUser -}}
{{- $e = set $e "runAsUser" (ternary 0 65532 (ne $e.logDir "")) -}}
{{- end -}}
{{- $e | toJson -}}
{{- end }}

{{/* How many times the extender's score of a node counts for kube-scheduler. All of its
own plugins together give 1500 points at most (1.37); with 200, one of the extender's
ten points is worth 2000. */}}
{{- define "divvy.extender.weight" -}}
{{- with .Values.extender.weight }}{{ int64 . }}{{ else }}{{ ternary 200 1 (eq .Values.extender.policy "fragmentation") }}{{ end }}
{{- end }}

{{/* Flags that say how pods are placed, as a JSON list: the same for each program that does. */}}
{{- define "divvy.placement.flags" -}}
{{- $e := .Values.extender -}}
{{- $managed := include "divvy.memoryResources" . -}}
{{- $flags := list (printf "--resources=%s" $managed) (printf "--node-label=%s" (include "divvy.extender.nodeLabel" .)) (printf "--policy=%s" $e.policy) -}}
{{- if not $e.chooseNode -}}
{{- $flags = append $flags "--choose-node=false" -}}
{{- end -}}
{{- range $i, $kind := $e.demand -}}
{{- if and (contains "," $managed) (not $kind.resource) -}}
{{- fail (printf "extender.demand[%d]: resource is required, because several are managed: %s" $i $managed) -}}
{{- end -}}
{{- end -}}
{{- with $e.demand -}}
{{- $flags = append $flags (printf "--demand=%s" (toJson .)) -}}
{{- end -}}
{{- $flags | toJson -}}
{{- end }}

{{/* The container of the extender, or of the scheduler that has it inside. */}}
{{- define "divvy.extender.container" -}}
{{- $e := include "divvy.extender.settings" . | fromJson -}}
{{- $user := $e.runAsUser -}}
{{- $plugin := include "divvy.scheduler.plugin" . -}}
name: {{ ternary "scheduler" "extender" (eq $plugin "true") }}
image: {{ if $plugin }}{{ include "divvy.scheduler.pluginImage" . }}{{ else }}{{ include "divvy.image" (list . $e.image) }}{{ end }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
{{- if $plugin }}
- --scheduler-config=/etc/divvy/scheduler/config.yaml
{{- else }}
- extender
{{- end }}
- --listen={{ $e.listenAddress | contains ":" | ternary (printf "[%s]" $e.listenAddress) $e.listenAddress }}:32766
- --metrics-listen={{ $e.listenAddress | contains ":" | ternary (printf "[%s]" $e.listenAddress) $e.listenAddress }}:9401
{{- if not .Values.metrics.perDevice }}
- --metrics-devices=false
{{- end }}
- --tls-listen={{ $e.tls.listenAddress | contains ":" | ternary (printf "[%s]" $e.tls.listenAddress) $e.tls.listenAddress }}:32765
- --tls-overlap={{ $e.tls.overlap }}
{{- with $e.allowBindFrom }}
- --allow-bind-from={{ join "," . }}
{{- end }}
{{- range include "divvy.placement.flags" . | fromJsonArray }}
- {{ toYaml . }}
{{- end }}
- --max-bind-delay={{ $e.maxBindDelay }}
{{- if eq .Values.scheduler.mode "replace" }}
# divvy-scheduler on the control plane places pods.
- --reports-only
{{- end }}
- --grant-key-file=/etc/divvy/grant/key
- --log-level={{ $e.logLevel }}
{{- if $e.logDir }}
- --log-file={{ $e.logDir | trimSuffix "/" }}/gcushare-scheduler-extender.log
{{- end }}
{{- if include "divvy.extender.elects" . }}
- --leader-elect
- --leader-elect-duration={{ $e.leaseDuration }}
{{- end }}
{{- with $e.eviction }}
{{- if .enabled }}
{{- if not (include "divvy.node.measures" $) }}
{{- fail "extender.eviction.enabled: no node measures use, so no pod would be evicted; set node.usage.enabled=true, or usage.enabled in a configuration of node.configs" }}
{{- end }}
{{- if and $.Values.node.usage.enabled (not $.Values.node.usage.overuse.contextAllowanceMiB) }}
{{- fail "extender.eviction.enabled: no pod would be evicted without a context allowance; set node.usage.overuse.contextAllowanceMiB, such as {nvidia: 512}" }}
{{- end }}
- --evict-memory-overuse
- --eviction-grace-period={{ .gracePeriod }}
- --eviction-max-per-hour={{ int64 .maxPerNodeAndHour }}
- --eviction-exempt-namespaces={{ join "," .exemptNamespaces }}
{{- end }}
{{- end }}
{{- with include "divvy.claims.units" . | fromJsonArray }}
- --claim-units={{ join "," . }}
- --mutating-config=divvy-claims
{{- end }}
{{- if eq .Values.scheduler.mode "dedicated" }}
- --scheduler-name={{ .Values.scheduler.name }}
- --mutating-config=divvy-scheduler
# Until the API server knows that this replica ends.
- --shutdown-delay=5s
# The scheduler beside it asks without TLS.
- --tls-ca-configmap=
{{- end }}
{{- if $plugin }}
# Flags of kube-scheduler: who may read its metrics is asked of the API server alone.
- --
- --authentication-skip-lookup=true
{{- end }}
env:
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{- if include "divvy.extender.elects" . }}
# Where the other replicas reach this one.
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}
{{- with $e.extraEnv }}
{{- toYaml . | nindent 0 }}
{{- end }}
ports:
- name: http
  containerPort: 32766
- name: https
  containerPort: 32765
- name: metrics
  containerPort: 9401
{{- if $plugin }}
- name: scheduler
  containerPort: 10259
{{- end }}
startupProbe:
  httpGet:
    path: /healthz
    port: http
    {{- with $e.listenAddress }}
    host: {{ . | quote }}
    {{- end }}
  periodSeconds: 1
  timeoutSeconds: 3
  failureThreshold: 60
livenessProbe:
  httpGet:
    path: /healthz
    port: http
    {{- with $e.listenAddress }}
    host: {{ . | quote }}
    {{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet:
    path: /readyz
    port: http
    {{- with $e.listenAddress }}
    host: {{ . | quote }}
    {{- end }}
  periodSeconds: 2
  timeoutSeconds: 3
resources:
  {{- toYaml (ternary .Values.scheduler.resources $e.resources (eq $plugin "true")) | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: {{ ne (int64 $user) 0 }}
  capabilities:
    drop: [ALL]
terminationMessagePolicy: FallbackToLogsOnError
volumeMounts:
- name: grant-key
  mountPath: /etc/divvy/grant
  readOnly: true
{{- if $e.logDir }}
- name: logs
  mountPath: {{ $e.logDir }}
{{- end }}
{{- if $plugin }}
- name: config
  mountPath: /etc/divvy/scheduler
  readOnly: true
{{- end }}
{{- end }}
