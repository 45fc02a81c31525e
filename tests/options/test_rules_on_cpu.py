"""What does not go together: one table, whose rules all hold for the values that they say are accepted."""

import re

import pytest

from verl_qerl.options import rules

# Of each kind of run that a rule is about, as few options as make one.
NVFP4 = {"qerl.base.format": "nvfp4", rules.LORA_RANK: 8}
RUNS = (
    {},
    NVFP4,
    {"qerl.base.format": "int8", rules.LORA_RANK: 8},
    {"qerl.base.format": "nvfp4", rules.LORA_RANK: 0},
    NVFP4 | {"critic.enable": True},
    NVFP4 | {"qerl.base.share": True},
    NVFP4 | {"qerl.base.shard": True},
    {"qerl.rollout": {"lora": "stock"}},
    {"aqn.enabled": True},
    {"aqn.enabled": True, "aqn.draw": "sequence"},
    {"uaq.enabled": True},
    {rules.LOSS_MODE: "acr"},
    *({f"{rules.CORRECTION}.{name}": value} for name, value in (("rollout_is", "token"), ("rollout_rs", "token_k3"))),
    {rules.BYPASS: True},
    {"algorithm.adv_estimator": "grpo_passk"},
    {"trainer.val_only": True},
    {"distillation.enabled": True, "distillation.distillation_loss.loss_mode": "forward_kl_topk"},
    *({f"qerl.gate.{name}": 1} for name in ("max_initial_kl", "max_kl", "mismatch_sample")),
    {"trainer.device": "cpu", rules.LORA_RANK: 8, f"{rules.ROLLOUT}.name": "vllm"},
    {"trainer.device": "cpu", rules.LORA_RANK: 0, "qerl.base.format": "int8"},
    {"trainer.device": "cpu", rules.LORA_RANK: 8, "critic.enable": True},
)
# One that no rule accepts of its setting.
REFUSED = (True, False, 0, 2, 0.5, "dummy", {"verl_qerl": {}}, ["hf_model"], {"a": 1}, "other", 1)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_each_kind_of_run_passes(run):
    rules.check(run.get)


def test_every_rule_can_refuse_and_says_why():
    seen = set()
    for number, rule in enumerate(rules.RULES):
        for run in RUNS:
            for value in REFUSED:
                tried = run | {rule.need.name: value}
                beside = rule.when.beside(tried.get)
                if beside is None or rule.need.accepts(value):
                    continue
                said = rf"^{re.escape(f'{rule.need.name}={value} does not go together with {beside}')}.* Accepted is "
                with pytest.raises(ValueError, match=said):
                    rules.check(tried.get, [rule])
                seen.add(number)
    assert [rule.need.name for number, rule in enumerate(rules.RULES) if number not in seen] == []


def test_what_the_engine_would_refuse_of_four_bits_is_refused_before_it_starts():
    determined = {f"{rules.ROLLOUT}.full_determinism": True}
    with pytest.raises(ValueError, match=r"full_determinism=True does not go together with \+rollout=nvfp4: vLLM's "):
        rules.check((NVFP4 | determined).get)
    rules.check((NVFP4 | determined | {"trainer.device": "cpu"}).get)
    rules.check((NVFP4 | determined | {"qerl.base.format": "int8"}).get)


def test_a_run_that_is_to_validate_alone_does():
    with pytest.raises(
        ValueError, match=r"val_before_train=False does not .* trainer\.val_only=True: verl would train\."
    ):
        rules.check({"trainer.val_only": True, "trainer.val_before_train": False}.get)


def test_options_of_the_kernels_are_no_silent_words_beside_another_engine():
    with pytest.raises(ValueError, match=r"rollout\.name=sglang does not go together with \+qerl\.rollout=\{'lora': "):
        rules.check({"qerl.rollout": {"lora": "stock"}, f"{rules.ROLLOUT}.name": "sglang"}.get)


def test_pass_at_k_needs_two_answers():
    one = {"algorithm.adv_estimator": "grpo_passk", f"{rules.ROLLOUT}.n": 1}
    with pytest.raises(
        ValueError, match=r"rollout\.n=1 does not go together with algorithm\.adv_estimator=grpo_passk: "
    ):
        rules.check(one.get)
    for more in ({f"{rules.ROLLOUT}.n": 2}, {"algorithm.adv_estimator": "grpo"}):
        rules.check((one | more).get)


