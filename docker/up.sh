#!/usr/bin/env bash
# Starts a job's containers, follows their logs, and ends with rank 0's exit code: docker/up.sh PROFILE RANK0
# The profiles `job` and `script` run JOB_FILE and SCRIPT: a file of the host, whose folder is mounted, or a module of
# the image.
set -euo pipefail
profile=$1 first=$2 logs='' variables=''
compose=(docker compose --profile "$profile")
since=$(date -u +%Y-%m-%dT%H:%M:%SZ)
trap '[ -z "$logs" ] || kill "$logs" 2>/dev/null || true; [ -z "$variables" ] || rm -f "$variables"' EXIT

fail() {
  echo "rolecall: $*" >&2
  exit 2
}

# VARIABLE: sets `target`, what the containers are told of the user's file, and what compose needs to mount it
locate() {
  local given=${!1:-} file attribute=''
  file=$given
  case $given in *.py:*) file=${given%.py:*}.py attribute=:${given##*.py:} ;; esac
  case $file in
    */* | *.py)
      [ -f "$file" ] || fail "$1=$given: there is no such file"
      JOB_FOLDER=$(cd "$(dirname "$file")" && pwd)
      case $JOB_FOLDER in *:*) fail "$1=$given: a folder with a colon in its name cannot be mounted" ;; esac
      target=/$profile/$(basename "$file")$attribute
      JOB_NAME=$(basename "$file" .py)
      export JOB_FOLDER
      ;;
    ?*:*) target=$given attribute=:${given##*:} JOB_NAME=${given%:*} JOB_NAME=${JOB_NAME##*.} ;;
    ?*) target=$given JOB_NAME=${given##*.} ;;
    *) fail "$1 is missing: it names a file, such as ./pi.py" ;;
  esac
  # a folder for each job, named as the job is
  case $attribute in '' | :JOB) ;; *) JOB_NAME+=-${attribute#:} ;; esac
  export JOB_NAME=${JOB_NAME,,}
}

# ARGUMENTS: what `rolecall describe` prints in a container of the job
describe() {
  docker compose --progress quiet --profile "$profile" run --rm --no-deps --no-TTY "$first" describe "$@" </dev/null
}

case $profile in job) locate JOB_FILE ;; script) locate SCRIPT ;; esac
image=${IMAGE:-rolecall}:${TORCH:-cpu}
docker image inspect "$image" >/dev/null 2>&1 ||
  fail "there is no image $image: make image builds rolecall:cpu, and IMAGE= names one of your own"
"$(dirname "$0")/token.sh"
case $profile in
  job)
    export JOB_TARGET=$target
    # the names alone: compose takes the values from where it takes all others, and no secret is written
    variables=$(mktemp)
    describe --variables "$target" >"$variables"
    export JOB_VARIABLES=$variables
    ranks=$(describe --ranks "$target")
    ;;
  script)
    export SCRIPT=$target RANKS=${RANKS:-2}
    ranks=$RANKS
    ;;
esac
if [ -n "${ranks:-}" ]; then
  [[ $ranks =~ ^[1-9][0-9]{0,3}$ ]] || fail "RANKS='$ranks': is no number of ranks"
  # compose cannot subtract
  export OTHERS=${OTHERS:-$((ranks - 1))}
fi

"${compose[@]}" up --detach --no-build
"${compose[@]}" logs --follow --since "$since" &
logs=$!
trap 'echo "rolecall: the containers keep running: make logs, make ps-status, make stop, make down"; exit 130' INT TERM

rank0=$("${compose[@]}" ps --all --quiet "$first")
while code=$(docker wait "$rank0"); do
  # bad input, failed for good: ends here, although the engine would restart the container
  case $code in 2 | 3) break ;; esac
  # a container that the engine restarts at this moment is reported with 0
  read -r status ended <<<"$(docker inspect --format '{{.State.Status}} {{.State.ExitCode}}' "$rank0")"
  [ "$status" = exited ] && code=$ended && break
done
if [ "$code" = 0 ]; then
  # the others receive it, and the logs end with the last of them
  timeout 60 tail --pid="$logs" --follow /dev/null || true
else
  "${compose[@]}" stop
fi
exit "${code:-1}" # none: the container was deleted meanwhile
