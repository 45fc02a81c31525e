"""The runs of verl in the suite compose with verl's configuration."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from qerl_testing import load_beside, random_qwen2

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from verl.utils import fsdp_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPEngineConfig

from verl_qerl.verl_plugin.config.apply import prepare

ROOT = Path(__file__).parents[2]
before = list(sys.path)
JOBS = load_beside(__file__, "suite").suite_jobs.JOBS
sys.path[:] = before


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
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=arguments[arguments.index(marker) + 1 :])
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


def test_the_steps_of_all_arms_are_the_same_but_for_ours(tmp_path):
    found = {}
    for arm in ("ours", "bf16", "bf16_fused"):
        (tmp_path / arm).mkdir()
        (job,) = (job for job in JOBS if job.name == f"train_step_{arm}")
        found[arm] = composed(job, tmp_path / arm)
    ours, stock, fused = found.values()
    assert omega_conf_to_dataclass(ours.actor_rollout_ref.actor).fsdp_config.qerl.has_adapter
    for config in (stock, fused):
        assert "qerl" not in config.actor_rollout_ref.actor.fsdp_config
        assert {"aqn", "qerl"}.isdisjoint(config)
    assert [config.actor_rollout_ref.model.use_fused_kernels for config in found.values()] == [True, False, True]
    for config in found.values():
        assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 128
        assert config.actor_rollout_ref.model.lora_rank == 32


@pytest.mark.parametrize(("shape", "cap", "answers"), [("32b", 80, 32), ("14b", 40, 32), ("7b", 24, 64)])
def test_a_step_inside_less_memory_has_the_answers_that_its_result_says(shape, cap, answers, tmp_path):
    (job,) = (job for job in JOBS if job.name == f"train_step_{shape}")
    config = composed(job, tmp_path)
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == answers
    assert config.actor_rollout_ref.model.path.endswith(f"/{shape}_{cap}gib/model")
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).fsdp_config.qerl.has_adapter


def test_the_fused_baseline_leaves_the_head_to_the_root(monkeypatch):
    model = random_qwen2()
    before = fsdp_utils._select_fsdp2_wrap_targets(model, ["Qwen2DecoderLayer"])
    monkeypatch.setattr(fsdp_utils, "_select_fsdp2_wrap_targets", fsdp_utils._select_fsdp2_wrap_targets)  # put back
    load_beside(__file__, "fused_head")
    after = fsdp_utils._select_fsdp2_wrap_targets(model, ["Qwen2DecoderLayer"])
    assert len(after) == 3  # two layers and the embedding
    assert [module for module in before if module not in after] == [model.lm_head]


def test_an_unknown_arm_is_refused(tmp_path):
    env = os.environ | {"OUT": str(tmp_path / "x.json"), "ARM": "fp8"}
    script = ROOT / "tests" / "bench" / "train_step.sh"
    result = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "unknown arm: ARM=fp8. ours, bf16 and bf16_fused are accepted." in result.stderr
