#!/usr/bin/env bash
# Trains on every worker of a TPU slice that is up. Run it where gcloud is logged in: jobs/tpu_vm.sh
# The same command again, after a preemption or a new slice, goes on from the newest checkpoint.
set -euo pipefail

# Fill in, or set in the environment.
PROJECT=${PROJECT:-}
ZONE=${ZONE:-}                 # us-west4-a
TPU=${TPU:-}                   # name of the slice, see `gcloud compute tpus tpu-vm list`
REPOSITORY=${REPOSITORY:-}     # git URL of your copy, which the workers can clone
REVISION=${REVISION:-main}
WORKDIR=${WORKDIR:-}           # gs://bucket/runs/name, one for all workers
PORT=${PORT:-8482}             # of the first worker, at which all meet; jax's own is 8482
COMPILED=${COMPILED:-${WORKDIR%/*}/compiled}  # compiled programs: a slice made anew finds them and starts warm
TRAIN=(--config=llama3_8b --rules=fsdp_tp --set "data.source=/data/*.jsonl" --set data.tokenizer=/data/tokenizer.json)

: "${PROJECT:?fill it in}" "${ZONE:?fill it in}" "${TPU:?fill it in}" "${REPOSITORY:?fill it in}" "${WORKDIR:?fill it in}"

on_all_workers() {
  gcloud compute tpus tpu-vm ssh "$TPU" --project="$PROJECT" --zone="$ZONE" --worker=all --command="set -eu; $1"
}

# uv brings a Python: the one of the image may be older than 3.11.
on_all_workers "
  python3 -m pip install --user --quiet uv
  test -d gspmd_lm || git clone $(printf %q "$REPOSITORY") gspmd_lm
  cd gspmd_lm
  git fetch --quiet origin $(printf %q "$REVISION")
  git checkout --quiet --detach FETCH_HEAD
  test -d .venv || ~/.local/bin/uv venv --quiet --python 3.12
  ~/.local/bin/uv pip install --quiet -e '.[tpu,gcs]'"

on_all_workers "cd gspmd_lm; export JAX_COORDINATOR_PORT=$PORT; exec .venv/bin/python main.py$(printf ' %q' "${TRAIN[@]}" "--workdir=$WORKDIR" "--compile_cache=$COMPILED")"
