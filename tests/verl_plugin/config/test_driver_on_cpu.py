"""verl asks the policy loss before it starts Ray; a verl that was changed costs the early check and nothing else."""

import dataclasses
import logging

import pytest

pytest.importorskip("verl")

import verl.utils
import verl.utils.config

from verl_qerl.verl_plugin.config import driver

RUN = (
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.policy_loss.loss_mode=acr",
    "actor_rollout_ref.rollout.calculate_log_probs=False",
)


def test_verl_has_it_in_both_places():
    assert verl.utils.config.validate_config is verl.utils.validate_config
    assert verl.utils.config.validate_config.__wrapped__


def test_a_changed_verl_is_told(monkeypatch, caplog):
    shim = dataclasses.replace(driver.CONFIG_CHECK, patch="verl/9999")
    monkeypatch.setattr(driver, "CONFIG_CHECK", shim)
    with caplog.at_level(logging.WARNING, logger=driver.__name__):
        driver.install(verl.utils)
    (message,) = caplog.messages
    assert message.startswith(
        "options of ACR, UAQ and the gate are checked only after Ray has started: cannot replace verl.utils.config:"
    )


def test_main_ppo_stops_before_ray(fresh_process, tmp_path):
    ray_dir = tmp_path / "ray"
    command = ["-m", "verl.trainer.main_ppo", *RUN, f"hydra.run.dir={tmp_path}"]
    found = fresh_process(*command, fails=True, RAY_TMPDIR=str(ray_dir))
    assert "calculate_log_probs=False does not go together with" in found.stderr
    assert "Started a local Ray instance" not in found.stderr
    assert not ray_dir.exists()
