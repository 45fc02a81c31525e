#!/usr/bin/env bash
# A run of verl on the small model of ../../recipes/gsm8k/base.sh in WORK, beside others on its GPUs: every step goes to
# OUT/verl/NAME.jsonl.
#   WORK=DIR OUT=DIR [DATA=gsm8k BATCH=32 STEPS=30 LR=2e-4 SEED=2] bash tests/bench/verl_run.sh NAME [overrides of main_ppo]
set -euo pipefail

NAME=${1:?a name for the results}
shift
DATA=${DATA:-arithmetic}
BATCH=${BATCH:-16}
STEPS=${STEPS:-3}
LR=${LR:-1e-4}
SEED=${SEED:-1}
SOURCE=${SOURCE:-openai/gsm8k}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "${OUT:?a folder for results}/verl" "${WORK:?the folder of model and data}"
OUT=$(realpath "$OUT")
cd "$WORK"
export RAY_AUTH_MODE=disabled TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
source "$here/../../recipes/gsm8k/base.sh"

rm -f "$OUT/verl/$NAME.jsonl"
VERL_FILE_LOGGER_PATH=$OUT/verl/$NAME.jsonl python3 -m verl.trainer.main_ppo \
    "${common[@]}" \
    "${beside[@]}" \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    data.seed="$SEED" \
    actor_rollout_ref.actor.data_loader_seed="$SEED" \
    actor_rollout_ref.rollout.seed="$SEED" \
    trainer.experiment_name="$NAME" \
    "$@"
