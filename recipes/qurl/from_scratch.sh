#!/usr/bin/env bash
# QuRL's arms with several seeds each, on the model of ../gsm8k/from_scratch.sh: all weights are trained, the rollout is
# quantized at every weight sync. An arm is <rollout>[-tis|-acr][-uaq]; a run that is finished is not repeated.
#   SOURCE=DIR_WITH_JSONL ARMS="bf16 int8 int8-tis int8-acr" SEEDS="1 2 3" bash recipes/qurl/from_scratch.sh [overrides of main_ppo]
# DATA=gsm8k asks GSM8K's questions, of which the base knows few (../gsm8k/base.sh).
# Every run takes one GPU. GPUS="0 1" AT_ONCE=4 has eight under way, four on each, and sends what they say to <run>.log.
set -euo pipefail

ARMS=${ARMS:-bf16 int8 int8-tis int8-acr int8-acr-uaq fp8 fp8-tis fp8-acr fp8-acr-uaq nvfp4 nvfp4-tis nvfp4-acr}
SEEDS=${SEEDS:-1 2 3}
DATA=${DATA:-arithmetic}      # generated problems
STEPS=${STEPS:-45}
BATCH=${BATCH:-96}            # questions per step, 8 answers each
LR=${LR:-3e-6}                # at 3e-5 reward fell again (results/)
SOURCE=${SOURCE:-openai/gsm8k}
GPUS=${GPUS:-${CUDA_VISIBLE_DEVICES:-0}}
AT_ONCE=${AT_ONCE:-1}         # runs on a GPU
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=${WORK:-$here/work}
mkdir -p "$WORK"
SOURCE=$(realpath -q "$SOURCE" || echo "$SOURCE")
WORK=$(realpath "$WORK")
cd "$WORK"

# What an arm adds to the command, into `options`.
read_arm() {
    local arm=$1 form=${1%%-*} rest
    rest=${arm#"$form"}
    options=(actor_rollout_ref.rollout.calculate_log_probs=True)
    case $form in
        bf16) ;;
        int8 | fp8 | nvfp4 | mxfp4) options+=("+rollout=$form") ;;
        *) rest=unknown ;;
    esac
    case $rest in
        '' | -uaq) ;;
        -tis | -tis-uaq) options+=(algorithm.rollout_correction.rollout_is=token) ;;  # threshold 2, as Flash-RL on GSM8K
        -acr | -acr-uaq) options+=(actor_rollout_ref.actor.policy_loss.loss_mode=acr) ;;
        *)
            echo "unknown arm: ARMS=$arm. <rollout>[-tis|-acr][-uaq] is accepted, with bf16, int8, fp8, nvfp4 or mxfp4, as" \
                "int8-acr-uaq. Check the spelling." >&2
            return 1
            ;;
    esac
    [[ $rest != *-uaq ]] || options+=(+uaq.enabled=true)
}

for arm in $ARMS; do read_arm "$arm"; done
if [[ ! $AT_ONCE =~ ^[1-9][0-9]*$ ]]; then
    echo "no number of runs: AT_ONCE=$AT_ONCE. 1 or more are accepted. Change it." >&2
    exit 1
fi
export RAY_AUTH_MODE=disabled TOKENIZERS_PARALLELISM=false
source "$here/../gsm8k/base.sh"

# One run; arguments: arm, seed, overrides.
train() {
    local arm=$1 seed=$2 run=$1-seed$2
    shift 2
    if [[ -f $run.jsonl ]]; then return; fi
    read_arm "$arm"
    rm -f "$run.part"
    VERL_FILE_LOGGER_PATH=$WORK/$run.part python3 -m verl.trainer.main_ppo \
        "${options[@]}" \
        "${common[@]}" \
        data.seed="$seed" \
        actor_rollout_ref.actor.data_loader_seed="$seed" \
        actor_rollout_ref.rollout.seed="$seed" \
        trainer.experiment_name="$run" \
        "$@" || return
    mv "$run.part" "$run.jsonl"
}

runs=()
for seed in $SEEDS; do
    for arm in $ARMS; do runs+=("$arm $seed"); done
done
read -ra gpus <<<"${GPUS//,/ }"
lanes=$((${#gpus[@]} * AT_ONCE))

if ((lanes == 1)); then
    export CUDA_VISIBLE_DEVICES=${gpus[0]}
    for run in "${runs[@]}"; do train ${run% *} ${run#* } "$@"; done
    exit
fi

# Every run would start threads and compilers for all cores; many together can use up the kernel's thread ids (pid_max).
threads=$(($(nproc) / lanes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$OMP_NUM_THREADS}

# Every `lanes`-th run from the given one on, on one GPU. A run that fails is tried once more, since engines that start at
# once may draw the same port, and does not stop the others.
lane() {
    local first=$1 failed=0 run i command
    shift
    export CUDA_VISIBLE_DEVICES=${gpus[first % ${#gpus[@]}]} RAY_TMPDIR
    RAY_TMPDIR=$(mktemp -d)  # two clusters that start at once would share a session's folder
    for ((i = first; i < ${#runs[@]}; i += lanes)); do
        run=${runs[i]}
        echo "${run/ /-seed}: started on GPU $CUDA_VISIBLE_DEVICES"
        command=(train ${run% *} ${run#* } "${beside[@]}" "$@")
        if { "${command[@]}" || "${command[@]}"; } >"${run/ /-seed}.log" 2>&1; then
            echo "${run/ /-seed}: done"
        else
            failed=1
            echo "${run/ /-seed}: failed, see $WORK/${run/ /-seed}.log" >&2
        fi
    done
    rm -rf "$RAY_TMPDIR"
    return "$failed"
}

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
for ((i = 0; i < lanes && i < ${#runs[@]}; i++)); do
    lane "$i" "$@" &
    pids+=("$!")
done
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit "$failed"
