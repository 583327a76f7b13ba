#!/usr/bin/env bash
# Makes the token that the ranks in containers share, unless there is one: the file that compose.yaml mounts.
# With `-` as its argument it writes a new token to its output instead, for a pipe.
set -euo pipefail

fail() {
  echo "rolecall: $*" >&2
  exit 2
}

# 256 bits as text
new() {
  { openssl rand -base64 32 2>/dev/null || head -c 32 /dev/urandom | base64; } | tr -d '\n'
}

case ${1:-} in
  -)
    [ ! -t 1 ] || fail "a token is written to a pipe only: docker/token.sh - | ..."
    new
    exit
    ;;
esac

file=${JOB_TOKEN_SOURCE:-}
# compose reads `.env` too
[ -n "$file" ] || [ ! -f .env ] || file=$(sed -n 's/^JOB_TOKEN_SOURCE=//p' .env | tail -n 1)
file=${file:-.secrets/job-token}
[ ! -d "$file" ] || fail "JOB_TOKEN_SOURCE=$file: is a directory; rmdir it"
[ ! -e "$file" ] || exit 0
folder=$(dirname "$file")
umask 077
mkdir -p "$folder" || fail "JOB_TOKEN_SOURCE=$file: its folder cannot be made"
case $(ls -ld "$folder") in
  d???------*) ;;
  *) fail "JOB_TOKEN_SOURCE=$file: others on this machine can enter its folder; chmod 700 $folder, or choose another" ;;
esac
unfinished=$(mktemp "$folder/job-token.XXXXXX")
trap 'rm -f "$unfinished"' EXIT
new >"$unfinished"
chmod 444 "$unfinished"
# whole or not at all; of two that run at once, one is late
ln "$unfinished" "$file" 2>/dev/null || [ -e "$file" ] || fail "JOB_TOKEN_SOURCE=$file: cannot be written"
echo "rolecall: the ranks' token is in $file"
