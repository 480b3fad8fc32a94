{{- define "tuneship.labels" -}}
app.kubernetes.io/name: tuneship
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "tuneship.selector" -}}
app.kubernetes.io/name: tuneship
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* What every pod has in common: no root, no rights, no token of Kubernetes. */ -}}
{{- define "tuneship.pod" -}}
{{- with .Values.serviceAccount }}
serviceAccountName: {{ . }}
{{- end }}
automountServiceAccountToken: {{ ne .Values.serviceAccount "" }}
enableServiceLinks: false
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- /* KubeRay replaces the image's entrypoint, so the pod's own first process reaps: a raylet that is dead but not reaped
leaves its programs running. */ -}}
{{- define "tuneship.reaps" -}}
shareProcessNamespace: true
{{- end -}}

{{- define "tuneship.container" -}}
imagePullPolicy: {{ .Values.images.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: { drop: [ALL] }
{{- end -}}

{{- define "tuneship.modelMount" -}}
{{- if .Values.models.claim }}
- { name: models, mountPath: {{ .Values.models.path }}, readOnly: true }
{{- end }}
{{- end -}}

{{- define "tuneship.modelVolume" -}}
{{- if .Values.models.claim }}
- name: models
  persistentVolumeClaim: { claimName: {{ .Values.models.claim }}, readOnly: true }
{{- end }}
{{- end -}}

{{- define "tuneship.rayToken" -}}
- { name: RAY_AUTH_MODE, value: token }
- name: RAY_AUTH_TOKEN
  valueFrom: { secretKeyRef: { name: {{ .Values.secrets.rayToken.name }}, key: {{ .Values.secrets.rayToken.key }} } }
{{- end -}}
