import importlib.util
import re
import subprocess
import sys

import pytest

from verl_qerl.verl_plugin.config.uses_qerl import refuse_other_programs


def test_a_file_is_the_program_and_what_an_option_names_is_none():
    refuse_other_programs(["python", "-m", "verl.trainer.main_ppo", "+rollout=nvfp4", "a=verl.trainer.sft_trainer"])
    with pytest.raises(SystemExit, match=r"^verl\.trainer\.sft_trainer has no AQN"):
        refuse_other_programs(["python", "/a/verl/trainer/sft_trainer_ray.py", "+rollout=nvfp4"])


@pytest.mark.parametrize(
    "program",
    [
        "verl.experimental.one_step_off_policy.main_ppo",
        "verl.experimental.fully_async_policy.fully_async_main",
        "verl.trainer.main_eval",
        "verl.trainer.main_generation_server",
        "verl.trainer.sft_trainer",
    ],
)
def test_programs_that_know_nothing_of_it(program):
    pytest.importorskip("verl")
    assert importlib.util.find_spec(program)  # a later verl may have renamed it
    command = ["python", "-u", "-m", program, "trainer.n_gpus_per_node=1"]
    refuse_other_programs(command)
    named = re.escape(".".join(program.split(".")[:3]))
    with pytest.raises(SystemExit, match=rf"^{named} has no AQN, .*no \+qerl\.rollout\. Accepted is"):
        refuse_other_programs([*command, "+rollout=int8"])  # and all that test_uses_qerl_on_cpu.py has


def test_such_a_program_does_not_start():
    pytest.importorskip("verl")
    command = [sys.executable, "-m", "verl.trainer.main_generation_server", "+rollout=nvfp4"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 1
    assert "verl.trainer.main_generation_server has no AQN" in result.stderr
    assert "Accepted is verl.trainer.main_ppo." in result.stderr
