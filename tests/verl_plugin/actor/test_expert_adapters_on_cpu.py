"""Targets of adapters where experts are packed; test_engine_on_cpu.py has them in an engine."""

from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("verl")

import peft
from qerl_testing import random_qwen3_moe

from verl_qerl.checkpoints.experts import ADAPTED
from verl_qerl.modules.convert import replace_experts
from verl_qerl.verl_plugin.actor.expert_adapters import adapt_attention_only


@dataclass(frozen=True)
class Config:
    """The options of verl's HFModelConfig, which cannot be set either."""

    target_modules: Any = "all-linear"
    target_parameters: Any = None
    lora_adapter_path: str | None = None


@pytest.fixture(scope="module")
def experts():
    model = random_qwen3_moe()
    assert replace_experts(model)
    return model


def test_all_linear_means_the_attention(experts):
    config = Config()
    adapt_attention_only(experts, config)
    assert config.target_modules == list(ADAPTED)
    # What it would mean to PEFT: adapters on the router, and none on the attention's dense neighbours.
    found = peft.get_peft_model(experts, peft.LoraConfig(r=4, target_modules=config.target_modules))
    adapted = {name for name, parameter in found.named_parameters() if parameter.requires_grad}
    assert len(adapted) == 2 * 4 * 2
    assert all(".self_attn." in name for name in adapted)


def test_a_model_without_packed_experts_is_left_alone():
    config = Config(target_modules=["gate_proj"])
    adapt_attention_only(random_qwen3_moe(), config)
    assert config == Config(target_modules=["gate_proj"])


def test_targets_within_the_attention_stay(experts):
    config = Config(target_modules=["v_proj"])
    adapt_attention_only(experts, config)
    assert config.target_modules == ["v_proj"]


@pytest.mark.parametrize(
    "config",
    [
        Config(target_modules=["q_proj", "gate_proj", "up_proj"]),
        Config(target_modules=["gate"]),
        Config(target_modules=".*_proj"),
        Config(target_modules=[]),
        Config(target_modules=None),
        Config(target_parameters=["mlp.experts.down_proj"]),
    ],
    ids=str,
)
def test_other_targets_are_refused(experts, config):
    with pytest.raises(
        ValueError, match=r"^adapters of a packed mixture of experts: model\.target_modules=.* Leave both"
    ):
        adapt_attention_only(experts, config)


@pytest.mark.parametrize(("targets", "accepted"), [(["q_proj", "o_proj"], True), (["q_proj", "gate"], False)])
def test_an_adapter_to_start_from_says_its_own_targets(experts, tmp_path, targets, accepted):
    peft.LoraConfig(r=4, target_modules=targets).save_pretrained(tmp_path)
    config = Config(lora_adapter_path=str(tmp_path))
    if accepted:
        adapt_attention_only(experts, config)
        return
    with pytest.raises(ValueError, match=r"model\.target_modules=.*'gate'"):
        adapt_attention_only(experts, config)
