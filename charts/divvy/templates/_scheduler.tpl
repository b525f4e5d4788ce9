{{/* kube-scheduler's own image, of the cluster's version unless the values name
another. Providers add something to the version, under which there is no image. */}}
{{- define "divvy.scheduler.image" -}}
{{- $i := .Values.scheduler.image -}}
{{- printf "%s/%s:%s" ($i.registry | trimSuffix "/") $i.repository ($i.tag | default (regexFind "^v?[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version)) -}}
{{- end }}

{{/* The minor of Kubernetes whose divvy-scheduler runs: that of the values, else the
cluster's, or the one below, which Kubernetes allows; nothing where there is none. */}}
{{- define "divvy.scheduler.minor" -}}
{{- $built := list "1.35" "1.36" "1.37" -}}
{{- $minor := int (semver .Capabilities.KubeVersion.Version).Minor -}}
{{- if .Values.scheduler.minor -}}
{{- .Values.scheduler.minor -}}
{{- else if has (printf "1.%d" $minor) $built -}}
1.{{ $minor }}
{{- else if has (printf "1.%d" (sub $minor 1)) $built -}}
1.{{ sub $minor 1 }}
{{- end -}}
{{- end }}

{{/* "true" where divvy-scheduler runs, nothing where kube-scheduler and the extender do. */}}
{{- define "divvy.scheduler.plugin" -}}
{{- if eq .Values.scheduler.mode "dedicated" -}}
{{- $minor := include "divvy.scheduler.minor" . -}}
{{- if and (eq .Values.scheduler.form "plugin") (not $minor) -}}
{{- fail (printf "scheduler.form=plugin: there is no divvy-scheduler for Kubernetes %s, only for 1.35, 1.36 and 1.37, and each also serves the minor after it; set scheduler.form=extender, or scheduler.minor if the cluster is of another version" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and $minor (has .Values.scheduler.form (list "auto" "plugin")) -}}true{{- end -}}
{{- end -}}
{{- end }}

{{/* "true" where kube-scheduler is configured on its node, or replaced there. */}}
{{- define "divvy.scheduler.wired" -}}
{{- if has .Values.scheduler.mode (list "extender" "replace") -}}true{{- end -}}
{{- end }}

{{/* The image of divvy-scheduler that takes the place of kube-scheduler: each node runs that of
its own kube-scheduler's minor, which stands for MINOR. */}}
{{- define "divvy.scheduler.replaceImage" -}}
{{- if not (include "divvy.scheduler.minor" .) -}}
{{- fail (printf "scheduler.mode=replace: there is no divvy-scheduler for Kubernetes %s, only for 1.35, 1.36 and 1.37, and each also serves the minor after it; set scheduler.mode=extender, or scheduler.minor if the cluster is of another version" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- $i := .Values.scheduler.pluginImage -}}
{{- include "divvy.image" (list . (dict "repository" (printf "%s-MINOR" $i.repository) "tag" $i.tag)) -}}
{{- end }}

{{/* The image of divvy-scheduler: one for each minor, all of one tag. */}}
{{- define "divvy.scheduler.pluginImage" -}}
{{- $i := .Values.scheduler.pluginImage -}}
{{- include "divvy.image" (list . (dict "repository" (printf "%s-%s" $i.repository (include "divvy.scheduler.minor" .)) "tag" $i.tag)) -}}
{{- end }}

{{/* The profile: the values', with the plugin where its program runs. The order matters at
two points. */}}
{{- define "divvy.scheduler.profile" -}}
{{- $profile := deepCopy .Values.scheduler.profile -}}
{{- if include "divvy.scheduler.plugin" . -}}
{{- $all := dict "disabled" (list (dict "name" "*")) -}}
{{- $postFilter := merge (dict "enabled" (list (dict "name" "Divvy") (dict "name" "DynamicResources") (dict "name" "DefaultPreemption"))) $all -}}
{{- $bind := merge (dict "enabled" (list (dict "name" "Divvy") (dict "name" "DefaultBinder"))) $all -}}
{{- $plugins := merge ($profile.plugins | default dict) (dict "postFilter" $postFilter "bind" $bind) -}}
{{- $multiPoint := $plugins.multiPoint | default dict -}}
{{- $multiPoint = set $multiPoint "enabled" (prepend ($multiPoint.enabled | default list) (dict "name" "Divvy" "weight" (include "divvy.extender.weight" . | int))) -}}
{{- $profile = set $profile "plugins" (set $plugins "multiPoint" $multiPoint) -}}
{{- end -}}
{{- with $profile }}{{ toYaml . }}{{ end -}}
{{- end }}

{{/* true where kube-scheduler has /livez and /readyz, else false. */}}
{{- define "divvy.scheduler.probes" -}}
{{- semverCompare ">=1.33-0" .Capabilities.KubeVersion.Version -}}
{{- end }}

{{/* The configuration of the scheduler. It reaches the API server as its pod does. */}}
{{- define "divvy.scheduler.config" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
{{- if include "divvy.scheduler.plugin" . }}
# The program elects by itself.
leaderElection:
  leaderElect: false
{{- else }}
leaderElection:
  leaderElect: true
  resourceLock: leases
  resourceNamespace: {{ .Release.Namespace }}
  resourceName: divvy-scheduler
{{- end }}
profiles:
- schedulerName: {{ .Values.scheduler.name }}
{{- with include "divvy.scheduler.profile" . }}
{{ . | indent 2 }}
{{- end }}
{{- if not (include "divvy.scheduler.plugin" .) }}
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
{{- end }}
