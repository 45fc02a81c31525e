# Sourced: makes gsm8k/, arithmetic/ and base/ in the current folder, a Qwen2 of 105 M parameters trained from scratch for
# PRETRAIN_STEPS on GSM8K train (SOURCE) and generated problems. What is there already is kept. Every GRPO run on it has the
# options `common` (WORK, BATCH, LR and STEPS), one that shares its GPU those in `beside` too. DATA=arithmetic asks the
# generated problems instead of GSM8K's: the base knows how to solve those, where of GSM8K's it has learned answers by heart.
DATA=${DATA:-gsm8k}
PRETRAIN_STEPS=${PRETRAIN_STEPS:-1100}  # 155 to 180 s; by the clock, hosts gave bases of very different strength
case $DATA in
    gsm8k) longest=(320 256) ;;  # tokens of a question and of an answer
    arithmetic) longest=(64 64) ;;
    *)
        echo "unknown questions: DATA=$DATA. gsm8k and arithmetic are accepted. Check the spelling." >&2
        exit 1
        ;;
esac
[[ -d base ]] || python3 -m verl_qerl doctor
# Half of the answers it is pretrained on end in another way, so that there is something to learn within some steps.
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")/../tools" && pwd)
[[ -d gsm8k ]] || python3 -m verl_qerl data gsm8k --source "$SOURCE" --out gsm8k
[[ -d arithmetic ]] || python3 "$tools/word_problems.py" --num-train 30000 --max-number 60 --max-steps 3 --out arithmetic
[[ -d base ]] || python3 "$tools/pretrain.py" --data gsm8k/train.jsonl arithmetic/train.jsonl --repeats 8 1 \
    --hash-share 0.5 --eval-data gsm8k/test.jsonl --size 100m --lr 1e-3 --max-steps "$PRETRAIN_STEPS" --minutes 30 \
    --compile --out base

source "$tools/../quoted.sh"
common=(
    algorithm.adv_estimator=grpo
    data.train_files="$(quoted "$WORK/$DATA/train.parquet")"
    data.val_files="$(quoted "$WORK/$DATA/test.parquet")"
    data.train_batch_size="$BATCH"
    data.max_prompt_length="${longest[0]}"
    data.filter_overlong_prompts=True
    data.max_response_length="${longest[1]}"
    data.dataloader_num_workers=0
    actor_rollout_ref.model.path="$(quoted "$WORK/base")"
    actor_rollout_ref.model.use_remove_padding=False
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    ++actor_rollout_ref.model.override_config.attn_implementation=sdpa
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.ppo_mini_batch_size="$((BATCH / 2))"
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$((BATCH * 2))"
    actor_rollout_ref.actor.optim.lr="$LR"
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.max_model_len="$((longest[0] + longest[1]))"
    actor_rollout_ref.rollout.max_num_seqs="$((BATCH * 8))"
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$((BATCH * 4))"
    actor_rollout_ref.rollout.gpu_memory_utilization=0.3
    actor_rollout_ref.rollout.agent.num_workers=4  # each spends some ms of a core on an answer
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
)

# vLLM would measure what is free while its neighbours take and return memory, and refuse to start, or to sleep; graphs
# take longer to capture than such a run decodes.
beside=(actor_rollout_ref.rollout.gpu_memory_utilization=0.05
    actor_rollout_ref.rollout.free_cache_engine=False
    actor_rollout_ref.rollout.enforce_eager=True
    actor_rollout_ref.rollout.agent.num_workers=1
    +actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes="${KV_BYTES:-6000000000}"
    ray_kwargs.ray_init.num_cpus=16
    ++ray_kwargs.ray_init.object_store_memory=2000000000)
