"""verl's own LoRA GRPO examples with two options of ours pass the checks of the driver, on the GPUs they are given.

The options are those of examples/ in verl's repository; paths and the names of runs are left out.
"""

import pytest

pytest.importorskip("verl")

from qerl_testing import verl_config
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_qerl.modules.varlen_attention import NAME
from verl_qerl.verl_plugin.config.apply import prepare

COMMON = """
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
    data.train_files=train.parquet data.val_files=test.parquet data.max_prompt_length=512 data.max_response_length=1024
    data.filter_overlong_prompts=True data.truncation=error
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    trainer.logger=["console","wandb"] trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
"""
EXAMPLES = {
    "tuning/lora/run_qwen3_8b_fsdp": """
        data.train_batch_size=64 actor_rollout_ref.model.path=Qwen/Qwen3-8B
        actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32
        actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.actor.ppo_mini_batch_size=32
        actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288
        actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.fsdp_config.param_offload=False
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
        actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
        actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
        actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=12288
        actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=12288
        trainer.balance_batch=True trainer.val_before_train=False trainer.n_gpus_per_node=2 trainer.total_epochs=15
    """,
    "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora": """
        trainer.val_before_train=False data.train_batch_size=16 data.shuffle=False
        actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct
        actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32
        actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.actor.ppo_mini_batch_size=16
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 actor_rollout_ref.actor.entropy_coeff=0
        actor_rollout_ref.actor.fsdp_config.param_offload=False
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40
        actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40
        trainer.critic_warmup=0 trainer.n_gpus_per_node=2 trainer.total_epochs=15
    """,
    "tuning/3b/qwen2-3b_grpo-lora_1_h100_fsdp_vllm": """
        data.train_batch_size=62 data.val_batch_size=62 data.shuffle=False
        actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.model.use_shm=True
        actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=32
        actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.actor.optim.lr=3e-5
        actor_rollout_ref.actor.ppo_mini_batch_size=62 actor_rollout_ref.actor.ppo_micro_batch_size=62
        actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 actor_rollout_ref.actor.fsdp_config.param_offload=True
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
        actor_rollout_ref.rollout.log_prob_micro_batch_size=62
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.1
        actor_rollout_ref.rollout.max_num_seqs=512 actor_rollout_ref.rollout.max_model_len=1536
        actor_rollout_ref.rollout.max_num_batched_tokens=1536 actor_rollout_ref.rollout.enable_chunked_prefill=False
        actor_rollout_ref.ref.log_prob_micro_batch_size=62 actor_rollout_ref.actor.ulysses_sequence_parallel_size=1
        actor_rollout_ref.actor.entropy_coeff=0.001 algorithm.kl_ctrl.kl_coef=0.001
        trainer.critic_warmup=0 trainer.n_gpus_per_node=1 trainer.total_epochs=1
    """,
}
OURS = ("+rollout=nvfp4", "+aqn.enabled=true")
ONE_GPU = ("trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
each_example = pytest.mark.parametrize("name", EXAMPLES, ids=lambda name: name.rpartition("/")[2])


def prepared(config):
    """The configuration as verl's trainer gets it from ours."""
    prepare(config)
    return config


@pytest.fixture(autouse=True)
def _machine(monkeypatch, without_flash_attn, quick_check):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")  # where the questions are


def composed(name, *overrides):
    options = (COMMON + EXAMPLES[name]).split()
    return verl_config(*options, *overrides)


def checked(config):
    validate_config(config=config, use_reference_policy=True, use_critic=False)
    return prepared(config)


@each_example
@pytest.mark.parametrize("gpus", [(), ONE_GPU], ids=["as published", "one GPU"])
def test_they_run_as_they_are_with_two_options(name, gpus):
    config = checked(composed(name, *OURS, *gpus))
    model, actor = config.actor_rollout_ref.model, omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (model.override_config.attn_implementation, model.use_remove_padding) == (NAME, True)
    assert (model.use_fused_kernels, actor.strategy, actor.fsdp_config.qerl.format) == (True, "fsdp2", "nvfp4")
    kwargs = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert kwargs.additional_config.verl_qerl.aqn.enabled


def test_a_micro_batch_for_all_gpus_is_shared():
    name, all_gpus = "tuning/3b/qwen2-3b_grpo-lora_1_h100_fsdp_vllm", "log_prob_micro_batch_size"
    for gpus, size in ((1, 62), (2, 31), (62, 1)):
        nodes = checked(composed(name, *OURS, f"trainer.n_gpus_per_node={gpus}")).actor_rollout_ref
        for node, option in ((nodes.actor, "ppo_micro_batch_size"), (nodes.rollout, all_gpus), (nodes.ref, all_gpus)):
            assert (node[option], node[f"{option}_per_gpu"]) == (None, size)


@each_example
def test_what_the_user_sets_stays(name):
    named = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    model = checked(
        composed(name, *OURS, named, "actor_rollout_ref.model.use_fused_kernels=False")
    ).actor_rollout_ref.model
    assert (model.override_config.attn_implementation, model.use_fused_kernels) == ("sdpa", False)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if "tensor_model_parallel_size=2" in EXAMPLES[name]])
def test_a_rollout_over_more_gpus_than_there_are_is_refused(name):
    said = (
        r"^actor_rollout_ref\.rollout\.tensor_model_parallel_size=2 does not divide the 1 GPUs of the run .* divisors"
    )
    with pytest.raises(ValueError, match=said):
        checked(composed(name, *OURS, "trainer.n_gpus_per_node=1"))
