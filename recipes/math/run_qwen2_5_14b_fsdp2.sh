#!/usr/bin/env bash
# DAPO settings + LoRA on MATH | Qwen2.5-14B-Instruct | vLLM rollout | FSDP2 training | NVIDIA GPUs
# ROLLOUT=nvfp4: QeRL. ROLLOUT=bf16: its twin, bf16 + LoRA without noise. DRY_RUN=1: print the configuration and stop.
# Further arguments are Hydra overrides and win.
set -euo pipefail

# ---- user-adjustable ----
NAME=qwen2_5_14b
ROLLOUT=${ROLLOUT:-nvfp4}
DATA_DIR=${DATA_DIR:-$HOME/data/math_3_5}
NNODES=${NNODES:-1}
NUM_GPUS=${NUM_GPUS:-8}              # per node; the paper trains on 8
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-14B-Instruct}
GPU_MEMORY=${GPU_MEMORY:-0.7}        # share of a GPU that vLLM may use

# ---- what the twins differ in ----
AQN=(+aqn.enabled=true +aqn.sigma_start=1e-2 +aqn.sigma_end=5e-4 +aqn.num_stages=10 +aqn.schedule=exponential)
case "$ROLLOUT" in
    nvfp4) TWIN=(+rollout=nvfp4 "${AQN[@]}" actor_rollout_ref.actor.optim.lr=1e-5) ;;
    bf16) TWIN=(actor_rollout_ref.actor.optim.lr=5e-6) ;;
    *) echo "unknown twin: ROLLOUT=$ROLLOUT. Accepted are nvfp4 and bf16. Set ROLLOUT to one of them." >&2; exit 2 ;;
esac

# ---- launch: the same in every recipe ----
RECIPE_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# verl hides an entry point that fails to import; a module named here fails loudly.
export VERL_USE_EXTERNAL_MODULES=${VERL_USE_EXTERNAL_MODULES:-verl_qerl.verl_plugin}
if [[ -n "${DRY_RUN:-}" ]]; then
    set -- "$@" --cfg job
else
    python3 -m verl_qerl doctor
fi
exec python3 -m verl.trainer.main_ppo --config-dir "$RECIPE_DIR" --config-name config \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.rollout.gpu_memory_utilization="$GPU_MEMORY" \
    trainer.n_gpus_per_node="$NUM_GPUS" \
    trainer.nnodes="$NNODES" \
    trainer.experiment_name="${NAME}_${ROLLOUT}" \
    "${TWIN[@]}" "$@"
