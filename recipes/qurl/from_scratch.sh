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
            "${common[@]}" \
            data.seed="$seed" \
            actor_rollout_ref.actor.data_loader_seed="$seed" \
            actor_rollout_ref.rollout.seed="$seed" \
            trainer.experiment_name="$run" \
            "$@"
        mv "$run.part" "$run.jsonl"
    done
done
