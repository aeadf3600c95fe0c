{{/* Prefix of every name: the release's name, followed by the chart's unless the release's name contains it. */}}
{{- define "ddpjob.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 54 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 54 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Name of the operator's objects; at most 63 characters. */}}
{{- define "ddpjob.operatorName" -}}
{{- include "ddpjob.fullname" . }}-operator
{{- end }}

{{/* Labels of the Deployment's selector; must never change between versions. */}}
{{- define "ddpjob.selectorLabels" -}}
app.kubernetes.io/name: ddpjob
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{/* The same labels as KEY=VALUE,... */}}
{{- define "ddpjob.podLabels" -}}
{{- $labels := list -}}
{{- range $key, $value := include "ddpjob.selectorLabels" . | fromYaml }}
{{- $labels = append $labels (printf "%s=%s" $key $value) }}
{{- end -}}
{{- join "," $labels -}}
{{- end }}

{{- define "ddpjob.labels" -}}
{{ include "ddpjob.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "ddpjob.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- .Values.image.repository }}{{ ternary "@" ":" (hasPrefix "sha256:" $tag) }}{{ $tag }}
{{- end }}

{{/* The default repository names no registry and is not ours, so pulling it could run an unknown image. */}}
{{- define "ddpjob.pullPolicy" -}}
{{- .Values.image.pullPolicy | default (ternary "Never" "IfNotPresent" (eq .Values.image.repository "ddpjob/operator")) -}}
{{- end }}

{{/* Beside the operator's image, so that its name is not a stranger's. A digest is of one image only. */}}
{{- define "ddpjob.launcherImage" -}}
{{- $repository := printf "%s-trainer" .Values.image.repository -}}
{{- if hasSuffix "operator" .Values.image.repository -}}
{{- $repository = printf "%strainer" (trimSuffix "operator" .Values.image.repository) -}}
{{- end -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- .Values.operator.launcherImage | default (printf "%s:%s" $repository (ternary .Chart.AppVersion $tag (hasPrefix "sha256:" $tag))) -}}
{{- end }}

{{- define "ddpjob.launcherPullPolicy" -}}
{{- if and (not .Values.operator.launcherImage) (eq .Values.image.repository "ddpjob/operator") -}}
Never
{{- else -}}
{{- $isDefault := regexMatch "^ddpjob/trainer[:@]" (include "ddpjob.launcherImage" .) -}}
{{- .Values.image.pullPolicy | default (ternary "Never" "IfNotPresent" $isDefault) -}}
{{- end -}}
{{- end }}

{{/* JSON list of the namespaces to serve; empty means all of them. */}}
{{- define "ddpjob.namespaces" -}}
{{- $served := .Values.namespaces | default (list .Release.Namespace) -}}
{{- if eq .Values.scope "cluster" -}}
{{- with .Values.namespaces -}}
{{- fail (printf "namespaces=%s has no effect with scope=cluster, in which the operator serves every namespace. Set scope=namespace to serve these namespaces only, or leave namespaces out" (toJson .)) -}}
{{- end -}}
[]
{{- else if and (has .Release.Namespace $served) (not .Values.serveReleaseNamespace) -}}
{{- fail (printf "the release would serve its own namespace %s: who may create pods there can run them with the operator's account, which may create pods in every namespace that it serves (docs/concepts/security.md). Set namespaces to other namespaces, and install the release in a namespace of its own; or, if only administrators may create pods in %s, set serveReleaseNamespace=true" .Release.Namespace .Release.Namespace) -}}
{{- else -}}
{{- $served | toJson -}}
{{- end -}}
{{- end }}

{{/* Values that an earlier release did not have are absent after `helm upgrade --reuse-values`. */}}
{{- define "ddpjob.replicas" -}}
{{- .Values.replicas | default 1 | int -}}
{{- end }}

{{- define "ddpjob.readLogs" -}}
{{- ne (toString .Values.operator.readLogs) "false" -}}
{{- end }}

{{- define "ddpjob.kueue" -}}
{{- eq (toString (.Values.kueue | default dict).enabled) "true" -}}
{{- end }}

{{- define "ddpjob.gangScheduler" -}}
{{- (.Values.scheduling | default dict).gangScheduler | default "" -}}
{{- end }}

{{/* API group of the PodGroups of the gang scheduler; empty without one. */}}
{{- define "ddpjob.gangGroup" -}}
{{- $groups := dict "kubernetes" "scheduling.k8s.io" "volcano" "scheduling.volcano.sh" "coscheduling" "scheduling.x-k8s.io" -}}
{{- get $groups (include "ddpjob.gangScheduler" .) -}}
{{- end }}

{{/* The tolerations of the values, and of lost nodes for 30 s instead of Kubernetes' default of 300 s. */}}
{{- define "ddpjob.tolerations" -}}
{{- $given := .Values.tolerations -}}
{{- $keys := list -}}
{{- range $given }}{{- $keys = append $keys (.key | default "") }}{{- end -}}
{{- range list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" }}
{{- if not (has . $keys) }}
{{- $given = append $given (dict "key" . "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" 30) }}
{{- end }}
{{- end -}}
{{- toYaml $given -}}
{{- end }}

{{/* Security contexts that satisfy Pod Security "restricted". */}}
{{- define "ddpjob.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "ddpjob.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* What the pods of `helm test` have in common. */}}
{{- define "ddpjob.testPod" -}}
enableServiceLinks: false
securityContext:
  {{- include "ddpjob.podSecurityContext" . | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* All rights of the operator. docs/tasks/operations.md gives the use of each verb; tests/install checks the list. */}}
{{- define "ddpjob.rules" -}}
- apiGroups: [ddpjob.dev]
  resources: [ddpjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [ddpjob.dev]
  resources: [ddpjobs/status]
  verbs: [patch]
- apiGroups: [ddpjob.dev]
  resources: [ddpjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [create, delete, get, list, patch, watch]
{{- if eq (include "ddpjob.readLogs" .) "true" }}
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
{{- end }}
- apiGroups: [""]
  resources: [services]
  verbs: [create, get, list, patch, watch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [create, get, list]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if eq (include "ddpjob.kueue" .) "true" }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [create, get, list, patch, watch]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
{{- end }}
{{- with include "ddpjob.gangGroup" . }}
- apiGroups: [{{ . }}]
  resources: [podgroups]
  verbs: [create, delete, get, list, watch]
{{- end }}
{{- end }}
