{{/* What shows metrics and can be reached, as a JSON list: name (of the pods, see
divvy.selector), namespace, port and node, true where a target stands for a node. */}}
{{- define "divvy.metrics.parts" -}}
{{- $parts := list -}}
{{- if include "divvy.local" . -}}
{{- $parts = append $parts (dict "name" "divvy-node" "namespace" .Release.Namespace "port" 9400 "node" true) -}}
{{- end -}}
{{- if include "divvy.memoryResources" . -}}
{{- if not (has .Values.extender.listenAddress (list "127.0.0.1" "::1")) -}}
{{- $parts = append $parts (dict "name" (include "divvy.extender.account" .) "namespace" .Release.Namespace "port" 9401 "node" false) -}}
{{- end -}}
{{- if and (include "divvy.scheduler.wired" .) (not (has .Values.schedconf.listenAddress (list "127.0.0.1" "::1"))) -}}
{{- $parts = append $parts (dict "name" "divvy-schedconf" "namespace" .Release.Namespace "port" 9402 "node" true) -}}
{{- end -}}
{{- end -}}
{{- if .Values.pool.enabled -}}
{{- $parts = append $parts (dict "name" "bitfusion-device-plugin" "namespace" .Release.Namespace "port" 9402 "node" true) -}}
{{- $parts = append $parts (dict "name" "bitfusion-webhook" "namespace" .Values.pool.namespace "port" 9403 "node" false) -}}
{{- end -}}
{{- $parts | toJson -}}
{{- end }}
