{{- define "starling.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "starling.labels" -}}
app.kubernetes.io/name: starling
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Labels by which one component's pods are found: dict "root" . "component" NAME */}}
{{- define "starling.selector" -}}
app.kubernetes.io/name: starling
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "starling.store" -}}
{{- if .Values.store }}{{ .Values.store }}
{{- else if .Values.etcd.enabled }}etcd://{{ .Release.Name }}-etcd:2379
{{- else }}{{ fail "set store to the address of your etcd, as etcd://HOST:2379, or etcd.enabled to true" }}
{{- end }}
{{- end }}

{{- define "starling.blobs" -}}
{{- if .Values.blobsClaim }}/blobs
{{- else }}{{ required "set blobs to the store of published models, as s3://BUCKET/PREFIX, or blobsClaim" .Values.blobs }}
{{- end }}
{{- end }}

{{- define "starling.tokenSecret" -}}
{{ .Values.token.existingSecret | default (printf "%s-token" .Release.Name) }}
{{- end }}

{{- define "starling.config" -}}
{{- $fleet := dict "store" (include "starling.store" .) "token" "/run/starling/fleet-token" "blobs" (include "starling.blobs" .) }}
{{- $agent := dict "port" (int .Values.agent.port) }}
{{- if .Values.agent.signedUrls }}{{ $agent = set $agent "signed_urls" true }}{{ end }}
{{- $fleet = set $fleet "agent" $agent }}
{{- $fleet = set $fleet "orchestrator" (dict "host" .Values.orchestrator.host "port" (int .Values.orchestrator.port)) }}
{{- toYaml (mergeOverwrite (dict "fleet" $fleet "logging" (dict "format" "json")) (deepCopy .Values.config)) }}
{{- end }}

{{- define "starling.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "starling.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Secrets are mounted with an owner and a mode that a private key may not have: the token becomes a file of this user. */}}
{{- define "starling.tokenInit" -}}
- name: token
  image: {{ include "starling.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [install, -m, "600", /secrets/fleet-token, /run/starling/fleet-token]
  securityContext:
    {{- include "starling.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {cpu: 10m, memory: 64Mi}
  volumeMounts:
    - {name: secret, mountPath: /secrets, readOnly: true}
    - {name: run, mountPath: /run/starling}
{{- end }}

{{- define "starling.mounts" -}}
- {name: config, mountPath: /etc/starling, readOnly: true}
- {name: run, mountPath: /run/starling}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /var/lib/starling}
{{- if .Values.blobsClaim }}
- {name: blobs, mountPath: /blobs, readOnly: true}
{{- end }}
{{- end }}

{{- define "starling.volumes" -}}
- name: config
  configMap:
    name: {{ .Release.Name }}-config
- name: secret
  secret:
    secretName: {{ include "starling.tokenSecret" . }}
    items: [{key: fleet-token, path: fleet-token}]
- name: run
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- if .Values.blobsClaim }}
- name: blobs
  persistentVolumeClaim:
    claimName: {{ .Values.blobsClaim }}
    readOnly: true
{{- end }}
{{- end }}

{{- define "starling.environment" -}}
- {name: STARLING_HOME, value: /var/lib/starling}
- {name: STARLING_CONFIG, value: /etc/starling/fleet.yaml}
{{- end }}
