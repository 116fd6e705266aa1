{{/* What all pods have in common. Arguments of a template are (dict "root" $ "of" "node"). */}}

{{- define "moonpool.standby" -}}{{ if .Values.master.standby }}a b{{ else }}a{{ end }}{{- end }}

{{- define "moonpool.masters" -}}
{{- $names := list -}}
{{- range splitList " " (include "moonpool.standby" .) -}}
{{- $names = append $names (printf "%s-master-%s:7700" $.Release.Name . | quote) -}}
{{- end -}}
{{- join ", " $names -}}
{{- end }}

{{- define "moonpool.toml" -}}{{ tpl (.Files.Get "moonpool.toml") . }}{{- end }}

{{- define "moonpool.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Nodes of several releases may run on one host, each with a folder of its own. */}}
{{- define "moonpool.hostFolder" -}}
{{- $suffix := ternary "" (printf "-%s" .Release.Name) (eq .Release.Name "moonpool") -}}
{{ .Values.node.hostFolder | default (printf "/run/moonpool%s" $suffix) }}
{{- end }}

{{/* Pods start anew when the settings change. */}}
{{- define "moonpool.annotations" }}
{{- if not .Values.configMap }}
      annotations: {checksum/config: {{ include "moonpool.toml" . | sha256sum }}}
{{- end }}
{{- end }}

{{- define "moonpool.pod" -}}
{{- $values := index .root.Values .of -}}
serviceAccountName: {{ .root.Release.Name }}-{{ .of }}
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
{{- if or .root.Values.tls.secret (eq .of "proxy") }}
  fsGroup: 1000 # for the files of secrets
{{- end }}
{{- end }}

{{- define "moonpool.page" -}}
{{- $secret := ternary .root.Values.proxy.tlsSecret .root.Values.tls.secret (eq .of "proxy") -}}
path: {{ .path }}, port: http{{ if $secret }}, scheme: HTTPS{{ end }}
{{- end }}

{{- define "moonpool.mounts" -}}
- {name: config, mountPath: /etc/moonpool/config, readOnly: true}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /etc/moonpool/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "moonpool.environment" -}}
- name: MOONPOOL_CLUSTER_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: token}}
{{- if ne .of "proxy" }}
- name: MOONPOOL_CLUSTER_ADMIN_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: admin-token}}
{{- end }}
- name: MOONPOOL_RUNTIME_DIR
  value: /run/moonpool/{{ ternary "pool" "own" (eq .of "node") }}
{{- range $name, $value := .root.Values.settings }}
- name: MOONPOOL_{{ $name | replace "." "_" | upper }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "moonpool.container" -}}
startupProbe:
  httpGet: { {{- include "moonpool.page" (dict "root" .root "of" .of "path" "/livez") -}} }
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: { {{- include "moonpool.page" (dict "root" .root "of" .of "path" "/livez") -}} }
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 3
readinessProbe:
  httpGet: { {{- include "moonpool.page" (dict "root" .root "of" .of "path" "/readyz") -}} }
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: 2
resources: {{- toYaml (index .root.Values .of).resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: ["ALL"]}
{{- end }}

{{- define "moonpool.config" -}}
- name: config
  configMap: {name: {{ .Values.configMap | default .Release.Name }}}
{{- with .Values.tls.secret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}
