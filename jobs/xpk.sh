#!/usr/bin/env bash
# Trains what gke.yaml does, where the cluster was made by xpk, which makes the JobSet in place of launch. The flags are
# those of xpk's parser of 2025 (AI-Hypercomputer/xpk, src/xpk/parser/workload.py). It was not tried.
set -euo pipefail
xpk workload create --cluster=my-cluster --workload=llama3-8b --tpu-type=v5litepod-256 --num-slices=1 \
  --docker-image=us-docker.pkg.dev/my-project/images/gspmd_lm:tpu --max-restarts=100 --restart-on-user-code-failure \
  --termination-grace-period-seconds=300 --env=JAX_COORDINATOR_PORT=8482 \
  --command="exec gspmd-lm train --config=llama3_8b --rules=fsdp_tp --set rules.remat=block \
    --set rules.microbatches=4 --set 'data.source=gs://bucket/data/*.jsonl' --set data.tokenizer=/data/tokenizer.json \
    --workdir=gs://bucket/runs/llama3-8b --compile_cache=gs://bucket/runs/compiled"
