{{/* kube-scheduler's own image, of the cluster's version unless the values name
another. Providers add something to the version, under which there is no image. */}}
{{- define "divvy.scheduler.image" -}}
{{- $i := .Values.scheduler.image -}}
{{- printf "%s/%s:%s" ($i.registry | trimSuffix "/") $i.repository ($i.tag | default (regexFind "^v?[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version)) -}}
{{- end }}

{{/* true where kube-scheduler has /livez and /readyz, else false. */}}
{{- define "divvy.scheduler.probes" -}}
{{- semverCompare ">=1.33-0" .Capabilities.KubeVersion.Version -}}
{{- end }}

{{/* The configuration of the scheduler. It reaches the API server as its pod does. */}}
{{- define "divvy.scheduler.config" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: true
  resourceLock: leases
  resourceNamespace: {{ .Release.Namespace }}
  resourceName: divvy-scheduler
profiles:
- schedulerName: {{ .Values.scheduler.name }}
{{- with .Values.scheduler.profile }}
{{ toYaml . | indent 2 }}
{{- end }}
extenders:
# The container beside it, which takes binds from its own pod alone.
- urlPrefix: http://127.0.0.1:32766/gcushare-scheduler
  filterVerb: filter
  preemptVerb: preempt
  prioritizeVerb: prioritize
  weight: {{ include "divvy.extender.weight" . }}
  bindVerb: bind
  nodeCacheCapable: true
  ignorable: false
  httpTimeout: 10s
  managedResources:
  {{- range splitList "," (include "divvy.memoryResources" .) }}
  - name: {{ . }}
    ignoredByScheduler: false
  {{- end }}
{{- end }}
