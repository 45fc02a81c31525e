"""The first run of README.md: read from there, composed, checked as on the driver."""

import shlex
from pathlib import Path

import pytest

pytest.importorskip("verl")

from qerl_testing import verl_config
from verl.utils.config import omega_conf_to_dataclass, validate_config

README = Path(__file__).resolve().parents[2] / "README.md"


def overrides() -> list[str]:
    """Of the command, which is one line once its backslashes are gone."""
    section = README.read_text().partition("\n## Run\n")[2].replace("\\\n", " ")
    (line,) = (line for line in section.splitlines() if "verl.trainer.main_ppo" in line)
    return shlex.split(line.partition("main_ppo")[2])


def test_it_composes_and_passes_the_checks_of_the_driver(monkeypatch, quick_check):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")  # where the questions are
    config = verl_config(*overrides())
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.fsdp_config.qerl.format == "nvfp4"
    assert config.aqn.enabled
    # What verl's defaults would break on one GPU, or leave out.
    assert (config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.tensor_model_parallel_size) == (1, 1)
    assert config.actor_rollout_ref.model.use_remove_padding
    assert "file" in config.trainer.logger
    assert config.trainer.save_freq > 0
