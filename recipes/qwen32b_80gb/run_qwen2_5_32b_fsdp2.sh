#!/usr/bin/env bash
# DAPO settings + LoRA on MATH, one GPU of 80 GB | Qwen2.5-32B-Instruct | vLLM rollout | FSDP2 training | NVIDIA GPUs
# ROLLOUT=nvfp4: QeRL. ROLLOUT=bf16: its control run, bf16 + LoRA without noise. DRY_RUN=1: print the configuration and
# stop. Further arguments are Hydra overrides and win. More variables: ../README.md.
set -euo pipefail

# ---- user-adjustable ----
NAME=qwen2_5_32b
ROLLOUT=${ROLLOUT:-nvfp4}
DATA_DIR=${DATA_DIR:-$HOME/data/math_4_5}
NNODES=${NNODES:-1}

# ---- what QeRL and its control run differ in ----
AQN=(+aqn.enabled=true +aqn.sigma_start=1e-2 +aqn.sigma_end=5e-4 +aqn.num_stages=10 +aqn.schedule=exponential)
case "$ROLLOUT" in
    nvfp4)
        NUM_GPUS=${NUM_GPUS:-1}
        MODEL_PATH=${MODEL_PATH:-$HOME/models/Qwen2.5-32B-Instruct-NVFP4}   # written by `python3 -m verl_qerl quantize`
        GPU_MEMORY=${GPU_MEMORY:-0.6}
        # Logits of 8k tokens would take 11.6 GiB. Stock verl's fused kernels fail with this model's head (FSDP2, not tied).
        TWIN=(+rollout=nvfp4 "${AQN[@]}" actor_rollout_ref.actor.optim.lr=1e-5) ;;
    bf16)   # 61 GiB of weights: it needs four such GPUs
        NUM_GPUS=${NUM_GPUS:-4}
        MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-32B-Instruct}
        GPU_MEMORY=${GPU_MEMORY:-0.45}
        TWIN=(actor_rollout_ref.actor.optim.lr=5e-6 actor_rollout_ref.rollout.tensor_model_parallel_size=4) ;;
    *) echo "unknown run: ROLLOUT=$ROLLOUT. Accepted are nvfp4 and bf16. Set ROLLOUT to one of them." >&2; exit 2 ;;
esac

# ---- launch: the same in every recipe ----
RECIPE_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$RECIPE_DIR/../launch.sh"
