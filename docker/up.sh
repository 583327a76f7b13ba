#!/usr/bin/env bash
# Starts a job's containers, follows their logs, and ends with rank 0's exit code: docker/up.sh PROFILE RANK0
set -euo pipefail
profile=$1 first=$2
compose=(docker compose --profile "$profile")
since=$(date -u +%Y-%m-%dT%H:%M:%SZ)

"${compose[@]}" up --detach --no-build
"${compose[@]}" logs --follow --since "$since" &
logs=$!
trap 'kill $logs 2>/dev/null || true' EXIT
trap 'echo "rolecall: the containers keep running: make logs, make ps-status, make stop, make down"; exit 130' INT TERM

rank0=$("${compose[@]}" ps --all --quiet "$first")
while code=$(docker wait "$rank0"); do
  # finished, bad input, failed for good: ends here, although the engine would restart the latter two
  case $code in 0 | 2 | 3) break ;; esac
  [ "$(docker inspect --format '{{.State.Status}}' "$rank0")" = exited ] && break
done
if [ "$code" = 0 ]; then
  # the others receive it, and the logs end with the last of them
  timeout 60 tail --pid="$logs" --follow /dev/null || true
else
  "${compose[@]}" stop
fi
exit "${code:-1}" # none: the container was deleted meanwhile
