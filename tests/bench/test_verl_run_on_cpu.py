"""The runs of verl in the suite compose with verl's configuration."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl")

from qerl_testing import verl_config
from suite_jobs import JOBS
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPEngineConfig

from verl_qerl.verl_plugin.config.apply import prepare

ROOT = Path(__file__).parents[2]


def composed(job, folder):
    """verl's configuration as the job's command makes it; a stub writes down the overrides, which follow `marker`."""
    marker = "--" if "train_step" in job.name else "verl.trainer.main_ppo"
    stub = folder / "python3"
    stub.write_text(f'#!/bin/sh\ncase " $* " in *" {marker} "*) printf "%s\\n" "$@" >{folder}/arguments;; esac\n')
    stub.chmod(0o755)
    for name in ("base", "moe", "qwen3", "llama"):
        (folder / "work" / name).mkdir(parents=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / "work" / "base" / name).touch()
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder), "WORK": str(folder / "work")}
    subprocess.run(["bash", "-euo", "pipefail", "-c", job.command], cwd=ROOT, env=env, check=True, timeout=60)
    arguments = (folder / "arguments").read_text().splitlines()
    config = verl_config(*arguments[arguments.index(marker) + 1 :])
    prepare(config)
    return config


@pytest.mark.parametrize("job", [job for job in JOBS if "verl_run" in job.command], ids=lambda job: job.name)
def test_a_run_composes_and_is_named_after_its_job(job, tmp_path):
    config = composed(job, tmp_path)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert config.trainer.experiment_name == job.name
    assert config.trainer.n_gpus_per_node == job.gpus
    assert config.actor_rollout_ref.rollout.free_cache_engine == (not job.small)
    if "bf16" in job.name:
        assert type(actor.fsdp_config) is FSDPEngineConfig
        assert {"aqn", "qerl"}.isdisjoint(config)
    else:
        assert actor.fsdp_config.qerl.has_adapter


@pytest.mark.parametrize(("shape", "cap", "answers"), [("32b", 80, 32), ("14b", 40, 32), ("7b", 24, 64)])
def test_a_step_inside_less_memory_has_the_answers_that_its_result_says(shape, cap, answers, tmp_path):
    (job,) = (job for job in JOBS if job.name == f"train_step_{shape}")
    config = composed(job, tmp_path)
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == answers
    assert config.actor_rollout_ref.model.path.endswith(f"/{shape}_{cap}gib/model")
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).fsdp_config.qerl.has_adapter
