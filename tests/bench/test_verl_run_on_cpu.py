"""The runs of verl in the suite compose with verl's configuration and pass the checks of the driver's side."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_qerl.testing import load_beside

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass

ROOT = Path(__file__).parents[2]
before = list(sys.path)
JOBS = [job for job in load_beside(__file__, "suite").suite_jobs.JOBS if "verl_run.sh" in job.command]
sys.path[:] = before


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_run_composes_and_is_named_after_its_job(job, tmp_path):
    stub = tmp_path / "python3"
    stub.write_text(f'#!/bin/sh\n[ "$2" != verl.trainer.main_ppo ] || printf "%s\\n" "$@" >{tmp_path}/arguments\n')
    stub.chmod(0o755)
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "OUT": str(tmp_path),
        "WORK": str(tmp_path / "work"),
    }
    subprocess.run(["bash", "-euo", "pipefail", "-c", job.command], cwd=ROOT, env=env, check=True, timeout=60)
    overrides = (tmp_path / "arguments").read_text().splitlines()[2:]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert config.trainer.experiment_name == job.name
    assert config.trainer.n_gpus_per_node == job.gpus
    assert actor.fsdp_config.qerl.has_adapter
    assert not config.actor_rollout_ref.rollout.free_cache_engine
