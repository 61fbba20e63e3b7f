{{- define "moored.name" -}}
{{- .Values.nameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "moored.labels" -}}
app.kubernetes.io/name: moored
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "moored.selector" -}}
app.kubernetes.io/name: moored
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The most boxes that there may be: the proxy knows all of them by name, and asks the name service which are there. */}}
{{- define "moored.boxes" -}}
{{- if .Values.autoscaling.enabled }}{{ .Values.autoscaling.maxReplicas }}{{ else }}{{ .Values.boxes.replicas }}{{ end -}}
{{- end -}}

{{- define "moored.proxyConfiguration" -}}
{{- $name := include "moored.name" . -}}
{{- $domain := printf "%s-boxes.%s.svc.cluster.local" $name .Release.Namespace -}}
{{- $count := int (include "moored.boxes" .) -}}
{{- if eq .Values.proxy.kind "haproxy" -}}
{{- $jobs := list -}}
{{- $others := list -}}
{{- range $number := until $count -}}
{{- $server := printf "    server %s-%d %s-%d.%s:50051 proto h2 resolvers cluster init-addr none" $name $number $name $number $domain -}}
{{- $jobs = append $jobs (printf "%s check-proto h1" $server) -}}
{{- $others = append $others (printf "%s track boxes/%s-%d" $server $name $number) -}}
{{- end -}}
{{- $file := regexReplaceAll "(?m)^    # With TLS at the boxes.*\n" (.Files.Get "files/haproxy.cfg") "" -}}
{{- $file = regexReplaceAll "(?m)(^    server .* check-proto h1\n)+" $file (printf "%s\n" (join "\n" $jobs)) -}}
{{- regexReplaceAll "(?m)(^    server .* track boxes/[a-z]\n)+" $file (printf "%s\n" (join "\n" $others)) }}
resolvers cluster
    parse-resolv-conf
    accepted_payload_size 8192
    hold valid 2s
    hold obsolete 0s
{{- else -}}
{{- $envoy := .Files.Get "files/envoy.yaml" | fromYaml -}}
{{- $listener := index $envoy.static_resources.listeners 0 -}}
{{- $_ := set $listener "address" (dict "socket_address" (dict "address" "0.0.0.0" "port_value" 50050)) -}}
{{- $_ := set $envoy.admin "address" (dict "socket_address" (dict "address" "127.0.0.1" "port_value" 9901)) -}}
{{- $endpoints := list -}}
{{- range $number := until $count -}}
{{- $host := printf "%s-%d" $name $number -}}
{{- $address := dict "socket_address" (dict "address" (printf "%s.%s" $host $domain) "port_value" 50051) -}}
{{- $endpoints = append $endpoints (dict "endpoint" (dict "hostname" $host "address" $address)) -}}
{{- end -}}
{{- $cluster := index $envoy.static_resources.clusters 0 -}}
{{- $_ := set $cluster "dns_refresh_rate" "2s" -}}
{{- $_ := set $cluster "respect_dns_ttl" false -}}
{{- $_ := set $cluster.load_assignment "endpoints" (list (dict "lb_endpoints" $endpoints)) -}}
{{ $envoy | toYaml }}
{{- end -}}
{{- end -}}
