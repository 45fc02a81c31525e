"""The benchmark of a merged adapter's sync, run whole on a tiny model."""

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
BENCH = Path(__file__).with_name("bench_merged_sync.py")


def test_both_ways_make_the_same_tensors_and_are_measured_in_turn(tmp_path):
    model = random_qwen2(vocab_size=128, hidden_size=64, intermediate_size=96)
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "merged_sync.json"
    command = [sys.executable, BENCH, "--model", tmp_path / "model", "--out", out, "--syncs", "2"]
    env = os.environ | ({} if torch.cuda.is_available() else {"VERL_PLATFORM": "cpu"})
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["same_bits"] is True
    assert found["bytes"] == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert {way: len(seconds) for way, seconds in found["all_seconds"].items()} == {"verl": 2, "ours": 2}
    assert min(found["seconds"].values()) > 0