@pytest.mark.parametrize("alpha", [0, -16, "16", True])
def test_an_adapter_that_can_do_nothing_is_refused(alpha):
    name = f"{rules.MODEL}.lora_alpha"
    with pytest.raises(
        ValueError, match=r"and an adapter: the adapter is scaled by it, .* Accepted is a number above 0"
    ):
        rules.check((NVFP4 | {name: alpha}).get)
    rules.check((NVFP4 | {name: 0.5}).get)
    rules.check({rules.LORA_RANK: 8, name: alpha}.get)


def test_the_reason_and_the_remedy_are_told():
    with pytest.raises(ValueError, match="does not go together") as caught:
        rules.check((NVFP4 | {"qerl.base.share": True, f"{rules.ROLLOUT}.tensor_model_parallel_size": 2}).get)
    assert str(caught.value) == (
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2 does not go together with +qerl.base.share=true: both"
        " sides must hold the whole base on each GPU. Accepted is 1. Set it to 1, or leave +qerl.base.share out."
    )


def test_a_number_in_quotes_is_shown_as_text():
    with pytest.raises(ValueError, match=r"lora_rank='8' does not go together with .* Accepted is a whole number"):
        rules.check((NVFP4 | {rules.LORA_RANK: "8"}).get)
    gpus = {"trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, f"{rules.ROLLOUT}.tensor_model_parallel_size": "1"}
    with pytest.raises(ValueError, match="tensor_model_parallel_size='1' does not divide the 1 GPUs"):
        rules.check_gpus((NVFP4 | gpus).get)
    with pytest.raises(ValueError, match="tensor_model_parallel_size='1' does not divide the 1 GPUs"):
        rules.check_gpus(({"aqn.enabled": True} | gpus).get)


@pytest.mark.parametrize("name", [f"{rules.FSDP}.fsdp_size", "critic.fsdp.fsdp_size"])
def test_groups_of_fsdp_that_leave_gpus_out_are_refused(name):
    run = NVFP4 | {"trainer.n_gpus_per_node": 4, "trainer.nnodes": 2}
    for size in (0, 3, 1.5):
        with pytest.raises(ValueError, match=rf"^{name}={size} does not divide the 8 GPUs .* Set {name}=-1,"):
            rules.check_gpus((run | {name: size}).get)
    for size in (-1, 4, 8, 9):
        rules.check_gpus((run | {name: size}).get)


def test_noise_that_leaves_the_first_token_clean_needs_a_second_one():
    run = {"aqn.enabled": True, "data.max_response_length": 1}
    for draw in ("sequence", "token"):
        with pytest.raises(ValueError, match=rf"max_response_length=1 does not go together with \+aqn\.draw={draw}: "):
            rules.check((run | {"aqn.draw": draw}).get)
        rules.check((run | {"aqn.draw": draw, "data.max_response_length": 2}).get)
    rules.check((run | {"aqn.draw": "batch"}).get)


@pytest.mark.parametrize(("scale", "refused"), [(None, True), (1.5, True), (2.0, False)])
def test_a_scale_that_rounds_needs_float32(scale, refused):
    run = {"uaq.enabled": True, "uaq.scale": scale, f"{rules.FSDP}.model_dtype": "bf16"}
    if refused:
        with pytest.raises(ValueError, match=r"model_dtype=bf16 does not go together with \+uaq\.scale=1\.5: "):
            rules.check(run.get)
    else:
        rules.check(run.get)
    rules.check((run | {f"{rules.FSDP}.model_dtype": "fp32"}).get)


def test_needs_that_are_not_met_are_told():
    assert rules.unmet({}.get, rules.SCORED) is None
    name = f"{rules.ROLLOUT}.top_k"
    assert rules.unmet({name: 20}.get, rules.WHOLE) == f"{name}=20 (accepted is -1 or 0)"


@pytest.mark.parametrize("correction", ["rollout_is", "rollout_rs", "bypass_mode"])
def test_a_correction_that_verl_would_leave_out_is_refused(correction):
    name, without = f"{rules.CORRECTION}.{correction}", {f"{rules.ROLLOUT}.calculate_log_probs": False}
    run = {name: True if correction == "bypass_mode" else "token"}
    with pytest.raises(ValueError, match=rf"log_probs=False does not go together with {re.escape(name)}=.* is True\."):
        rules.check((run | without).get)
    with pytest.raises(ValueError, match=r"loss_type=reinforce does not go .* Accepted is ppo_clip"):
        rules.check((run | {f"{rules.CORRECTION}.loss_type": "reinforce"}).get)
    rules.check((run | {f"{rules.CORRECTION}.loss_type": "ppo_clip"}).get)
    if correction != "bypass_mode":
        with pytest.raises(ValueError, match=rf"bypass_mode=True does not go together with {re.escape(name)}=token: "):
            rules.check((run | {rules.BYPASS: True}).get)
