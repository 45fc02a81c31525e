"""Misspelled nodes, in the configuration that verl composes."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from verl.utils.config import validate_config


def configuration(*overrides: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=["data.train_batch_size=8", *overrides])


@pytest.mark.parametrize(
    ("override", "node"),
    [
        ("+rolout=nvfp4", "rollout"),
        ("+aqm.enabled=true", "uaq or +aqn"),
        ("+aqm.sigma_start=0.1", "aqn"),
        ("+qrel.max_initial_kl=0.1", "qerl"),
        ("+uqa.scale=2", "uaq"),
        ("+platfrom=cpu", "platform"),
    ],
)
def test_a_node_that_nothing_reads_is_refused_on_the_driver(override, node, monkeypatch):
    package = "verl.workers.rollout.vllm_rollout"
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, f"{package}.utils", SimpleNamespace(get_vllm_max_lora_rank=lambda rank: rank))
    with pytest.raises(ValueError, match=rf"^unknown option \+\w+: nothing reads it\. .* Write \+{re.escape(node)}\.$"):
        validate_config(config=configuration(override), use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize("override", ["+aqs.speed=3", "+my_rollout=fast", "+acl=2"])
def test_what_is_the_users_own_stays(override):
    from verl_qerl.verl_plugin.spelling import check_spelling

    check_spelling(configuration(override))
    check_spelling(configuration("+rollout=nvfp4", "actor_rollout_ref.model.lora_rank=8", "+aqn.enabled=true"))
