import subprocess
import sys
from types import ModuleType

import pytest

from verl_qerl.verl_plugin.config import other_programs

MODULE = ModuleType("verl.experimental.fully_async_policy")


@pytest.mark.parametrize(
    "option",
    [
        "+rollout=nvfp4",
        "+aqn.enabled=true",
        "++aqn.sigma_start=0.02",
        "aqn.seed=1",
        "+aqn={enabled: true}",
        "+acr.max_ratio=4",
        "+uaq.enabled=true",
        "+qerl.gate.max_initial_kl=0.1",
        "+qerl.rollout.lora=stock",
    ],
)
def test_stops_a_run_that_asks_for_qerl(monkeypatch, option):
    monkeypatch.setattr(sys, "argv", ["-m", option])
    with pytest.raises(
        SystemExit,
        match=r"^verl\.experimental\.fully_async_policy has no AQN, .*no \+qerl\.rollout\. Accepted is",
    ):
        other_programs.install(MODULE)


@pytest.mark.parametrize("option", ["trainer.n_gpus_per_node=1", "+aqnx.enabled=true", "rollout=nvfp4x"])
def test_leaves_other_runs_alone(monkeypatch, option):
    monkeypatch.setattr(sys, "argv", ["-m", option])
    other_programs.install(MODULE)


@pytest.mark.parametrize("option", ["+aqn.enabled=true", "trainer.n_gpus_per_node=1"])
def test_programs_are_waited_for_where_the_command_line_asks_for_qerl(option):
    code = """
import sys
from verl_qerl.verl_plugin import FAILURE, hooks, other_programs
print(FAILURE, {*other_programs.PROGRAMS} <= {*hooks._waiting})
"""
    command = [sys.executable, "-c", code, option]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout == f"None {option.startswith('+aqn')}\n"


@pytest.mark.parametrize(
    ("program", "option"),
    [("one_step_off_policy.main_ppo", "+aqn.enabled=true"), ("fully_async_policy.fully_async_main", "+rollout=nvfp4")],
)
def test_programs_with_trainers_of_their_own_refuse_to_start(program, option):
    pytest.importorskip("verl")
    command = [sys.executable, "-m", f"verl.experimental.{program}", option]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 1
    package = program.partition(".")[0]
    assert f"verl.experimental.{package} has no AQN" in result.stderr
    assert "Accepted is verl.trainer.main_ppo." in result.stderr
