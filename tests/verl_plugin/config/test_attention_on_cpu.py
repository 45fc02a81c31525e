"""Which attention a run gets, decided by the trainer and looked at on the driver; flash-attn is not installed here."""

import sys
from types import ModuleType

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from qerl_testing import run_config
from verl.utils.config import validate_config

from verl_qerl.modules.varlen_attention import NAME
from verl_qerl.verl_plugin.config import attention
from verl_qerl.verl_plugin.config.apply import prepare

OPTION = "override_config.attn_implementation"
FLASH = f"+actor_rollout_ref.model.{OPTION}=flash_attention_2"
OURS = (
    ("+rollout=nvfp4",),
    ("+rollout=int8", "actor_rollout_ref.model.lora_rank=0"),
    ("+aqn.enabled=true",),
    ("+uaq.enabled=true", "actor_rollout_ref.model.lora_rank=0"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=acr",),
    ("+qerl.rollout.sampler=stock",),
)
pytestmark = pytest.mark.usefixtures("without_flash_attn")
each_of_ours = pytest.mark.parametrize("ours", OURS, ids=lambda options: options[0].rpartition(".")[2])


def prepared(config):
    """The configuration as verl's trainer gets it from ours."""
    prepare(config)
    return config


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    attention.has_flash_attn.cache_clear()


def composed(*overrides):
    return run_config("actor_rollout_ref.model.lora_rank=8", *overrides)


def attention_of(*overrides):
    """Of actor and reference, and of the critic, as verl's workers get it."""
    config = prepared(composed(*overrides))
    return [OmegaConf.select(config, f"{node}.{OPTION}") for node in ("actor_rollout_ref.model", "critic.model")]


@each_of_ours
def test_a_run_with_an_option_of_ours_needs_no_flash_attn(ours):
    assert attention_of(*ours) == [NAME, NAME]
    assert attention_of(*ours, "algorithm.adv_estimator=grpo") == [NAME, None]  # which trains no critic


@each_of_ours
def test_flash_attn_is_taken_where_it_can_be_imported(installed, ours):
    assert attention_of(*ours) == [None, None]  # verl's default is flash_attention_2


def test_what_the_user_names_stays():
    assert attention_of("+rollout=nvfp4", f"+actor_rollout_ref.model.{OPTION}=sdpa") == ["sdpa", NAME]


def test_a_stock_run_stays_as_it_is():
    before = composed()
    assert attention_of() == [None, None]
    assert prepared(composed()) == before
    assert prepared(composed(FLASH)) == composed(FLASH)


def test_other_engines_are_left_alone():
    config = composed("+aqn.enabled=true")
    config.actor_rollout_ref.actor.strategy = "megatron"
    attention.use_attention(config)
    assert "attn_implementation" not in config.actor_rollout_ref.model.override_config


@each_of_ours
def test_flash_attn_that_is_asked_for_and_not_there_is_refused_on_the_driver(ours):
    said = r"^actor_rollout_ref\.model\.override_config\.attn_implementation=flash_attention_2 needs flash-attn, .* Lea"
    for check in (lambda config: validate_config(config, False, False), prepared):
        with pytest.raises(ValueError, match=said):
            check(composed(*ours, FLASH))


def test_flash_attention_from_the_hub_is_taken(monkeypatch):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name if name == "kernels" else None)
    assert attention_of("+rollout=nvfp4", FLASH) == ["flash_attention_2", NAME]


def test_a_build_for_another_torch_counts_as_missing(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "flash_attn")
    (tmp_path / "flash_attn.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert attention_of("+rollout=nvfp4") == [NAME, NAME]
