"""verl's own command on a GPU, with attention of ours where flash-attn is not installed, and vLLM's sleep mode."""

import pytest
import torch

pytestmark = pytest.mark.gpu

NVFP4 = ("+rollout=nvfp4", "+aqn.enabled=true", "+aqn.num_stages=3", "trainer.total_training_steps=3")
NUM_NORMS = 2  # of a layer


def assert_in_step(step: dict, noisy: bool) -> None:
    # bf16 on both sides; an adapter that does not arrive makes 2e-2 at this learning rate.
    assert 0 < step["qerl/rollout_kl_k3"] < (1e-2 if noisy else 2e-3)
    assert step["actor/grad_norm"] > 0


def test_a_critic_beside_a_packed_actor_that_goes_on_from_an_adapter(workbench):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapter = workbench.folder / "adapter"
    model = AutoModelForCausalLM.from_pretrained(workbench.model, dtype=torch.bfloat16)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(adapter)

    options = ("algorithm.adv_estimator=gae", f"critic.model.path={workbench.model}", "critic.optim.lr=1e-3")
    options += ("critic.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.actor.use_kl_loss=True")
    options += ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",)
    options += ("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256")
    options += (f"actor_rollout_ref.model.lora_adapter_path={adapter}",)
    run = workbench.train("critic", *NVFP4, *options, on_gpu=True).check()
    assert len(run.steps) == 3, run.log[-6000:]
    assert "critic.model.override_config.attn_implementation is verl_qerl_varlen" in run.log
    for number, step in enumerate(run.steps):
        assert_in_step(step, noisy=number > 0)
        assert step["critic/vf_loss"] > 0
        assert step["critic/grad_norm"] > 0
        assert step["actor/kl_loss"] > 1e-5  # to the base without the adapter, from the first step on
    assert len({step["critic/values/mean"] for step in run.steps}) == 3
    assert [step["aqn/noisy_norms"] > 0 for step in run.steps] == [False, True, True]


def test_activations_offloaded_over_a_base_that_is_shared_with_a_tied_model(workbench):
    model = workbench.random("qwen2", tie_word_embeddings=True, num_hidden_layers=4, gain=2.0)
    options = ("+qerl.base.share=true", "actor_rollout_ref.model.enable_activation_offload=True")
    options += ("actor_rollout_ref.rollout.free_cache_engine=True", "trainer.test_freq=3")
    run = workbench.train("tied", *NVFP4, *options, model=model, on_gpu=True).check()
    assert len(run.steps) == 3, run.log[-6000:]
    assert "packed base: one copy a GPU" in run.log
    assert run.log.count("computes with the packed base of process") == 1
    assert "not necessary to enable async activation offloading" not in run.log
    for number, step in enumerate(run.steps):
        assert_in_step(step, noisy=number > 0)
        assert step["aqn/noisy_norms"] == (4 * NUM_NORMS if number else 0)
