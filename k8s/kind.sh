#!/usr/bin/env bash
# Trains a job on a kind cluster until it has finished: k8s/kind.sh OVERLAY IMAGE [FILE, of the overlays job and script]
# Creates the cluster CLUSTER=rolecall if there is none, and keeps it: `kind delete cluster --name rolecall`. TIMEOUT is
# in seconds.
set -euo pipefail
overlay=$1 image=$2 file=${3:-}
cluster=${CLUSTER:-rolecall} timeout=${TIMEOUT:-1800}
kubectl=${KUBECTL:-kubectl}
for tool in docker kind "$kubectl"; do
  command -v "$tool" >/dev/null || { echo "k8s-kind: $tool is not installed" >&2; exit 2; }
done
[ -f "k8s/$overlay/settings.env" ] || { echo "k8s-kind: there is no job k8s/$overlay" >&2; exit 2; }
case $overlay in
  job | script) [ -f "$file" ] || { echo "k8s-kind: JOB_FILE or SCRIPT='$file': there is no such file" >&2; exit 2; } ;;
esac
kubectl() { command "$kubectl" --context "kind-$cluster" "$@"; }

kind get clusters 2>/dev/null | grep -qx "$cluster" || kind create cluster --name "$cluster" --wait 180s
kind load docker-image "$image" --name "$cluster"
# pods of an earlier image of the same name
kubectl delete pods --selector "app.kubernetes.io/instance=$overlay" --ignore-not-found
if [ -n "$file" ]; then
  kubectl create configmap "$overlay" --from-file="$file" --dry-run=client --output yaml | kubectl apply --filename -
fi
kubectl get secret "$overlay" >/dev/null 2>&1 ||
  docker/token.sh - | kubectl create secret generic "$overlay" --from-file=JOB_TOKEN=/dev/stdin
kubectl apply -k "k8s/$overlay"
# rank 0's pod is the one that its Service selects
component=$(kubectl get service "$overlay-rank0" \
  --output jsonpath='{.spec.selector.app\.kubernetes\.io/component}')
first=$(kubectl get statefulsets --output jsonpath='{.items[0].metadata.name}' \
  --selector "app.kubernetes.io/instance=$overlay,app.kubernetes.io/component=$component")
rank0=$first-0
logs=
trap '[ -z "$logs" ] || kill "$logs" 2>/dev/null || true' EXIT
for ((left = timeout; left > 0; left -= 2)); do
  # a rank that is just restarting does not answer
  state=$(kubectl exec "$rank0" -- python -m rolecall.observe.probe /metrics 2>/dev/null |
    sed -n 's/^rolecall_gang_state{state="\([a-z]*\)"} 1.*/\1/p') || state=unknown
  # readiness would not do to see the start: a finished rank is not ready, and a short job may be finished by now
  case $state in
    finished)
      [ -n "$logs" ] || kubectl logs "$rank0"
      sleep 1 # its last lines
      echo "k8s-kind: $overlay has finished; kind delete cluster --name $cluster"
      exit 0
      ;;
    failed) break ;;
    running | draining | stopping)
      if [ -z "$logs" ]; then
        kubectl logs --follow "$rank0" &
        logs=$!
      fi
      ;;
  esac
  if [ -z "$logs" ] && ((timeout - left >= 300)); then
    kubectl describe pod "$rank0" | tail -n 20 >&2
    break
  fi
  sleep 2
done
[ -n "$logs" ] || kubectl logs --tail=20 "$rank0" >&2 || true
echo "k8s-kind: $overlay has not finished (${state:-unknown})" >&2
kubectl get pods --selector "app.kubernetes.io/instance=$overlay" >&2
exit 1
