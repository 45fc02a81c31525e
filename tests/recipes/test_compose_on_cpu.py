"""Every recipe's command composes, and its arithmetic is the paper's (Table 4 of arXiv 2510.11696).

A script's arguments are read by running it with a `python3` in front of PATH that only writes them down; they are then
composed in this process. One test runs the real command for both twins and compares it with that composition.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from qerl_testing import flat

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
SCRIPTS = sorted(RECIPES.glob("*/run_qwen2_5_*.sh"))
FOLDERS = sorted({script.parent for script in SCRIPTS})
MULTICAST = ("nvfp4", "bf16")
SCRIPT_IDS = [f"{script.parent.name}/{script.stem}" for script in SCRIPTS]
# Recipes name the folder of the metrics after the time. FAIL: the recorder's python3 has no flash-attn, as this one.
FIXED = {"OMP_NUM_THREADS": "1", "VERL_FILE_LOGGER_ROOT": "/metrics", "FAIL": "import flash_attn"}
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=SCRIPT_IDS)
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
each_twin = pytest.mark.parametrize("twin", MULTICAST)


@dataclass(frozen=True)
class Paper:
    """What Table 4 and equation 3 ask of a recipe; `prompts` of the 32B recipe is its one declared exception."""

    prompts: int
    samples: int
    updates: int
    response: int
    loss_agg_mode: str
    rows: int  # of the training set after the level filter


PAPER = {
    "gsm8k": Paper(128, 8, 4, 4096, "seq-mean-token-mean", 7473),
    "math": Paper(128, 16, 1, 8192, "token-mean", 5579),
    "qwen32b_80gb": Paper(8, 16, 1, 2048, "token-mean", 3987),
}


def run_script(script: Path, path: Path | None = None, *args: str, **env: str) -> subprocess.CompletedProcess:
    """Run a recipe from another folder, with `path` in front of PATH."""
    known = {name: os.environ[name] for name in ("HOME", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    first = str(path or Path(sys.executable).parent)
    return subprocess.run(
        ["bash", str(script), *args],
        cwd="/",
        env={**known, "PATH": f"{first}:{os.environ['PATH']}", **FIXED, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def calls(recorder: Path, script: Path, *args: str, **env: str) -> list[list[str]]:
    """The argument lists of the `python3` calls a recipe makes."""
    result = run_script(script, recorder, *args, **env)
    assert result.returncode == 0, result.stderr
    return [call.strip("\n").split("\n") for call in result.stdout.split("== end\n") if call]


@cache
def composed(recorder: Path, script: Path, twin: str) -> DictConfig:
    """What `main_ppo` would train with."""
    *_, command = calls(recorder, script, ROLLOUT=twin)
    head = ["-m", "verl.trainer.main_ppo", "--config-dir", str(script.parent), "--config-name", "config"]
    assert command[:6] == head
    with initialize_config_dir(config_dir=str(script.parent), version_base=None):
        overrides = [*command[6:], "hydra.searchpath=[pkg://verl.trainer.config]"]
        return compose(config_name="config", overrides=overrides)


def test_every_recipe_is_covered() -> None:
    assert {folder.name for folder in FOLDERS} == set(PAPER)
    assert len(SCRIPTS) == 5


@each_script
def test_doctor_runs_first_and_its_failure_stops_the_recipe(recorder: Path, script: Path) -> None:
    doctor, training = calls(recorder, script)
    assert doctor == ["-m", "verl_qerl", "doctor"]
    assert training[1] == "verl.trainer.main_ppo"
    failed = run_script(script, recorder, FAIL="verl_qerl")
    assert failed.returncode != 0
    assert "main_ppo" not in failed.stdout


@each_script
def test_dry_run_only_prints(recorder: Path, script: Path) -> None:
    (command,) = calls(recorder, script, DRY_RUN="1")
    assert command[-2:] == ["--cfg", "job"]
    assert len(calls(recorder, script, DRY_RUN="0")) == 2


@each_script
def test_variables_and_further_arguments_reach_the_command(recorder: Path, script: Path) -> None:
    variables = {"MODEL_PATH": "/m", "DATA_DIR": "/d", "NUM_GPUS": "4", "NNODES": "2", "GPU_MEMORY": "0.3"}
    *_, command = calls(recorder, script, "trainer.total_epochs=1", **variables)
    assert command[-1] == "trainer.total_epochs=1"
    assert {
        "actor_rollout_ref.model.path='/m'",
        "data.train_files='/d/train.parquet'",
        "data.val_files='/d/test.parquet'",
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=2",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    } < set(command)


@each_script
def test_unknown_twin_is_refused(recorder: Path, script: Path) -> None:
    result = run_script(script, recorder, ROLLOUT="fp8")
    assert result.returncode == 2
    assert "ROLLOUT=fp8. Accepted are nvfp4 and bf16." in result.stderr
    assert result.stdout == ""


def test_scripts_share_their_launch_part() -> None:
    (part,) = {script.read_text().split("# ---- launch: the same in every recipe ----\n")[1] for script in SCRIPTS}
    assert part.splitlines()[-1] == 'source "$RECIPE_DIR/../launch.sh"'


def test_the_real_command_composes_to_the_same(recorder: Path) -> None:
    script = SCRIPTS[0]
    result = run_script(script, None, ROLLOUT="nvfp4", DRY_RUN="1")
    assert result.returncode == 0, result.stderr
    assert flat(OmegaConf.create(result.stdout), resolve=False) == flat(
        composed(recorder, script, "nvfp4"), resolve=False
    )


@each_twin
@each_script
def test_batches_divide(recorder: Path, script: Path, twin: str) -> None:
    config, paper = composed(recorder, script, twin), PAPER[script.parent.name]
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert config.data.train_batch_size == paper.prompts
    assert rollout.n == paper.samples
    assert config.data.train_batch_size == paper.updates * actor.ppo_mini_batch_size
    assert actor.ppo_epochs == 1
    default_gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    for num_gpus in {default_gpus, 1, 2, 4, 8}:
        assert (actor.ppo_mini_batch_size * rollout.n) % num_gpus == 0
        assert (config.data.train_batch_size * rollout.n) % num_gpus == 0


@each_twin
@each_script
def test_lengths_fit(recorder: Path, script: Path, twin: str) -> None:
    config, paper = composed(recorder, script, twin), PAPER[script.parent.name]
    sequence = config.data.max_prompt_length + config.data.max_response_length
    rollout = config.actor_rollout_ref.rollout
    assert config.data.max_response_length == rollout.response_length == paper.response
    assert sequence <= rollout.max_model_len
    assert sequence <= config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    assert sequence <= rollout.log_prob_max_token_len_per_gpu


@each_twin
@each_script
def test_epochs_reach_the_last_step(recorder: Path, script: Path, twin: str) -> None:
    config, paper = composed(recorder, script, twin), PAPER[script.parent.name]
    steps_per_epoch = paper.rows // config.data.train_batch_size  # verl drops the last, short batch
    assert steps_per_epoch * config.trainer.total_epochs >= config.trainer.total_training_steps
    assert 500 <= config.trainer.total_training_steps <= 1000  # the paper's checkpoints


@each_twin
@each_script
def test_table_4(recorder: Path, script: Path, twin: str) -> None:
    config, paper = composed(recorder, script, twin), PAPER[script.parent.name]
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    assert config.algorithm.adv_estimator == "grpo"
    assert not config.algorithm.use_kl_in_reward
    assert not actor.use_kl_loss
    assert actor.entropy_coeff == 0
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    assert actor.loss_agg_mode == paper.loss_agg_mode
    assert actor.optim.lr == {"nvfp4": 1e-5, "bf16": 5e-6}[twin]
    assert config.actor_rollout_ref.rollout.temperature == 1.0
    assert (model.lora_rank, model.lora.merge, model.target_modules) == (32, False, "all-linear")
    if twin == "nvfp4":
        noise = {"enabled": True, "sigma_start": 1e-2, "sigma_end": 5e-4, "num_stages": 10, "schedule": "exponential"}
        assert config.aqn == noise
        assert config.trainer.total_training_steps % config.aqn.num_stages == 0


@each_script
def test_twins_differ_only_in_what_is_declared(recorder: Path, script: Path) -> None:
    nvfp4, bf16 = (flat(composed(recorder, script, twin), resolve=False) for twin in MULTICAST)
    declared = {"actor_rollout_ref.actor.optim.lr", "trainer.experiment_name"}
    declared |= {f"aqn.{key}" for key in ("enabled", "sigma_start", "sigma_end", "num_stages", "schedule")}
    if script.parent.name == "qwen32b_80gb":  # bf16 does not fit on one such GPU
        rollout = "actor_rollout_ref.rollout"
        declared |= {f"{rollout}.gpu_memory_utilization", f"{rollout}.tensor_model_parallel_size"}
        declared |= {"actor_rollout_ref.model.path", "trainer.n_gpus_per_node"}
    with initialize_config_dir(config_dir=str(script.parent), version_base=None):
        overlay = flat(compose(config_name="rollout/nvfp4"), resolve=False)
    declared |= {key for key, value in overlay.items() if bf16.get(key, key) != value}
    missing = object()
    differ = {key for key in nvfp4.keys() | bf16.keys() if nvfp4.get(key, missing) != bf16.get(key, missing)}
    emptied = {key for key in differ if bf16.get(key) == {} and key not in nvfp4}  # {} of verl, filled by nvfp4.yaml
    assert all(any(other.startswith(f"{key}.") for other in overlay) for key in emptied)
    assert differ - emptied == declared


@each_twin
@each_script
def test_verl_accepts_every_key(recorder: Path, script: Path, twin: str) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    config = composed(recorder, script, twin)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.validate(config.trainer.n_gpus_per_node, config.data.train_batch_size, config.actor_rollout_ref.model)
    assert actor.checkpoint.save_lora_only
    assert actor.optim.clip_grad == 0.2  # the one the engine reads; actor.grad_clip is dead
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).n == config.actor_rollout_ref.rollout.n


@each_folder
def test_required_verl_is_the_pin(folder: Path) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    (pin,) = set(re.findall(r'"verl\[.*\]==(.+)"', pyproject))
    (vllm,) = re.findall(r'"(vllm==.+)"', pyproject)
    lines = (folder / "REQUIRED_VERL.txt").read_text().splitlines()
    fields = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert fields["TAG"] == f"v{pin}"
    assert fields["PIP_INSTALL"] == f'pip install "verl[verl-core]=={pin}"'
    assert vllm in fields["NOTES"]


@each_script
def test_the_table_of_recipes_names_the_script(script: Path) -> None:
    rows = [line for line in (RECIPES / "README.md").read_text().splitlines() if line.startswith("|")]
    assert any(f"{script.parent.name}/{script.name}" in row for row in rows)
    assert script.name in (script.parent / "README.md").read_text()
