#!/usr/bin/env bash
# GRPO with both options on real GSM8K where no pretrained weights are at hand: a Qwen2 of 105 M parameters is trained
# from scratch for some minutes on GSM8K train and generated problems, then with verl. One GPU; results in results/.
#   SOURCE=DIR_WITH_JSONL bash recipes/gsm8k/from_scratch.sh [overrides of main_ppo]
set -euo pipefail

STEPS=${STEPS:-45}
BATCH=${BATCH:-96}            # questions per step, 8 answers each
LR=${LR:-4e-4}                # 1e-3 with four updates per step collapsed (results/)
SOURCE=${SOURCE:-openai/gsm8k}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=${WORK:-$here/work}
mkdir -p "$WORK"
SOURCE=$(realpath -q "$SOURCE" || echo "$SOURCE")
WORK=$(realpath "$WORK")
cd "$WORK"

export RAY_AUTH_MODE=disabled TOKENIZERS_PARALLELISM=false
source "$here/base.sh"

export VERL_FILE_LOGGER_PATH=$WORK/metrics.jsonl
python3 -m verl.trainer.main_ppo \
    +rollout=nvfp4 +aqn.enabled=true \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=64 \
    "${common[@]}" \
    "$@"
python3 -m verl_qerl plot metrics.jsonl --out reward.png
