{{- define "securevfl.labels" -}}
app.kubernetes.io/name: securevfl
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "securevfl.args" -}}
{{- if and .Values.serve .Values.listen -}}
- serve
- runs/{{ .Values.run }}
- --host=0.0.0.0
- --port=8080
{{- else -}}
- party
- /given/federation.toml
- --name={{ .Values.party }}
- --out=runs/{{ .Values.run }}
{{- if .Values.serve }}
- --serve
{{- end }}
{{- end }}
- --identity=/identity
- --data-root=/kit
{{- with .Values.listen }}
- --listen=0.0.0.0:{{ . }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "securevfl.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "securevfl.pod" -}}
metadata:
  labels:
    {{- include "securevfl.labels" . | nindent 4 }}
spec:
  restartPolicy: {{ ternary "Always" "Never" .Values.serve }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  initContainers:
    # A Secret's files are root's, and the group may read them; a key is read by its owner alone.
    - name: identity
      {{- include "securevfl.container" . | nindent 6 }}
      command:
        - sh
        - -ec
        - |
          umask 077
          mkdir -p /identity/trust
          cp -f /given/*.pem /identity/trust
          mv -f /identity/trust/identity.pem /identity
          cp -f /given/identity.key /identity
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      volumeMounts:
        - {name: given, mountPath: /given, readOnly: true}
        - {name: identity, mountPath: /identity}
  containers:
    - name: party
      {{- include "securevfl.container" . | nindent 6 }}
      args:
        {{- include "securevfl.args" . | nindent 8 }}
      workingDir: /kit
      {{- if .Values.listen }}
      ports:
        - {name: parties, containerPort: {{ .Values.listen }}}
        {{- if .Values.serve }}
        - {name: http, containerPort: 8080}
        {{- end }}
      {{- if .Values.serve }}
      readinessProbe:
        httpGet: {path: /ready, port: http}
      livenessProbe:
        httpGet: {path: /health, port: http}
        initialDelaySeconds: 60
      {{- end }}
      {{- end }}
      resources:
        {{- toYaml .Values.resources | nindent 8 }}
      volumeMounts:
        - {name: given, mountPath: /given, readOnly: true}
        - {name: identity, mountPath: /identity, readOnly: true}
        - {name: data, mountPath: /kit}
        - {name: tmp, mountPath: /tmp}
  volumes:
    - name: given
      secret: {secretName: {{ .Values.kit | default (printf "%s-kit" .Release.Name) }}, defaultMode: 0440}
    - name: data
      persistentVolumeClaim: {claimName: {{ .Values.claim | default (printf "%s-data" .Release.Name) }}}
    - name: identity
      emptyDir: {medium: Memory, sizeLimit: 1Mi}
    - name: tmp
      emptyDir: {}
{{- end }}
