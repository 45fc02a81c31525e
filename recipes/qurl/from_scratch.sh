#!/usr/bin/env bash
# QuRL's arms with several seeds each, on the model of ../gsm8k/from_scratch.sh: all weights are trained, the rollout is
# quantized at every weight sync. One GPU. An arm is <rollout>[-tis|-acr][-uaq]; a run that is finished is not repeated.
#   SOURCE=DIR_WITH_JSONL ARMS="bf16 int8 int8-tis int8-acr" SEEDS="1 2 3" bash recipes/qurl/from_scratch.sh [overrides of main_ppo]
set -euo pipefail

ARMS=${ARMS:-bf16 int8 int8-tis int8-acr int8-acr-uaq fp8 fp8-tis fp8-acr fp8-acr-uaq nvfp4 nvfp4-acr}
SEEDS=${SEEDS:-1 2 3}
STEPS=${STEPS:-45}
BATCH=${BATCH:-96}            # questions per step, 8 answers each
LR=${LR:-1e-5}
MINUTES=${MINUTES:-1.6}       # of pretraining
SOURCE=${SOURCE:-openai/gsm8k}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=${WORK:-$here/work}
mkdir -p "$WORK"
SOURCE=$(realpath -q "$SOURCE" || echo "$SOURCE")
cd "$WORK"

# What an arm adds to the command, into `options`.
read_arm() {
    local arm=$1 form=${1%%-*} rest
    rest=${arm#"$form"}
    options=(actor_rollout_ref.rollout.calculate_log_probs=True)
    [[ $form == bf16 ]] || options+=("+rollout=$form")
    case $rest in
        '' | -uaq) ;;
        -tis | -tis-uaq) options+=(algorithm.rollout_correction.rollout_is=token) ;;  # threshold 2, as Flash-RL on GSM8K
        -acr | -acr-uaq) options+=(actor_rollout_ref.actor.policy_loss.loss_mode=acr) ;;
        *)
            echo "unknown arm: ARMS=$arm. <rollout>[-tis|-acr][-uaq] is accepted, as int8-acr-uaq. Check the spelling." >&2
            return 1
            ;;
    esac
    [[ $rest != *-uaq ]] || options+=(+uaq.enabled=true)
}

for arm in $ARMS; do read_arm "$arm"; done
export RAY_AUTH_MODE=disabled TOKENIZERS_PARALLELISM=false
source "$here/../gsm8k/base.sh"

for seed in $SEEDS; do
    for arm in $ARMS; do
        run=$arm-seed$seed
        if [[ -f $run.jsonl ]]; then continue; fi
        read_arm "$arm"
        rm -f "$run.part"
        VERL_FILE_LOGGER_PATH=$WORK/$run.part python3 -m verl.trainer.main_ppo \
            "${options[@]}" \
            algorithm.adv_estimator=grpo \
            data.train_files="$WORK/gsm8k/train.parquet" \
            data.val_files="$WORK/gsm8k/test.parquet" \
            data.train_batch_size="$BATCH" \
            data.max_prompt_length=320 \
            data.filter_overlong_prompts=True \
            data.max_response_length=256 \
            data.dataloader_num_workers=0 \
            data.seed="$seed" \
            actor_rollout_ref.model.path="$WORK/base" \
            actor_rollout_ref.model.use_remove_padding=False \
            actor_rollout_ref.model.enable_gradient_checkpointing=False \
            +actor_rollout_ref.model.override_config.attn_implementation=sdpa \
            actor_rollout_ref.actor.strategy=fsdp2 \
            actor_rollout_ref.actor.use_kl_loss=False \
            actor_rollout_ref.actor.ppo_mini_batch_size="$((BATCH / 2))" \
            actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$((BATCH * 2))" \
            actor_rollout_ref.actor.optim.lr="$LR" \
            actor_rollout_ref.actor.data_loader_seed="$seed" \
            actor_rollout_ref.rollout.name=vllm \
            actor_rollout_ref.rollout.n=8 \
            actor_rollout_ref.rollout.seed="$seed" \
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
            trainer.experiment_name="$run" \
            'trainer.logger=["console","file"]' \
            "$@"
        mv "$run.part" "$run.jsonl"
    done
done
