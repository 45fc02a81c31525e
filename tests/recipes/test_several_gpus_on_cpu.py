"""The commands of recipes/README.md for several GPUs and nodes: read from there, composed, checked as on the driver."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_dir
from verl.utils.config import omega_conf_to_dataclass, validate_config

from verl_qerl.verl_plugin.config import attention

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SECTION = (RECIPES / "README.md").read_text().partition("## Several GPUs, several nodes")[2].partition("\n## ")[0]
LINES = [line for block in re.findall(r"```bash\n(.*?)```", SECTION, flags=re.S) for line in block.splitlines()]
COMMANDS = [line for line in LINES if "recipes/" in line]


def composed(recorder, command):
    """(configuration, variables) of a line of the README, by running its script with a python3 that writes down."""
    words = shlex.split(command.replace("$PWD", str(RECIPES.parent)))
    at = next(i for i, word in enumerate(words) if word.endswith(".sh"))
    variables = dict(word.split("=", 1) for word in words[:at] if re.fullmatch(r"[A-Z_]+=.+", word))
    script = RECIPES.parent / words[at]
    env = {"PATH": f"{recorder}:{os.environ['PATH']}", "HOME": "/h", **variables}
    done = subprocess.run(
        ["bash", str(script), *words[at + 1 :]], env=env, capture_output=True, text=True, check=True, timeout=900
    )
    *_, call = [part.strip("\n").split("\n") for part in done.stdout.split("== end\n") if part]
    overrides = call[call.index("config") + 1 :]
    with initialize_config_dir(config_dir=str(script.parent), version_base=None):
        config = compose("config", overrides=[*overrides, "hydra.searchpath=[pkg://verl.trainer.config]"])
    return config, variables


def test_the_readme_has_2_and_4_gpus_and_two_nodes():
    found = [(re.findall(r"NUM_GPUS=(\d+)", line), re.findall(r"NNODES=(\d+)", line)) for line in COMMANDS]
    assert found == [(["2"], []), (["2"], []), (["4"], []), (["2"], []), (["8"], ["2"])]
    starts = [line for line in LINES if line.startswith("ray ")]
    # verl's: a head, the others that join it, a job that is submitted once.
    assert [line.split()[:3] for line in starts] == [
        ["ray", "start", "--head"],
        ["ray", "start", "--address=<address>"],
        ["ray", "job", "submit"],
    ]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: re.sub(r"\W+", "_", line)[:60])
def test_a_command_composes_and_passes_the_checks_of_the_driver(recorder, command, monkeypatch, quick_check):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")  # where models and questions are
    # Shared sequences need flash-attn, which the recorder's python3 has as well.
    monkeypatch.setattr(attention, "has_flash_attn", lambda: True)
    config, variables = composed(recorder, command)
    gpus, nodes = int(variables["NUM_GPUS"]), int(variables.get("NNODES", 1))
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes) == (gpus, nodes)
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    rollout, actor = config.actor_rollout_ref.rollout, omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert gpus % rollout.tensor_model_parallel_size == 0  # a rollout stays inside its node
    assert actor.fsdp_config.qerl.shard == ("+qerl.base.shard=true" in command)
    assert actor.fsdp_config.ulysses_sequence_parallel_size == (2 if "ulysses" in command else 1)
    assert config.data.train_batch_size * rollout.n % (gpus * nodes) == 0
    assert actor.ppo_mini_batch_size * rollout.n % (gpus * nodes) == 0


def test_more_prompts_a_step_still_reach_the_last_step(recorder):
    (command,) = [line for line in COMMANDS if "qwen32b" in line]
    config, _ = composed(recorder, command)
    steps_per_epoch = 3987 // config.data.train_batch_size  # rows of MATH, levels 4 and 5; as in test_compose
    assert steps_per_epoch * config.trainer.total_epochs >= config.trainer.total_training_steps
