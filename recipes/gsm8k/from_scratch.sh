#!/usr/bin/env bash
# GRPO with both options on real GSM8K where no pretrained weights are at hand: a Qwen2 of 105 M parameters is trained
# from scratch for some minutes on GSM8K train and generated problems, then with verl. One GPU; results in results/.
#   SOURCE=DIR_WITH_JSONL bash recipes/gsm8k/from_scratch.sh [overrides of main_ppo]
set -euo pipefail

STEPS=${STEPS:-45}
BATCH=${BATCH:-96}            # questions per step, 8 answers each
LR=${LR:-4e-4}                # 1e-3 with four updates per step collapsed (results/)
MINUTES=${MINUTES:-1.6}       # of pretraining
SOURCE=${SOURCE:-openai/gsm8k}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=${WORK:-$here/work}
mkdir -p "$WORK"
SOURCE=$(realpath -q "$SOURCE" || echo "$SOURCE")
cd "$WORK"

export RAY_AUTH_MODE=disabled TOKENIZERS_PARALLELISM=false
source "$here/base.sh"

export VERL_FILE_LOGGER_PATH=$WORK/metrics.jsonl
python3 -m verl.trainer.main_ppo \
    +rollout=nvfp4 +aqn.enabled=true \
    algorithm.adv_estimator=grpo \
    data.train_files="$WORK/gsm8k/train.parquet" \
    data.val_files="$WORK/gsm8k/test.parquet" \
    data.train_batch_size="$BATCH" \
    data.max_prompt_length=320 \
    data.filter_overlong_prompts=True \
    data.max_response_length=256 \
    data.dataloader_num_workers=0 \
    actor_rollout_ref.model.path="$WORK/base" \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=64 \
    actor_rollout_ref.model.use_remove_padding=False \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.ppo_mini_batch_size="$((BATCH / 2))" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$((BATCH * 2))" \
    actor_rollout_ref.actor.optim.lr="$LR" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.max_model_len=576 \
    actor_rollout_ref.rollout.max_num_seqs="$((BATCH * 8))" \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$((BATCH * 4))" \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.3 \
    actor_rollout_ref.rollout.agent.num_workers=1 \
    reward.num_workers=1 \
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1 \
    +ray_kwargs.ray_init.include_dashboard=False \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.total_training_steps="$STEPS" \
    trainer.val_before_train=False \
    trainer.test_freq=-1 \
    trainer.save_freq=-1 \
    trainer.resume_mode=disable \
    'trainer.logger=["console","file"]' \
    "$@"
python3 -m verl_qerl plot metrics.jsonl --out reward.png
