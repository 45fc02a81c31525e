"""Options of the rollout on a stock run: refused on the driver when they are wrong, read by workers otherwise."""

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from verl.utils.config import validate_config

from verl_qerl import vllm_plugin
from verl_qerl.verl_plugin.config.rollout_options import WORKER_EXTENSION, check_rollout
from verl_qerl.verl_plugin.trainer.trainer import prepare

RUN = ("actor_rollout_ref.model.path=model", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
RUN += ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.name=vllm")
RUN += ("actor_rollout_ref.model.lora_rank=8",)
VLLM = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
OPTIONS = f"{VLLM}.additional_config.verl_qerl"


def prepared(config):
    """The configuration as verl's trainer gets it from ours."""
    prepare(None, config)
    return config


def composed(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*RUN, *overrides])


def extension_of(*overrides):
    """What verl's server names to vLLM after our trainer has seen the run; None: its own."""
    config = prepared(composed(*overrides))
    return config.actor_rollout_ref.rollout.engine_kwargs.vllm.get("worker_extension_cls")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{OPTIONS}.lora=singel"], r"^unknown choice: additional_config\.verl_qerl\.lora='singel'\. Accepted are si"),
        ([f"{OPTIONS}.lara=single"], r"^unknown option additional_config\.verl_qerl\.lara='single'\. Known options "),
        ([f"{OPTIONS}=fast"], r"^additional_config\.verl_qerl='fast' is no group of options\."),
        (["+rollout=nvfp4", f"{OPTIONS}.sampler=best"], r"^unknown choice: additional_config\.verl_qerl\.sampler="),
    ],
    ids=["value", "key", "no group", "beside a format"],
)
def test_a_wrong_option_is_refused_before_ray_starts(overrides, message):
    with pytest.raises(ValueError, match=message):
        validate_config(config=composed(*overrides), use_reference_policy=False, use_critic=False)


def test_another_vllm_is_refused_where_an_option_is_set(monkeypatch):
    monkeypatch.setattr(vllm_plugin, "version_problem", lambda: "vllm is 0.25.0. Install 0.24.0.")
    with pytest.raises(RuntimeError, match=r"^vllm is 0\.25\.0\."):
        check_rollout(composed(f"{OPTIONS}.lora=stock"))
    assert not check_rollout(composed())


def test_a_bf16_rollout_with_an_option_has_our_workers(caplog):
    assert extension_of(f"{OPTIONS}.lm_head=fp8") == WORKER_EXTENSION
    assert "worker_extension_cls" not in caplog.text


def test_an_extension_of_the_users_stays_and_a_warning_says_who_reads_the_options(caplog):
    assert extension_of(f"{OPTIONS}.lm_head=fp8", f"{VLLM}.worker_extension_cls=mine.Extension") == "mine.Extension"
    assert (
        f"worker_extension_cls=mine.Extension reads additional_config.verl_qerl if it inherits from {WORKER_EXTENSION}"
        in caplog.text
    )


def test_a_stock_run_keeps_verls():
    assert extension_of() is None
    assert extension_of(f"{VLLM}.additional_config.other=1") is None


def test_a_trainer_refuses_what_a_driver_did_not():
    with pytest.raises(ValueError, match=r"^unknown choice: additional_config\.verl_qerl\.lora="):
        prepared(composed(f"{OPTIONS}.lora=singel"))
