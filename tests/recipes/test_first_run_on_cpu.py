"""The first run of README.md: read from there, composed, checked as on the driver."""

import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


def test_it_composes_and_passes_the_checks_of_the_driver(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")  # where the questions are
    # verl's check imports vLLM to round the rank of the adapter; nothing else of it.
    package = "verl.workers.rollout.vllm_rollout"
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    utils = SimpleNamespace(get_vllm_max_lora_rank=lambda rank: rank)
    monkeypatch.setitem(sys.modules, f"{package}.utils", utils)
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
