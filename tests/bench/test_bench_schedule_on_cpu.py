"""The scheduler's benchmark measures both arms of every batch, each with its own scheduler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.usefixtures("quick_starts")
SCRIPT = Path(__file__).with_name("bench_schedule.py")


def test_every_batch_has_both_arms(tmp_path):
    """In a process of its own: an engine leaves its process group behind."""
    out = tmp_path / "schedule.json"
    sizes = ["--batches", "1", "3", "--new-tokens", "20", "--rounds", "2"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *sizes], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert [(row["arm"], row["batch"]) for row in found["rows"]] == [("vllm", 1), ("ours", 1), ("vllm", 3), ("ours", 3)]
    assert all(row["ms"] > 0 and 30 < row["steps"] <= 40 for row in found["rows"])
    assert found["kv_cache_managers"] == {"vllm": "KVCacheManager", "ours": "RoomyKVCacheManager"}
    assert found["commit"]
