#!/usr/bin/env bash
# DAPO settings + LoRA on MATH | Qwen2.5-14B-Instruct | vLLM rollout | FSDP2 training | NVIDIA GPUs
# ROLLOUT=nvfp4: QeRL. ROLLOUT=bf16: its control run, bf16 + LoRA without noise. DRY_RUN=1: print the configuration and
# stop. Further arguments are Hydra overrides and win. More variables: ../README.md.
set -euo pipefail

# ---- user-adjustable ----
NAME=qwen2_5_14b
ROLLOUT=${ROLLOUT:-nvfp4}
DATA_DIR=${DATA_DIR:-$HOME/data/math_3_5}
NNODES=${NNODES:-1}
NUM_GPUS=${NUM_GPUS:-8}              # per node; the paper trains on 8
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-14B-Instruct}
GPU_MEMORY=${GPU_MEMORY:-0.7}        # share of a GPU that vLLM may use

# ---- what QeRL and its control run differ in ----
AQN=(+aqn.enabled=true +aqn.sigma_start=1e-2 +aqn.sigma_end=5e-4 +aqn.num_stages=10 +aqn.schedule=exponential)
case "$ROLLOUT" in
    nvfp4) TWIN=(+rollout=nvfp4 "${AQN[@]}" actor_rollout_ref.actor.optim.lr=1e-5) ;;
    bf16) TWIN=(actor_rollout_ref.actor.optim.lr=5e-6) ;;
    *) echo "unknown run: ROLLOUT=$ROLLOUT. Accepted are nvfp4 and bf16. Set ROLLOUT to one of them." >&2; exit 2 ;;
esac

# ---- launch: the same in every recipe ----
RECIPE_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$RECIPE_DIR/../launch.sh"
