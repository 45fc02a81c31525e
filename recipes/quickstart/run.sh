#!/usr/bin/env bash
# From nothing to a reward curve: word problems, a small model, its NVFP4 form, GRPO with noise. See README.md.
set -euo pipefail

# What is trained. The defaults fit two CPU cores.
NUM_TRAIN=${NUM_TRAIN:-20000}             # word problems
MAX_NUMBER=${MAX_NUMBER:-6}               # largest number in a question
HASH_SHARE=${HASH_SHARE:-0.5}             # share of pretraining answers that end in `#### N`, as the reward wants
PRETRAIN_STEPS=${PRETRAIN_STEPS:-200}     # then about three sampled answers in ten are right
PRETRAIN_MINUTES=${PRETRAIN_MINUTES:-4}   # at most
STEPS=${STEPS:-25}                        # GRPO steps
BATCH=${BATCH:-16}                        # questions per step
GROUP=${GROUP:-8}                         # answers per question
LR=${LR:-1e-3}
LORA_RANK=${LORA_RANK:-16}
MAX_ANSWER=${MAX_ANSWER:-32}              # tokens; right answers take up to 20
SEED=${SEED:-0}
OPTIONS=${OPTIONS-+rollout=nvfp4 +aqn.enabled=true}  # empty: stock verl on the bf16 model

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$here/work
mkdir -p "$work"

source "$here/install.sh"
qerl_install "$root"
cd "$work"

if command -v nvidia-smi >/dev/null; then device=gpu; else device=cpu; fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=disabled
export RAY_AUTH_MODE=disabled  # Ray would write a token file into the home directory
if [[ $device == cpu ]]; then
    export VERL_PLATFORM=cpu
    export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
fi

"$PYTHON" -m verl_qerl doctor

# A directory appears whole or not at all, so one that exists is finished. Remove work/ to begin again.
if [[ ! -d data ]]; then
    "$PYTHON" "$root/recipes/tools/word_problems.py" --out data --num-train "$NUM_TRAIN" --num-test 200 \
        --max-number "$MAX_NUMBER" --seed "$SEED"
fi
if [[ ! -d base ]]; then
    "$PYTHON" "$root/recipes/tools/pretrain.py" --size tiny --data data/train.jsonl --eval-data data/test.jsonl \
        --out base --max-steps "$PRETRAIN_STEPS" --minutes "$PRETRAIN_MINUTES" --hash-share "$HASH_SHARE" --seed "$SEED"
fi
if [[ ! -d base-nvfp4 ]]; then
    "$PYTHON" -m verl_qerl quantize --model base --out base-nvfp4
fi

read -ra options <<<"$OPTIONS"
model=base-nvfp4
if [[ -z $OPTIONS ]]; then
    model=base
    options=(actor_rollout_ref.rollout.load_format=safetensors)  # of a LoRA run, which syncs the adapter alone
fi
source "$root/recipes/quoted.sh"
arguments=(
    "${options[@]}"
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    data.train_files="$(quoted "$work/data/train.parquet")"
    data.val_files="$(quoted "$work/data/test.parquet")"
    data.train_batch_size="$BATCH"
    data.max_prompt_length=96
    data.max_response_length="$MAX_ANSWER"
    data.dataloader_num_workers=0
    data.seed="$SEED"
    actor_rollout_ref.model.path="$(quoted "$work/$model")"
    actor_rollout_ref.model.lora_rank="$LORA_RANK"
    actor_rollout_ref.model.lora_alpha="$((2 * LORA_RANK))"
    actor_rollout_ref.model.use_remove_padding=False
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    ++actor_rollout_ref.model.override_config.attn_implementation=sdpa
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr="$LR"
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.ppo_mini_batch_size="$BATCH"
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$((BATCH * GROUP / 2))"
    actor_rollout_ref.actor.use_torch_compile=False
    actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n="$GROUP"
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.max_model_len="$((96 + MAX_ANSWER))"
    actor_rollout_ref.rollout.max_num_seqs="$((BATCH * GROUP))"
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$((BATCH * GROUP / 2))"
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64
    actor_rollout_ref.rollout.agent.num_workers=1
    reward.num_workers=1
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1
    ++ray_kwargs.ray_init.include_dashboard=False
    trainer.n_gpus_per_node=1
    trainer.nnodes=1
    trainer.total_training_steps="$STEPS"
    trainer.val_before_train=False
    trainer.test_freq=-1
    trainer.save_freq=-1
    trainer.resume_mode=disable
    'trainer.logger=["console","file"]'
    trainer.project_name=quickstart
    trainer.experiment_name=quickstart
)
if [[ $device == cpu ]]; then
    arguments+=(
        +platform=cpu
        actor_rollout_ref.rollout.gpu_memory_utilization=0.1
        # Without AVX-512 products of PyTorch in bf16 are ten to a hundred times as slow.
        actor_rollout_ref.actor.fsdp_config.dtype=float32
        +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
    )
else
    arguments+=(actor_rollout_ref.rollout.gpu_memory_utilization=0.3)
fi

export VERL_FILE_LOGGER_PATH=$work/metrics.jsonl
echo "GRPO: Ray, verl and vLLM take one to three minutes to start; everything they say is in $work/train.log"
"$PYTHON" -m verl.trainer.main_ppo "${arguments[@]}" "$@" 2>&1 | tee train.log |
    grep --line-buffered -oE 'Training Progress: .*\]|critic/score/mean:[0-9.]+' || {
    tail -n 40 train.log
    exit 1
}
"$PYTHON" -m verl_qerl plot metrics.jsonl --out reward.png
