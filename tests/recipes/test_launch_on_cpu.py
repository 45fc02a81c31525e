"""What recipes/launch.sh decides: the attention, the name of a run, where its metrics go."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_dir

from verl_qerl.modules.varlen_attention import NAME

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SCRIPTS = sorted(RECIPES.glob("*/run_qwen2_5_*.sh"))
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=[f"{path.parent.name}/{path.stem}" for path in SCRIPTS])
NO_FLASH = {"FAIL": "import flash_attn"}  # the recorder's python3 fails for it


def run(recorder, script, *args, folder="/", **env):
    """The process of a recipe whose python3 only writes down, and the overrides of main_ppo."""
    env = {"PATH": f"{recorder}:{os.environ['PATH']}", "HOME": "/h", **env}
    done = subprocess.run(
        ["bash", str(script), *args], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=900
    )
    *_, call = [part.strip("\n").split("\n") for part in done.stdout.split("== end\n") if part] or [["config"]]
    return done, call[call.index("config") + 1 :]


def composed(script, overrides):
    with initialize_config_dir(config_dir=str(script.parent), version_base=None):
        return compose("config", overrides=[*overrides, "hydra.searchpath=[pkg://verl.trainer.config]"])


def name_of(script, overrides):
    return composed(script, overrides).trainer.experiment_name


@each_script
@pytest.mark.parametrize("rollout", ["nvfp4", "bf16"])
def test_without_flash_attn_both_runs_take_an_attention_that_needs_none(recorder, script, rollout):
    done, overrides = run(recorder, script, ROLLOUT=rollout, **NO_FLASH)
    assert (done.returncode, done.stderr) == (0, "")
    config = composed(script, overrides)
    assert config.trainer.experiment_name.endswith(f"_{rollout}")
    model = config.actor_rollout_ref.model
    assert model.override_config.attn_implementation == NAME
    assert model.use_remove_padding
    named = "++actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    _, overrides = run(recorder, script, named, ROLLOUT=rollout, **NO_FLASH)
    assert composed(script, overrides).actor_rollout_ref.model.override_config.attn_implementation == "sdpa"


@each_script
def test_flash_attn_is_taken_where_it_can_be_imported(recorder, script):
    done, overrides = run(recorder, script)
    assert (done.returncode, done.stderr) == (0, "")
    config = composed(script, overrides)
    assert "attn_implementation" not in config.actor_rollout_ref.model.override_config
    assert config.actor_rollout_ref.model.use_remove_padding
    assert config.actor_rollout_ref.actor.use_dynamic_bsz


@pytest.mark.parametrize("folder", ["/a b/M\u00fcller", "/it's (1)", "/x{y}=z"])
def test_folders_may_have_any_name(recorder, folder):
    _, overrides = run(recorder, SCRIPTS[0], DATA_DIR=folder, MODEL_PATH=f"{folder}/m", VERL_FILE_LOGGER_ROOT=folder)
    config = composed(SCRIPTS[0], overrides)
    assert (config.data.train_files, config.data.val_files) == (f"{folder}/train.parquet", f"{folder}/test.parquet")
    assert config.actor_rollout_ref.model.path == f"{folder}/m"
    assert folder == config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_ROOT


@each_script
def test_the_ablation_without_noise_has_a_name_of_its_own(recorder, script):
    _, overrides = run(recorder, script, "aqn.enabled=false")
    assert name_of(script, overrides).endswith("_nvfp4_nonoise")


def test_the_ablation_without_noise_does_not_resume_the_run_with_it(recorder):
    script, names = SCRIPTS[0], {}
    for argument in ("trainer.save_freq=5", "aqn.enabled=false", "++aqn.enabled=False", "aqn.enabled=True"):
        _, overrides = run(recorder, script, argument)
        names[argument] = name_of(script, overrides)
    qerl = names["trainer.save_freq=5"]
    assert qerl.endswith("_nvfp4")
    assert names["aqn.enabled=True"] == qerl
    assert names["aqn.enabled=false"] == names["++aqn.enabled=False"] == f"{qerl}_nonoise"
    _, overrides = run(recorder, script, ROLLOUT="bf16")
    assert name_of(script, overrides) not in names.values()
    _, overrides = run(recorder, script, "aqn.enabled=false", "trainer.experiment_name=mine")
    assert name_of(script, overrides) == "mine"


@each_script
def test_a_second_start_leaves_the_metrics_of_the_first_alone(recorder, script, tmp_path, monkeypatch):
    from verl.utils.tracking import FileLogger

    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    clock = tmp_path / "date"
    for time in ("20260101_120000", "20260101_130000"):
        clock.write_text(f"#!/bin/sh\necho {time}\n")
        clock.chmod(0o755)
        _, overrides = run(recorder, script, folder=tmp_path, PATH=f"{tmp_path}:{recorder}:{os.environ['PATH']}")
        config = composed(script, overrides)
        for name, value in config.ray_kwargs.ray_init.runtime_env.env_vars.items():
            monkeypatch.setenv(name, value)
        logger = FileLogger(config.trainer.project_name, config.trainer.experiment_name)
        logger.log({"time": time}, 1)
        logger.finish()
        written = sorted(
            tmp_path.glob(f"metrics/*/{config.trainer.project_name}/{config.trainer.experiment_name}.jsonl")
        )
        assert [time in path.read_text() for path in written] == [False] * (len(written) - 1) + [True]
    assert [path.parts[-3] for path in written] == ["20260101_120000", "20260101_130000"]


def test_the_folder_of_the_metrics_can_be_chosen(recorder):
    _, overrides = run(recorder, SCRIPTS[0], VERL_FILE_LOGGER_ROOT="/mine")
    config = composed(SCRIPTS[0], overrides)
    assert config.ray_kwargs.ray_init.runtime_env.env_vars == {"VERL_FILE_LOGGER_ROOT": "/mine"}
