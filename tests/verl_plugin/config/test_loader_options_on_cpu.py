"""Options of the rollout's loader beside ours, which the driver writes there too."""

import re

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from qerl_testing import run_config

from verl_qerl.verl_plugin.config.apply import prepare

VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
LOADER = f"{VLLM}.model_loader_extra_config"


def composed(*overrides):
    return run_config("actor_rollout_ref.model.lora_rank=32", "+rollout=nvfp4", *overrides)


def loader_options(*overrides):
    config = composed(*overrides)
    prepare(config)
    return config.actor_rollout_ref.rollout.engine_kwargs.vllm.model_loader_extra_config


def test_they_must_be_a_group():
    with pytest.raises(ValueError, match=re.escape(f"{LOADER}=[1] is no group of options. Accepted is a ")):
        prepare(composed(f"+{LOADER}=[1]"))


@pytest.mark.parametrize(
    ("given", "told", "ours"),
    [
        (".scale=minmax", "scale=minmax", "scale=None"),
        ('=\'{"scale": "minmax"}\'', "scale=minmax", "scale=None"),
        (".ignore=[mine]", "ignore=['mine']", "ignore=['lm_head']"),
        (".share_base=true", "share_base=True", "share=False"),
    ],
)
def test_what_the_driver_writes_is_set_by_our_options(given, told, ours):
    config = composed(f"+{LOADER}{given}")
    before = OmegaConf.to_container(config)
    name = f"+qerl.base.{ours.partition('=')[0]}"
    said = (
        f"{LOADER}.{told} does not go together with qerl.base.{ours}: the driver writes {name} there. Accepted is null."
        f" Set {name}, for both sides."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        prepare(config)
    assert OmegaConf.to_container(config) == before


def test_they_may_say_the_same_and_more():
    same = [f"+{LOADER}.{one}" for one in ("scale=minmax", "ignore=[lm_head]", "share_base=null")]
    found = {"scale": "minmax", "ignore": ["lm_head"], "share_base": False}
    assert loader_options(*same, "+qerl.base.scale=minmax") == found
    assert loader_options(f"+{LOADER}.other=1") == found | {"scale": None, "other": 1}
