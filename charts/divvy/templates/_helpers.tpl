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

{{/* "true" when the extender elects a leader, else nothing. */}}
{{- define "divvy.extender.elects" -}}
{{- if or .Values.extender.leaderElection (gt (int .Values.extender.replicas) 1) -}}true{{- end -}}
{{- end }}

{{/* The label, as key=value, that the extender asks of a node: the selector's
gcushare label, or the only one that there is. A node that lost it gets no pods,
even while its inventory is still there. */}}
{{- define "divvy.extender.nodeLabel" -}}
{{- $s := .Values.node.nodeSelector -}}
{{- if hasKey $s "enflame.com/gcushare" -}}
enflame.com/gcushare={{ get $s "enflame.com/gcushare" }}
{{- else if eq (len $s) 1 -}}
{{- range $k, $v := $s }}{{ $k }}={{ $v }}{{ end -}}
{{- end -}}
{{- end }}

{{/* Prometheus annotations; (list $ 9400). */}}
{{- define "divvy.scrape" -}}
{{- if (index . 0).Values.metrics.scrapeAnnotations -}}
prometheus.io/scrape: "true"
prometheus.io/port: {{ index . 1 | quote }}
prometheus.io/path: /metrics
{{- end -}}
{{- end }}

{{/* The configuration file of divvy-node, api/config/v1alpha1. Paths are those
inside the container. */}}
{{- define "divvy.node.config" -}}
apiVersion: config.divvy.dev/v1alpha1
kind: NodeConfig
driverRoot: /host
kubeletDir: /var/lib/kubelet
stateDir: /var/lib/divvy
cdiDir: /var/run/cdi
{{- if .Values.node.logDir }}
logFile: {{ .Values.node.logDir | trimSuffix "/" }}/gcushare-device-plugin.log
{{- end }}
logLevel: {{ .Values.node.logLevel }}
listen: ":9400"
grantKeyFile: /etc/divvy/grant/key
injection: {{ .Values.node.injection }}
healthInterval: {{ .Values.node.healthInterval }}
{{- with .Values.node.libraries }}
libraries:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
{{- range .Values.sharedResources }}
- name: {{ .name }}
  vendor: {{ .vendor }}
  mode: {{ .mode | default "memory" }}
  memoryUnit: {{ .memoryUnit | default $.Values.memoryUnit | quote }}
  {{- with .countResource }}
  countResource: {{ . }}
  {{- end }}
{{- end }}
{{- end }}
