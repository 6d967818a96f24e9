#!/usr/bin/env bash
# Asks for a TPU slice, waits until it is there, trains on it with jobs/tpu_vm.sh. May be run again at any point: a
# request that exists is waited for, a run that was cut short goes on from its newest checkpoint.
set -euo pipefail

# Fill in, or set in the environment; REPOSITORY, REVISION, WORKDIR, COMPILED and TRAIN stand in jobs/tpu_vm.sh.
export PROJECT=${PROJECT:-}
export ZONE=${ZONE:-}                    # us-west4-a
export TPU=${TPU:-}                      # name for the slice; the request gets the same
ACCELERATOR=${ACCELERATOR:-}             # v5litepod-16
RUNTIME_VERSION=${RUNTIME_VERSION:-}     # v2-alpha-tpuv5-lite; each kind of TPU has its own
OPTIONS=(--spot)                         # or --reserved, --valid-until-duration=6h, or nothing: OPTIONS=()

: "${PROJECT:?fill it in}" "${ZONE:?fill it in}" "${TPU:?fill it in}"
: "${ACCELERATOR:?fill it in}" "${RUNTIME_VERSION:?fill it in}"

queued() {
  gcloud compute tpus queued-resources "$1" "$TPU" --project="$PROJECT" --zone="$ZONE" "${@:2}"
}

if ! queued describe >/dev/null 2>&1; then
  queued create --node-id="$TPU" --accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME_VERSION" \
    ${OPTIONS[@]+"${OPTIONS[@]}"}
fi

state=
until [ "$state" = ACTIVE ]; do
  state=$(queued describe --format="value(state.state)")
  echo "$(date +%T) $TPU: $state"
  case $state in
    FAILED | SUSPENDING | SUSPENDED)
      echo "delete the request and run this again: gcloud compute tpus queued-resources delete $TPU" \
        "--project=$PROJECT --zone=$ZONE --force" >&2
      exit 1
      ;;
    ACTIVE) ;;
    *) sleep 30 ;;
  esac
done

"$(dirname "${BASH_SOURCE[0]}")/tpu_vm.sh"
echo "done; the slice costs money until: gcloud compute tpus queued-resources delete $TPU" \
  "--project=$PROJECT --zone=$ZONE --force"
