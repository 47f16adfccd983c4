{{- define "slipstream.labels" -}}
app.kubernetes.io/name: slipstream
app.kubernetes.io/instance: {{ .run }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- /* Kubernetes adds letters to the names of pods, which may have 63. */}}
{{- define "slipstream.check" -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "the release's name is the run's, of small letters, digits and '-', a letter first; got %s" .Release.Name) -}}
{{- end -}}
{{- if gt (len .Release.Name) 31 -}}
{{- fail (printf "the release's name is the run's, of at most 31 letters; got %s" .Release.Name) -}}
{{- end -}}
{{- if not .Values.config -}}
{{- fail "config is the text of the run's settings: --set-file config=run.toml" -}}
{{- end -}}
{{- if and (or .Values.metrics.monitor .Values.scaling.enabled) (not .Values.metrics.port) -}}
{{- fail "metrics.monitor and scaling.enabled need metrics.port" -}}
{{- end -}}
{{- end }}

{{- define "slipstream.unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]{{ with .capabilities }}, add: {{ toJson . }}{{ end }}}
{{- end }}

{{- /* Refuses what the chart sets itself: a second value would replace the first without a word. */}}
{{- define "slipstream.checkOwn" -}}
{{- $reserved := list "containers" "initContainers" "volumes" "restartPolicy" "terminationGracePeriodSeconds" "automountServiceAccountToken" "enableServiceLinks" "shareProcessNamespace" "imagePullSecrets" "nodeSelector" "tolerations" "securityContext" "hostname" "subdomain" -}}
{{- range $name, $_ := .own.podSpec -}}
{{- if has $name $reserved -}}
{{- fail (printf "%s.podSpec.%s is set by the chart, by a value of its own if there is one" $.section $name) -}}
{{- end -}}
{{- end -}}
{{- $volumes := list "config" "secrets" "code" "models" "runs" "cache" "tmp" "shm" -}}
{{- range .own.volumes -}}
{{- if has .name $volumes -}}
{{- fail (printf "%s.volumes has %s, which is the name of a volume of the chart" $.section .name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* The only container of a learner's pod (role learner or learner-node) or of a rollout server's. */}}
{{- define "slipstream.pod" -}}
{{- $run := .root.Release.Name -}}
{{- $values := .root.Values -}}
{{- $isServer := eq .role "rollout-server" -}}
{{- $isFirst := eq .role "learner" -}}
{{- $own := ternary $values.rolloutServer $values.learner $isServer -}}
{{- $host := printf "%s-learner-0-0.%s" $run $run -}}
{{- $port := int $values.metrics.port -}}
{{- include "slipstream.checkOwn" (dict "own" $own "section" (ternary "rolloutServer" "learner" $isServer)) -}}
restartPolicy: {{ ternary "Always" "Never" $isServer }}
# Between SIGTERM and SIGKILL, when the pod is deleted, evicted or preempted.
terminationGracePeriodSeconds: {{ $own.graceSeconds }}
automountServiceAccountToken: false
enableServiceLinks: false
# The pod's first process takes in what a dead process leaves.
shareProcessNamespace: true
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.podSpec }}
{{- toYaml . | nindent 0 }}
{{- if and .hostNetwork (not .dnsPolicy) }}
# The cluster's names, also from the host's network.
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- if not $isServer }}
initContainers:
  # The learner's first pod has a name once it is there.
  - name: name
    image: {{ $values.image }}
    imagePullPolicy: {{ $values.imagePullPolicy }}
    command: [sh, -c, "until getent hosts {{ $host }}; do sleep 1; done"]
    resources:
      requests: {cpu: 10m, memory: 32Mi}
      limits: {memory: 32Mi}
    securityContext:
      {{- include "slipstream.unprivileged" . | nindent 6 }}
{{- end }}
containers:
  - name: {{ .role }}
    image: {{ $values.image }}
    imagePullPolicy: {{ $values.imagePullPolicy }}
    command:
      - slipstream
      - {{ ternary "rollout-server" "learner" $isServer }}
      - /etc/slipstream/config.toml
      - run.name={{ $run }}
      - run.dir=/runs
      {{- if $isServer }}
      - --controller=$(CONTROLLER_ADDRESS)
      - --server-id=$(SERVER_ID)
      {{- else }}
      - controller.address=$(CONTROLLER_ADDRESS)
      - --master={{ $host }}:29500
      - --node-rank=$(NODE_RANK)
      {{- end }}
      {{- if or $isServer $isFirst }}
      # Learner, queue and servers start in any order.
      - --connect-timeout-s=3600
      {{- end }}
      - security.tls_ca=/run/slipstream/ca.pem
      - security.token_file=/run/slipstream/token
      {{- if $isFirst }}
      - security.tls_certificate=/run/slipstream/server.pem
      - security.tls_key=/run/slipstream/server.key
      {{- end }}
      {{- if $values.valkey.enabled }}
      - queue.kind=redis
      - queue.redis_url=rediss://{{ $run }}-queue:6380/0?ssl_ca_certs=/run/slipstream/ca.pem
      {{- end }}
      {{- if and $values.valkey.enabled $isFirst }}
      - queue.controller.user=controller
      - queue.controller.password_file=/run/slipstream/redis_controller_password
      {{- end }}
      {{- if and $values.valkey.enabled $isServer }}
      - queue.rollout_server.user=rollout
      - queue.rollout_server.password_file=/run/slipstream/redis_rollout_password
      {{- end }}
      {{- if and $port $isFirst }}
      - tracking.prometheus=$(HOST_ADDRESS):{{ $port }}
      - security.metrics_token_file=/run/slipstream/metrics_token
      {{- else if $port }}
      # Only the learner's first pod has a certificate for callers from other hosts.
      - tracking.prometheus=127.0.0.1:{{ $port }}
      {{- end }}
      {{- range $values.settings }}
      - {{ . | quote }}
      {{- end }}
    workingDir: /environments
    env:
      # For commands in the pod.
      - {name: CONTROLLER_ADDRESS, value: "{{ $host }}:7070"}
      - name: HOST_ADDRESS
        valueFrom: {fieldRef: {fieldPath: status.podIP}}
      {{- if $isServer }}
      - name: SERVER_ID
        valueFrom: {fieldRef: {fieldPath: metadata.name}}
      {{- else }}
      - name: NODE_RANK
        valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/job-global-index']"}}
      {{- end }}
      {{- with $own.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- if and $port $isFirst }}
    ports:
      - {name: controller, containerPort: {{ $port }}}
    {{- end }}
    resources:
      {{- toYaml $own.resources | nindent 6 }}
    securityContext:
      {{- include "slipstream.unprivileged" $own | nindent 6 }}
    {{- $status := "slipstream status --controller=$CONTROLLER_ADDRESS --token-file=/run/slipstream/token --tls-ca=/run/slipstream/ca.pem" }}
    {{- if $isFirst }}
    readinessProbe:
      exec: {command: [sh, -c, "exec {{ $status }}"]}
      periodSeconds: 15
      timeoutSeconds: 20
    {{- else if $isServer }}
    readinessProbe:
      exec: &health {command: [sh, -c, 'exec {{ $status }} --server-id="$SERVER_ID"']}
      periodSeconds: 15
      timeoutSeconds: 20
    # It may wait an hour for the learner before it loads.
    startupProbe:
      exec: *health
      periodSeconds: 10
      timeoutSeconds: 20
      failureThreshold: 420
    # Without its controller a server ends by itself.
    livenessProbe:
      exec: *health
      periodSeconds: 30
      timeoutSeconds: 20
      failureThreshold: 10
    {{- end }}
    volumeMounts:
      - {name: config, mountPath: /etc/slipstream, readOnly: true}
      - {name: secrets, mountPath: /run/slipstream, readOnly: true}
      - {name: code, mountPath: /environments, readOnly: true}
      - {name: models, mountPath: /models, readOnly: true}
      - {name: runs, mountPath: /runs}
      - {name: cache, mountPath: /cache}
      - {name: tmp, mountPath: /tmp}
      - {name: shm, mountPath: /dev/shm}
      {{- with $own.volumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  - name: config
    configMap: {name: {{ $run }}-config}
  - name: secrets
    secret: {secretName: {{ $run }}-{{ .role }}, defaultMode: 0440}
  - name: code
    {{- $values.code | default (dict "emptyDir" dict) | toYaml | nindent 4 }}
  - name: models
    {{- $values.models | default (dict "emptyDir" dict) | toYaml | nindent 4 }}
  - name: runs
    {{- if $isServer }}
    emptyDir: {}
    {{- else }}
    persistentVolumeClaim: {claimName: {{ $run }}-runs}
    {{- end }}
  - name: cache
    {{- $own.cache | default (dict "emptyDir" dict) | toYaml | nindent 4 }}
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $own.sharedMemory }}}
  {{- with $own.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
