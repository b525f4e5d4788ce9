{{/* The annotations of a hook of "helm uninstall"; (list "pre-delete" "-10"). The last
makes helm print the logs of the Jobs; an older one ignores it. */}}
{{- define "divvy.uninstall.hook" -}}
helm.sh/hook: {{ index . 0 }}
helm.sh/hook-weight: {{ index . 1 | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
helm.sh/hook-output-log-policy: hook-succeeded,hook-failed
{{- end }}

{{/* What there is to take away, as JSON. */}}
{{- define "divvy.uninstall" -}}
{{- $memory := include "divvy.memoryResources" . -}}
{{- $dedicated := and $memory (eq .Values.scheduler.mode "dedicated") -}}
{{- $scheduler := and $memory (include "divvy.scheduler.wired" .) -}}
{{- $mutating := list -}}
{{- $validating := list -}}
{{- $daemonsets := list -}}
{{- $deployments := list -}}
{{- /* Also the one of another scheduler.mode, of before an upgrade. */ -}}
{{- $leases := list "divvy-extender" "divvy-scheduler" -}}
{{- $hooks := list "divvy-uninstall-node" -}}
{{- if include "divvy.local" . -}}
{{- $daemonsets = append $daemonsets "divvy-node" -}}
{{- if include "divvy.node.cooperative" . -}}
{{- $daemonsets = append $daemonsets "divvy-mps" -}}
{{- end -}}
{{- end -}}
{{- if $scheduler -}}
{{- $daemonsets = append $daemonsets "divvy-schedconf" -}}
{{- $hooks = append $hooks "divvy-uninstall-scheduler" -}}
{{- end -}}
{{- if $memory -}}
{{- $validating = append $validating "divvy-config" -}}
{{- $deployments = append $deployments (ternary "divvy-scheduler" "divvy-extender" (not (not $dedicated))) -}}
{{- end -}}
{{- if $dedicated -}}
{{- $mutating = append $mutating "divvy-scheduler" -}}
{{- end -}}
{{- if .Values.claims.admission.enabled -}}
{{- $mutating = append $mutating "divvy-claims" -}}
{{- end -}}
{{- $namespaces := dict -}}
{{- if .Values.pool.enabled -}}
{{- $mutating = append $mutating "bwki-webhook-cfg" -}}
{{- $validating = append $validating "validation.bitfusion.io-cfg" -}}
{{- $daemonsets = append $daemonsets "bitfusion-device-plugin" -}}
{{- if eq .Values.pool.namespace .Release.Namespace -}}
{{- $deployments = append $deployments "bitfusion-webhook-deployment" -}}
{{- else -}}
{{- $namespaces = set $namespaces .Values.pool.namespace (dict "deployments" (list "bitfusion-webhook-deployment")) -}}
{{- end -}}
{{- end -}}
{{- $namespaces = set $namespaces .Release.Namespace (dict "hooks" $hooks "daemonsets" $daemonsets "deployments" $deployments "leases" $leases) -}}
{{- $counts := list -}}
{{- range include "divvy.resources" . | fromJsonArray -}}
{{- $counts = append $counts .countResource -}}
{{- end -}}
{{- dict "scheduler" (not (not $scheduler)) "mutating" $mutating "validating" $validating "namespaces" $namespaces "counts" ($counts | compact | uniq) | toJson -}}
{{- end }}

{{/* The resources that kubelet was offered, joined by commas. Of files that are not
Divvy's the chart does not know the names, so those that vendors' plugins use are
among them: what somebody else offers by then is left. */}}
{{- define "divvy.uninstall.resources" -}}
{{- $names := list -}}
{{- $foreign := or .Values.node.existingConfigMap .Values.node.ixConfigMap -}}
{{- range include "divvy.resources" . | fromJsonArray -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range include "divvy.node.configs" . | fromJson -}}
{{- $foreign = or $foreign (ne (toString (fromYaml .).kind) "NodeConfig") -}}
{{- end -}}
{{- if $foreign -}}
{{- $names = concat $names (list "nvidia.com/gpu" "nvidia.com/gpu.shared" "iluvatar.com/gpu") -}}
{{- end -}}
{{- $names = concat $names .Values.extender.managedResources .Values.uninstall.moreResources -}}
{{- if .Values.pool.enabled -}}
{{- $names = append $names "bitfusion.io/gpu" -}}
{{- end -}}
{{- $names | uniq | join "," -}}
{{- end }}

{{/* The affinity of the pods that clean hosts: where the daemon may run, and where it
has left labels that it alone writes, because it ran there once. */}}
{{- define "divvy.uninstall.affinity" -}}
{{- $chosen := list -}}
{{- range $key, $value := include "divvy.node.selector" . | fromJson -}}
{{- $chosen = append $chosen (dict "key" $key "operator" "In" "values" (list $value)) -}}
{{- end -}}
{{- $affinity := include "divvy.node.affinity" . | fromYaml -}}
{{- $terms := list -}}
{{- range $affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms -}}
{{- $terms = append $terms (set (deepCopy .) "matchExpressions" (concat $chosen .matchExpressions)) -}}
{{- end -}}
{{- range include "divvy.vendorTable" . | fromJsonArray -}}
{{- $terms = append $terms (dict "matchExpressions" (list (dict "key" (printf "divvy.dev/%s.present" .name) "operator" "Exists"))) -}}
{{- end -}}
{{- dict "nodeAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms)) | toYaml -}}
{{- end }}

{{/* What the pods that clean hosts have in common. */}}
{{- define "divvy.uninstall.nodePod" -}}
serviceAccountName: divvy-uninstall-node
# It speaks to nobody.
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 5
{{- with .Values.node.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
# Wherever anything of Divvy may have run.
tolerations:
- operator: Exists
securityContext:
  # The files belong to root.
  runAsUser: 0
  runAsGroup: 0
  seccompProfile:
    type: RuntimeDefault
  # As the daemon's, whose files they are.
  seLinuxOptions:
    type: spc_t
{{- end }}

{{/* And their container. */}}
{{- define "divvy.uninstall.nodeContainer" -}}
image: {{ include "divvy.image" (list . .Values.node.image) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- range $probe, $settings := dict "startupProbe" (list "/healthz" 1 60) "livenessProbe" (list "/healthz" 10 3) "readinessProbe" (list "/readyz" 1 3) }}
{{ $probe }}:
  httpGet:
    path: {{ index $settings 0 }}
    port: 9404
  periodSeconds: {{ index $settings 1 }}
  timeoutSeconds: 3
  failureThreshold: {{ index $settings 2 }}
{{- end }}
resources:
  {{- toYaml .Values.uninstall.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
terminationMessagePolicy: FallbackToLogsOnError
volumeMounts:
- name: host
  mountPath: /host
{{- end }}

{{/* What the pods of the Jobs have in common. */}}
{{- define "divvy.uninstall.jobPod" -}}
serviceAccountName: divvy-uninstall
automountServiceAccountToken: true
enableServiceLinks: false
restartPolicy: Never
terminationGracePeriodSeconds: 5
{{- with .Values.extender.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.extender.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.extender.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsUser: 65532
  runAsGroup: 65532
  runAsNonRoot: true
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/* And their container. */}}
{{- define "divvy.uninstall.jobContainer" -}}
image: {{ include "divvy.image" (list . .Values.extender.image) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
resources:
  {{- toYaml .Values.uninstall.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
terminationMessagePolicy: FallbackToLogsOnError
{{- end }}
