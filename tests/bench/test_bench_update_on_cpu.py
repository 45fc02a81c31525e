"""The benchmark of the actor's passes, run whole on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl")

from qerl_testing import random_qwen2

pytestmark = pytest.mark.usefixtures("quick_starts")
BENCH = Path(__file__).with_name("bench_update.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    random_qwen2(vocab_size=128, hidden_size=64, intermediate_size=96).save_pretrained(folder)
    return folder


def run(*arguments):
    command = [sys.executable, str(BENCH), *map(str, arguments)]
    env = os.environ | ({} if torch.cuda.is_available() else {"VERL_PLATFORM": "cpu"})
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_arms_are_measured_one_after_the_other_into_one_file(model, tmp_path):
    out, lengths = tmp_path / "update.json", tmp_path / "lengths.json"
    lengths.write_text(json.dumps([[3, 9], [5, 4], [2, 12], [4, 6]]))
    shared = ["--model", model, "--out", out, "--updates", 2, "--tokens", 24]
    run("--arm", "ours_padded", "--entropy", "--answers", 4, "--prompt-tokens", 3, "--answer-tokens", 9, *shared)
    run("--arm", "stock_padded", "--lengths", lengths, "--profile", tmp_path / "profile.txt", *shared)
    content = json.loads(out.read_text())
    ours, stock = content["rows"]
    assert (ours["arm"], stock["arm"]) == ("ours_padded", "stock_padded")
    assert (ours["entropy"], stock["entropy"]) == (True, False)
    assert (ours["tokens"], stock["tokens"], ours["longest"], stock["longest"]) == (48, 45, 12, 14)
    assert all(len(row[key]) == 3 and min(row[key]) > 0 for row in (ours, stock) for key in ("update_s", "log_prob_s"))
    assert "aten::mm" in (tmp_path / "profile.txt").read_text()
    table = run("--table", out).splitlines()
    assert table[0].startswith("| arm | log-probs, s |")
    assert [line.split("|")[1].strip() for line in table[2:]] == ["ours_padded", "stock_padded"]
