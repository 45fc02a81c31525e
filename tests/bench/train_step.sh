#!/usr/bin/env bash
# Memory of two GRPO steps of a real shape with random weights on one GPU of which CAP GiB may be used (all of it with
# CAP=): answers of 2,048 tokens in groups of 8, LoRA of rank 32. Writes OUT; the memory of every process is the driver's
# own reading. bench_step.py has the time beside stock verl's.
#   SHAPE=32b CAP=80 OUT=tests/bench/results/h200/train_step_32b_80gib.json bash tests/bench/train_step.sh [overrides]
# UTILIZATION is vLLM's share of the whole GPU, PROMPTS the questions of a step, MICRO the sequences of a micro-batch.
set -euo pipefail

SHAPE=${SHAPE:-32b}
CAP=${CAP-80}
UTILIZATION=${UTILIZATION:-0.32}
PROMPTS=${PROMPTS:-4}
MICRO=${MICRO:-4}
STEPS=${STEPS:-2}
OUT=$(realpath -m "${OUT:?a JSON file to write}")
WORK=${WORK:-$(mktemp -d)}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export RAY_AUTH_MODE=disabled TOKENIZERS_PARALLELISM=false

[[ -d $WORK/model ]] || python3 "$here/random_checkpoint.py" --shape "$SHAPE" --out "$WORK/model"
[[ -d $WORK/data ]] || python3 "$here/../../recipes/tools/word_problems.py" --num-train 256 --num-test 16 --out "$WORK/data"

# No gate: the rollout masks what the tokenizer lacks, all but 320 tokens, and the actor does not (KL 5.2).
python3 "$here/bench_train_step.py" --out "$OUT" ${CAP:+--cap-gib "$CAP"} \
    --describe "Qwen2.5-$SHAPE shapes, random weights; $PROMPTS prompts x 8 answers of 2,048 tokens, LoRA rank 32" -- \
    +rollout=nvfp4 \
    +aqn.enabled=true \
    +aqn.num_stages="$STEPS" +aqn.sigma_start=5e-4 \
    +qerl.gate.max_initial_kl=null \
    algorithm.adv_estimator=grpo \
    data.train_files="$WORK/data/train.parquet" \
    data.val_files="$WORK/data/test.parquet" \
    data.train_batch_size="$PROMPTS" \
    data.max_prompt_length=256 \
    data.max_response_length=2048 \
    data.dataloader_num_workers=0 \
    actor_rollout_ref.model.path="$WORK/model" \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=64 \
    actor_rollout_ref.model.use_fused_kernels=True \
    actor_rollout_ref.model.use_remove_padding=False \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.ppo_mini_batch_size="$PROMPTS" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$MICRO" \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.ignore_eos=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.max_model_len=2304 \
    actor_rollout_ref.rollout.max_num_seqs="$((PROMPTS * 8))" \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$MICRO" \
    actor_rollout_ref.rollout.gpu_memory_utilization="$UTILIZATION" \
    actor_rollout_ref.rollout.agent.num_workers=4 \
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
    "$@"
