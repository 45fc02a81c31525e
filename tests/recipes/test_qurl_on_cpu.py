"""Every arm of recipes/qurl composes with verl's configuration and passes the checks that the driver makes."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl")

from qerl_testing import verl_config
from verl.utils.config import omega_conf_to_dataclass

from verl_qerl.verl_plugin.config.apply import prepare

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "qurl" / "from_scratch.sh"
ARMS = [
    "bf16",
    "int8",
    "int8-tis",
    "int8-acr",
    "int8-acr-uaq",
    "fp8",
    "fp8-tis",
    "fp8-acr",
    "fp8-acr-uaq",
    "nvfp4",
    "nvfp4-tis",
    "nvfp4-acr",
]


def started(result):
    """(run, GPU, overrides) of each command that the stub wrote down."""
    calls = [call.strip("\n").split("\n") for call in result.stdout.split("== end\n") if call.strip()]
    return [(Path(call[0]).stem, call[1], call[5:]) for call in calls if "verl.trainer.main_ppo" in call]


def run(folder, **env):
    """Run the script with a `python3` that writes down its arguments and the file that verl would log to."""
    stub = folder / "python3"
    stub.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$VERL_FILE_LOGGER_PATH" "GPU $CUDA_VISIBLE_DEVICES" "THREADS $OMP_NUM_THREADS"\n'
        'printf "%s\\n" "$@" "== end"\n'
        '[ -z "$VERL_FILE_LOGGER_PATH" ] || : >"$VERL_FILE_LOGGER_PATH"\n'
        'case "$VERL_FILE_LOGGER_PATH" in *"${FAIL_LOG:-none}"*) [ -e "$FAIL_ONCE" ] || { : >"${FAIL_ONCE:-/dev/null}";'
        ' exit 1; };; esac\n[ "$2" != "$FAIL" ]\n'
    )
    stub.chmod(0o755)
    settings = {"PATH": f"{folder}:{os.environ['PATH']}", "WORK": str(folder / "work"), "SEEDS": "1"}
    return subprocess.run(
        ["bash", str(SCRIPT)], env=settings | env, capture_output=True, text=True, check=False, timeout=900
    )


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """arm -> overrides of main_ppo."""
    result = run(tmp_path_factory.mktemp("arms"))
    assert result.returncode == 0, result.stderr
    return {name.removesuffix("-seed1"): overrides for name, _, overrides in started(result)}


def test_all_arms_run(commands):
    assert list(commands) == ARMS


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_composes_and_builds(commands, arm):
    config = verl_config(*commands[arm])
    prepare(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    form = arm.partition("-")[0]
    qerl = getattr(actor.fsdp_config, "qerl", None)
    assert (qerl.format if qerl else "bf16") == form
    assert qerl is None or not qerl.has_adapter
    assert (actor.policy_loss.loss_mode == "acr") == ("acr" in arm)
    assert (config.algorithm.rollout_correction.rollout_is == "token") == ("tis" in arm)
    assert ("uaq" in config and config.uaq.enabled) == ("uaq" in arm)
    assert config.actor_rollout_ref.rollout.calculate_log_probs
    assert {config.data.seed, config.actor_rollout_ref.rollout.seed, actor.data_loader_seed} == {1}


@pytest.mark.parametrize("arm", ["int8-arc", "int8_acr", "INT8"])
def test_an_unknown_arm_is_refused_before_anything_runs(tmp_path, arm):
    result = run(tmp_path, ARMS=f"bf16 {arm}")
    assert (result.returncode, result.stdout) == (1, "")
    assert f"unknown arm: ARMS={arm}. <rollout>[-tis|-acr][-uaq] is accepted" in result.stderr


@pytest.mark.parametrize("number", ["0", "x", "-1"])
def test_no_number_of_runs_is_refused_before_anything_runs(tmp_path, number):
    result = run(tmp_path, AT_ONCE=number)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"no number of runs: AT_ONCE={number}. 1 or more are accepted" in result.stderr


def test_a_folder_given_from_here_is_found_from_there(tmp_path):
    ((_, _, overrides),) = started(run(tmp_path, ARMS="bf16", WORK=os.path.relpath(tmp_path / "work")))
    assert f"actor_rollout_ref.model.path='{tmp_path}/work/base'" in overrides


@pytest.mark.parametrize(("data", "longest"), [("gsm8k", (320, 256)), ("arithmetic", (64, 64))])
def test_the_questions_can_be_chosen(tmp_path, data, longest):
    ((_, _, overrides),) = started(run(tmp_path, ARMS="bf16", DATA=data))
    files = tmp_path / "work" / data
    assert {f"data.train_files='{files}/train.parquet'", f"data.val_files='{files}/test.parquet'"} < {*overrides}
    assert {f"data.max_prompt_length={longest[0]}", f"data.max_response_length={longest[1]}"} < {*overrides}
    assert f"actor_rollout_ref.rollout.max_model_len={sum(longest)}" in overrides


def test_unknown_questions_are_refused_before_anything_runs(tmp_path):
    result = run(tmp_path, ARMS="bf16", DATA="math")
    assert (result.returncode, result.stdout) == (1, "")
    assert "unknown questions: DATA=math. gsm8k and arithmetic are accepted." in result.stderr


def test_only_finished_runs_are_kept_and_not_repeated(tmp_path):
    failed = run(tmp_path, ARMS="bf16", FAIL="verl.trainer.main_ppo")
    assert failed.returncode != 0
    assert [path.name for path in (tmp_path / "work").glob("bf16*")] == ["bf16-seed1.part"]
    assert "main_ppo" in run(tmp_path, ARMS="bf16").stdout
    assert "main_ppo" not in run(tmp_path, ARMS="bf16").stdout


def test_one_run_at_a_time_is_on_the_gpu_that_is_named(tmp_path):
    assert {gpu for _, gpu, _ in started(run(tmp_path, ARMS="bf16 int8", GPUS="3"))} == {"GPU 3"}


def logs(folder):
    """(run, GPU, overrides) from the logs of runs beside each other."""
    found = [
        started(subprocess.CompletedProcess([], 0, stdout=path.read_text())) for path in (folder / "work").glob("*.log")
    ]
    return [one for part in found for one in part]


def test_runs_beside_each_other_are_dealt_out_to_the_gpus(tmp_path):
    result = run(tmp_path, ARMS="bf16 int8 fp8 nvfp4 mxfp4", SEEDS="1 2", GPUS="2,3", AT_ONCE="2")
    assert result.returncode == 0, result.stderr
    found = logs(tmp_path)
    names = [f"{arm}-seed{seed}" for arm in ("bf16", "int8", "fp8", "nvfp4", "mxfp4") for seed in (1, 2)]
    assert sorted(name for name, *_ in found) == sorted(names)
    assert sorted(gpu for _, gpu, _ in found) == ["GPU 2"] * 5 + ["GPU 3"] * 5
    for _, _, overrides in found:
        config = verl_config(*overrides)
        rollout = config.actor_rollout_ref.rollout
        assert rollout.engine_kwargs.vllm.kv_cache_memory_bytes == 6_000_000_000
        assert not rollout.free_cache_engine
        assert config.ray_kwargs.ray_init.num_cpus == 16
    assert {path.name for path in (tmp_path / "work").glob("*.jsonl")} == {f"{name}.jsonl" for name in names}
    assert "main_ppo" not in run(tmp_path, ARMS="bf16", SEEDS="1 2").stdout


def test_runs_beside_each_other_share_the_cores(tmp_path):
    cores = tmp_path / "nproc"
    cores.write_text("#!/bin/sh\necho 12\n")
    cores.chmod(0o755)
    run(tmp_path, ARMS="bf16 int8 fp8", GPUS="0 1", AT_ONCE="2")
    assert ["\nTHREADS 3\n" in path.read_text() for path in (tmp_path / "work").glob("*.log")] == [True] * 3


def test_a_run_that_fails_beside_others_is_named_and_stops_none(tmp_path):
    failed = run(tmp_path, ARMS="bf16 int8 fp8", GPUS="0", AT_ONCE="2", FAIL_LOG="int8-seed1")
    assert failed.returncode == 1
    assert "int8-seed1: failed, see" in failed.stderr
    done = {path.name for path in (tmp_path / "work").glob("*.jsonl")}
    assert done == {"bf16-seed1.jsonl", "fp8-seed1.jsonl"}


def test_a_run_that_fails_beside_others_is_tried_once_more(tmp_path):
    once = str(tmp_path / "failed")
    result = run(tmp_path, ARMS="bf16 int8", GPUS="0", AT_ONCE="2", FAIL_LOG="int8-seed1", FAIL_ONCE=once)
    assert (result.returncode, result.stderr) == (0, "")
    assert [name for name, *_ in logs(tmp_path)].count("int8-seed1") == 2  # its log has both
    assert {path.name for path in (tmp_path / "work").glob("*.jsonl")} == {"bf16-seed1.jsonl", "int8-seed1.jsonl"}
