#!/usr/bin/env bash
# Two GRPO steps of a real shape with random weights on one GPU of which CAP GiB may be used (all of it with CAP=):
# answers of 2,048 tokens in groups of 8, LoRA of rank 32. ARM=ours has everything on, ARM=bf16 is stock verl, the
# baseline, ARM=bf16_fused that with verl's fused kernels, which take fused_head.py to run. Writes OUT; the memory of every
# process is the driver's own reading.
#   SHAPE=32b CAP=80 OUT=tests/bench/results/h200/train_step_32b_80gib.json bash tests/bench/train_step.sh [overrides]
# UTILIZATION is vLLM's share of the whole GPU, PROMPTS the questions of a step, MICRO the sequences of a micro-batch.
set -euo pipefail

SHAPE=${SHAPE:-32b}
CAP=${CAP-80}
ARM=${ARM:-ours}
UTILIZATION=${UTILIZATION:-0.32}
PROMPTS=${PROMPTS:-4}
MICRO=${MICRO:-4}
STEPS=${STEPS:-2}
OUT=$(realpath -m "${OUT:?a JSON file to write}")
WORK=${WORK:-$(mktemp -d)}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export RAY_AUTH_MODE=disabled TOKENIZERS_PARALLELISM=false

case $ARM in
    ours)
        checkpoint=()
        # No gate: the rollout masks what the tokenizer lacks, all but 320 tokens, and the actor does not (KL 5.2).
        options=(+rollout=nvfp4 +aqn.enabled=true +aqn.num_stages="$STEPS" +qerl.gate.max_initial_kl=null
            actor_rollout_ref.model.use_fused_kernels=True)
        ;;
    bf16 | bf16_fused)
        checkpoint=(--bf16)
        options=(actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16)
        if [[ $ARM == bf16_fused ]]; then
            options+=(actor_rollout_ref.model.use_fused_kernels=True)
            export VERL_USE_EXTERNAL_MODULES=fused_head PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
        fi
        ;;
    *)
        echo "unknown arm: ARM=$ARM. ours, bf16 and bf16_fused are accepted. Check the spelling." >&2
        exit 1
        ;;
esac
[[ -d $WORK/model ]] || python3 "$here/random_checkpoint.py" --shape "$SHAPE" --out "$WORK/model" "${checkpoint[@]}"
[[ -d $WORK/data ]] || python3 "$here/../../recipes/tools/word_problems.py" --num-train 256 --num-test 16 --out "$WORK/data"

python3 "$here/bench_train_step.py" --out "$OUT" ${CAP:+--cap-gib "$CAP"} \
    --describe "$ARM: Qwen2.5-$SHAPE shapes, random weights; $PROMPTS prompts x 8 answers of 2,048 tokens, LoRA rank 32" -- \
    "${options[@]}" \
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
