#!/usr/bin/env bash
# By launch --print: one start of the run, without the checks, the budgets and the loop of launch.
set -euo pipefail
# Asks for the slice. Leave this out if it is there already.
gcloud compute tpus tpu-vm create llama3-8b --accelerator-type=v5litepod-256 --version=v2-alpha-tpuv5-lite \
  --labels=gspmd-lm-launch=by-hand --zone=us-west4-a --quiet
# Sends the code that stands here, and installs it.
tar -czf gspmd_lm.tar.gz --exclude=__pycache__ main.py pyproject.toml README.md LICENSE gspmd_lm rules configs
gcloud compute tpus tpu-vm scp gspmd_lm.tar.gz llama3-8b:gspmd_lm.tar.gz --worker=all --batch-size=all \
  --zone=us-west4-a --quiet
gcloud compute tpus tpu-vm ssh llama3-8b --command="$(cat <<'END'
set -eu
python3 -m pip install --user --quiet uv
rm -rf gspmd_lm_launch/code
mkdir -p gspmd_lm_launch/code
tar -xzf gspmd_lm.tar.gz -C gspmd_lm_launch/code
cd gspmd_lm_launch/code
~/.local/bin/uv venv --quiet --python 3.12
~/.local/bin/uv pip install --quiet -e '.[tpu,gcs]'
END
)" \
  --worker=all --batch-size=all --zone=us-west4-a --quiet
# Trains. Another start needs another name than attempt-1.
gcloud compute tpus tpu-vm ssh llama3-8b --command="$(cat <<'END'
set -eu
mkdir -p ~/gspmd_lm_launch/attempt-1
cd ~/gspmd_lm_launch/code
if ! test -e ~/gspmd_lm_launch/attempt-1/pid; then
  export JAX_COORDINATOR_PORT=8482
  touch ~/gspmd_lm_launch/attempt-1/log
  setsid nohup bash -c 'trap : TERM; "$@"; echo $? > ~/gspmd_lm_launch/attempt-1/code' run .venv/bin/python main.py train --config=llama3_8b --rules=fsdp_tp --set rules.remat=block --set rules.microbatches=4 --set 'data.source=gs://bucket/data/*.jsonl' --set data.tokenizer=gs://bucket/data/tokenizer.json --workdir=gs://bucket/runs/llama3-8b --compile_cache=gs://bucket/runs/compiled >> ~/gspmd_lm_launch/attempt-1/log 2>&1 < /dev/null &
  echo $! > ~/gspmd_lm_launch/attempt-1/pid
fi
tail --pid="$(cat ~/gspmd_lm_launch/attempt-1/pid)" --sleep-interval=0.2 -n +1 -f ~/gspmd_lm_launch/attempt-1/log
echo "gspmd_lm launch: ended with $(cat ~/gspmd_lm_launch/attempt-1/code || echo 137)"
END
)" \
  --worker=all --batch-size=all --zone=us-west4-a --quiet
# The slice costs money until it is given back: gcloud compute tpus tpu-vm delete llama3-8b --zone=us-west4-a --quiet
