"""The benchmark of noise: what an answer is worth, the summary of what was sampled, and an engine of a tiny model."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_noise as bench
import noise_plan as plan
import noise_report as reports
import pytest
from qerl_testing import random_qwen2

SCRIPT = Path(__file__).with_name("bench_noise.py")


def test_settings_come_draw_by_draw_and_share_engines_where_noise_is_of_a_batch() -> None:
    texts = ["bf16", "bf16/additive/batch@0.01,0.02", "bf16/multiplicative/batch@0.1", "bf16/additive/sequence@0.1"]
    found = plan.parse_settings([*texts, "bf16"], 2)
    assert [(one.mode, one.draw, one.sigma) for one in found[:5]] == [
        ("none", "batch", 0.0),
        ("additive", "batch", 0.01),
        ("additive", "batch", 0.02),
        ("multiplicative", "batch", 0.1),
        ("additive", "sequence", 0.1),
    ]
    assert [one.index for one in found] == [0] * 5 + [1] * 5
    assert [len(group) for group in plan.by_engine(found)] == [8, 2]


@pytest.mark.parametrize("text", ["", "bf16/additive", "bf16/additive/batch@", "bf16/additive/batch@0", "bf16@0.1"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no setting: .* Accepted are BASE and BASE/MODE/DRAW@SIGMA"):
        plan.parse_settings([text], 1)


def test_a_line_that_was_cut_off_is_left_out_and_what_follows_is_not(tmp_path: Path) -> None:
    file = tmp_path / "raw.jsonl"
    plan.append_line(file, {"a": 1})
    file.write_text(file.read_text() + '{"b": ')
    assert plan.read_lines(file) == [{"a": 1}]


def row_of(sigma: float, index: int, right: list[int], minus_log_p: list[float]) -> dict[str, Any]:
    setting = plan.Setting("bf16", "additive" if sigma else "none", "batch", sigma, index)
    questions = {"tokens": [10] * len(right), "minus_log_p": minus_log_p, "right": right, "boxed": right}
    return {"setting": dataclasses.asdict(setting), "kl": sigma, "questions": questions}


def test_the_summary_is_that_of_its_definitions(tmp_path: Path) -> None:
    rows = [
        row_of(0.0, 0, [0, 4, 2, 1], [2.0, 4.0, 1.0, 3.0]),
        row_of(0.1, 0, [0, 3, 1, 0], [4.0, 6.0, 3.0, 5.0]),
        row_of(0.1, 1, [0, 3, 1, 0], [5.0, 7.0, 4.0, 6.0]),
    ]
    clean, noisy = reports.summary(rows, answers=4)
    assert (clean["entropy"]["mean"], clean["accuracy"]["mean"], clean["pass"]["mean"]) == (0.25, 0.4375, 0.75)
    assert clean["entropy"]["spread"] is None
    assert (noisy["draws"], noisy["length"]["mean"]) == (2, 2.5)
    assert noisy["entropy"]["each"] == [0.45, 0.55]
    assert noisy["entropy"]["spread"] == pytest.approx(0.0707, abs=1e-3)
    # The first draw adds 2 to every question, the second 3, of 10 tokens each: questions make no difference.
    assert noisy["entropy"]["change"] == pytest.approx(0.25, abs=0.005)
    assert noisy["entropy"]["change_standard_error"] == pytest.approx(0.05 / 2**0.5, rel=0.1)
    assert noisy["accuracy"]["change"] == pytest.approx(-0.1875, abs=0.02)
    assert noisy["pass"]["mean"] == 0.5
    out = tmp_path / "cpu" / "noise.json"
    for line in ({"options": {"answers": 4}}, *rows):
        plan.append_line(tmp_path / "raw.jsonl", line)
    assert reports.report([tmp_path / "raw.jsonl"], out) == 0
    assert json.loads(out.read_text())["rows"] == [clean, noisy]
    assert out.with_suffix(".png").stat().st_size > 10000
    with pytest.raises(ValueError, match="different numbers of questions"):
        reports.summary([*rows, row_of(0.2, 0, [0], [1.0])], answers=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from chat_tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["How many apples has Mia? 4 + 3 = 7"] * 8, 320)
    tokenizer.save_pretrained(folder)
    model = random_qwen2(gain=2.0, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(4.0)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    return folder


def run(*arguments: str) -> subprocess.CompletedProcess:
    env = os.environ | {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.usefixtures("quick_starts")
def test_noise_acts_in_an_engine_and_changes_its_mode_there(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("math_verify")
    (tmp_path / "test.jsonl").write_text(
        "".join(json.dumps({"question": f"What is 1 + {i}?", "answer": f"#### {1 + i}"}) + "\n" for i in range(8))
    )
    out = tmp_path / "raw.jsonl"
    modes = ["nvfp4:mse", "nvfp4:mse/additive/batch@0.3", "nvfp4:mse/multiplicative/batch@0.3"]
    options = f"--model {model} --data {tmp_path}/test.jsonl --out {out} --questions 8 --answers 2 --max-tokens 24"
    command = [*options.split(), "--sequences", "16", "--scored", "16", "--draws", "2", "--settings", *modes]
    done = run(*command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    header, *rows = plan.read_lines(out)
    assert header["options"]["questions"] == 8
    kl = {(row["setting"]["mode"], row["setting"]["index"]): row["kl"] for row in rows}
    assert len(rows) == len(kl) == 6
    floor = max(kl["none", 0], kl["none", 1])
    assert all(found > 5 * floor for (mode, _), found in kl.items() if mode != "none"), kl
    assert kl["additive", 0] != kl["additive", 1]
    # Norms are 4, so that multiplicative noise is four times as large.
    assert all(kl["multiplicative", index] > 3 * kl["additive", index] for index in (0, 1)), kl
    assert all(len(row["questions"]["tokens"]) == 8 for row in rows)
    assert bench.main(command) == 0
    assert "has all of these settings" in capsys.readouterr().out
    assert len(plan.read_lines(out)) == 7
    assert bench.main(["--report", str(out), "--out", str(tmp_path / "noise.json")]) == 0
    assert capsys.readouterr().out.count("\n") == 2 + 3
