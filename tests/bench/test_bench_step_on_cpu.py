"""Arms of bench_step.py: what they have in common, and what is made of their files; the runs themselves need GPUs."""

import json
import os
import shlex
import subprocess

import pytest
from qerl_testing import load_beside, random_qwen2

pytest.importorskip("verl")

import bench_step as bench
from qerl_testing import verl_config
from verl.utils import fsdp_utils
from verl.utils.config import omega_conf_to_dataclass

from verl_qerl.verl_plugin.config.apply import prepare

OVERRIDES = ["data.train_batch_size=16", "data.max_response_length=2048"]


@pytest.fixture
def args(tmp_path):
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    where = ["--out", str(tmp_path / "out.json"), "--model", str(tmp_path), "--data", str(tmp_path / "data")]
    return bench.parse([*where, "--arms", *bench.ARMS, "--", *OVERRIDES])


def composed(arm, args, tmp_path):
    """verl's configuration as the study would start it."""
    asked = bench.command(arm, args, tmp_path / "work")
    asked.insert(asked.index("--"), "--dry-run")
    said = subprocess.run(asked, capture_output=True, text=True, check=True, env=os.environ | {"QERL_COMMIT": "x"})
    _, _, _, *given = (word for word in shlex.split(said.stdout) if word.strip())  # python -m main_ppo
    config = verl_config(*given)
    prepare(config)
    return config


def test_arms_are_the_same_run_but_for_what_is_measured(args, tmp_path):
    found = {name: composed(arm, args, tmp_path) for name, arm in bench.ARMS.items()}
    for name, config in found.items():
        model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
        assert (config.data.train_batch_size, config.data.max_response_length) == (16, 2048)
        assert (model.lora_rank, model.use_fused_kernels, model.use_remove_padding) == (32, True, True)
        assert actor.use_dynamic_bsz
        assert model.lora.merge == name.startswith("stock_merged")
        assert model.enable_gradient_checkpointing == (name != "stock_merged_kept")
        fsdp = omega_conf_to_dataclass(actor).fsdp_config
        if name == "ours":
            assert fsdp.qerl.has_adapter
            continue
        assert not hasattr(fsdp, "qerl")
        assert fsdp.model_dtype == "bfloat16"


def test_the_head_of_a_stock_run_stays_with_the_root(monkeypatch):
    model = random_qwen2()
    before = fsdp_utils._select_fsdp2_wrap_targets(model, ["Qwen2DecoderLayer"])
    monkeypatch.setattr(fsdp_utils, "_select_fsdp2_wrap_targets", fsdp_utils._select_fsdp2_wrap_targets)  # put back
    load_beside(__file__, "fused_head")
    after = fsdp_utils._select_fsdp2_wrap_targets(model, ["Qwen2DecoderLayer"])
    assert len(after) == 3  # two layers and the embedding
    assert [module for module in before if module not in after] == [model.lm_head]


# Stands in for the study: a file with so many steps, each as long as its name says.
STUDY = """
import json, os, sys
out = sys.argv[sys.argv.index("--out") + 1]
arm = sys.argv[sys.argv.index("--arms") + 1]
os.makedirs(out)
step = {"nvfp4_aqn": [50, 10, 12, 11], "bf16": [60, 20, 30, 22, None], "bf16_merge": [70]}[arm]
own = [os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "VERL_USE_EXTERNAL_MODULES")]
metrics = {"timing_s/step": step, "timing_s/gen": step, "actor/perf/max_memory_allocated_gb": [2.5, None, 3.5]}
run = {"gpu": "NVIDIA X", "state": "done", "options": own, "metrics": metrics}
session = {"versions": {"verl": "0.9.1"}, "cores": 8}
json.dump({"session": session, "runs": {"name": run}}, open(out + "/first.json", "w"))
"""

LOCK = """
import atexit, os, time
lock = "{folder}/gpu" + os.environ["CUDA_VISIBLE_DEVICES"]
os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
atexit.register(os.unlink, lock)
time.sleep(0.3)
"""


@pytest.fixture
def measured(args, tmp_path, monkeypatch):
    script = tmp_path / "study.py"
    script.write_text(STUDY)
    monkeypatch.setattr(bench, "STUDY", script)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    where = ["--out", str(tmp_path / "out.json"), "--model", str(tmp_path), "--data", str(tmp_path)]

    def measure(*arms, gpus="4,7"):
        code = bench.main([*where, "--arms", *arms, "--gpus", gpus])
        return code, json.loads((tmp_path / "out.json").read_text())

    return measure


def test_steps_after_the_first_count(measured, capsys):
    code, result = measured("ours", "stock")
    assert code == 0
    ours, stock = result["rows"]
    assert ours["seconds"]["step"] == [10, 12, 11]
    assert ours["median_s"] == {"step": 11, "rollout": 11}
    assert (stock["median_s"]["step"], stock["gpu"]) == (22, "NVIDIA X")
    assert (ours["options"], stock["options"]) == (["4", ""], ["7", "fused_head"])
    assert (result["versions"], result["cores"]) == ({"verl": "0.9.1"}, 8)
    assert (ours["peak_allocated_gb"], stock["peak_allocated_gb"]) == (3.5, 3.5)
    assert "| stock | 22.0 (20.0 to 30.0) | 22.0 | - | - | - | 2.00 | 3.5 |" in capsys.readouterr().out


def test_an_arm_without_a_second_step_is_an_error(measured):
    code, result = measured("ours", "stock_merged")
    assert code == 1
    assert result["rows"][1]["median_s"] == {}


def test_the_file_has_what_ended_when_a_later_arm_is_cut(measured, tmp_path, monkeypatch):
    run = bench.subprocess.run

    def cut(command, **options):
        if "bf16_merge" in command:
            raise OSError("cut")
        return run(command, **options)

    monkeypatch.setattr(bench.subprocess, "run", cut)
    with pytest.raises(OSError, match="cut"):
        measured("ours", "stock", "stock_merged", gpus="4")
    result = json.loads((tmp_path / "out.json").read_text())
    assert sorted(row["arm"] for row in result["rows"]) == ["ours", "stock"]
    with pytest.raises(OSError, match="cut"):
        measured("stock_merged", "ours", gpus="4")  # whose GPU the next arm gets


def test_with_fewer_gpus_arms_wait_for_one(measured, tmp_path):
    """The stand-in takes the lock of its GPU, and dies where another has it."""
    (tmp_path / "study.py").write_text(LOCK.format(folder=tmp_path) + STUDY)
    code, result = measured("ours", "stock", "stock_merged_kept", "stock_merged")
    assert [row["arm"] for row in result["rows"]] == ["ours", "stock", "stock_merged_kept", "stock_merged"]
    assert {row["options"][0] for row in result["rows"]} == {"4", "7"}
    assert code == 1  # arms of one step
