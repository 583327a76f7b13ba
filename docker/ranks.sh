#!/usr/bin/env bash
# Reads every running rank of this project: docker/ranks.sh metrics | status | addresses (of their metrics) | page (its URL)
# Examines those of one profile, also where they have ended: docker/ranks.sh doctor PROFILE
set -euo pipefail

# without Prometheus and Grafana
ranks() {
  local watchers
  watchers=" $(docker compose --profile monitoring config --services | tr '\n' ' ')"
  docker compose --profile '*' ps --format '{{.Service}} {{.ID}} {{.Name}}' |
    awk -v watchers="$watchers" '!index(watchers, " " $1 " ") { print $2, $3 }' | sort -k2
}
ask() { docker exec "$1" python -m rolecall.observe.probe /metrics; }

case ${1:-} in
  metrics)
    ranks | while read -r id name; do
      echo "# ======== $name"
      ask "$id" </dev/null || true # the probe says what is wrong
    done
    ;;
  addresses)
    # on the network `metrics`: the host reaches it, although it is internal
    ranks | while read -r id name; do
      docker inspect --format '{{range $name, $net := .NetworkSettings.Networks}}{{$name}} {{$net.IPAddress}}{{"\n"}}{{end}}' \
        "$id" </dev/null | awk '$1 ~ /_metrics$/ && $2 { print $2 ":8000" }'
    done
    ;;
  page)
    # rank 0 serves it; the others answer where it is, with an error
    "$0" addresses | while read -r address; do
      if curl --silent --fail --max-time 5 --output /dev/null "http://$address/"; then echo "http://$address/"; fi
    done
    ;;
  status)
    docker compose --profile '*' ps --all --format 'table {{.Name}}\t{{.Service}}\t{{.Status}}'
    echo
    printf '%-28s %-10s %-8s %-9s %-11s %s\n' CONTAINER ROLE ORDINAL WORKER GENERATION STEP
    ranks | while read -r id name; do
      ask "$id" </dev/null | awk -v name="$name" '
        /^rolecall_rank_info/ { split($0, part, "\""); for (i = 1; i in part; i++) {
          if (part[i] ~ /role=$/) role = part[i + 1]; if (part[i] ~ /ordinal=$/) ordinal = part[i + 1] } }
        /^rolecall_worker_state.* 1\.0$/ { split($0, part, "\""); state = part[2] }
        /^rolecall_generation / { generation = int($2) }
        /^rolecall_step / { step = int($2) }
        END { printf "%-28s %-10s %-8s %-9s %-11s %s\n", name, role, ordinal, state, generation, step }' || true
    done
    ;;
  doctor)
    profile=${2:?a profile} worst=0 ended=''
    compose=(docker compose --profile "$profile")
    containers=$("${compose[@]}" ps --all --format '{{.Service}} {{.State}} {{.ID}} {{.Name}}' | sort -k4)
    [ -n "$containers" ] || { echo "rolecall: there is no container of $profile: make up-$profile" >&2; exit 2; }
    while read -r service state id name; do
      echo "# ======== $name"
      code=0
      case $state in
        running) docker exec "$id" python -m rolecall doctor </dev/null || code=$? ;;
        *)
          # in a container like it, once for all of the service: those that have ended cannot be entered
          case " $ended " in *" $service "*) echo "as above: $state" && continue ;; esac
          ended+=" $service"
          "${compose[@]}" run --rm --no-deps --no-TTY --use-aliases "$service" doctor </dev/null || code=$?
          ;;
      esac
      [ "$code" -le "$worst" ] || worst=$code
    done <<<"$containers"
    exit "$worst"
    ;;
  *)
    echo "usage: docker/ranks.sh metrics|status|addresses|page|doctor PROFILE" >&2
    exit 2
    ;;
esac
