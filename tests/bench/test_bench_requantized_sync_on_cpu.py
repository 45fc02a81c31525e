"""The benchmark of requantized syncs: one arm of a tiny model, with verl's sender and receiver in two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("verl")
pytestmark = pytest.mark.usefixtures("quick_starts")
SCRIPT = Path(__file__).with_name("bench_requantized_sync.py")


def test_an_arm_syncs_and_samples(tmp_path):
    out = tmp_path / "found.json"
    options = (
        "--model tiny --arms int8 --syncs 2 --batches 1 2 --prompt 16 --new-tokens 4 --answer-tokens 8 --bucket-mb 1"
    )
    env = os.environ | {"VERL_PLATFORM": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--out", str(out), *options.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert "error" not in row, row
    linears = 2 * (128 * 128 * 2 + 64 * 128 * 2 + 256 * 128 * 3)
    assert linears < row["sync_bytes"] < 2 * linears
    assert set(row["decode_ms_per_step"]) == {"1", "2"}
    assert 0 < row["tokens_per_s_with_sync"] < row["tokens_per_s"]
