"""The benchmark of verl's server: both ways to ask, over one engine of a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("verl")
SCRIPT = Path(__file__).with_name("bench_answers.py")


def test_both_ways_are_measured(tmp_path):
    out = tmp_path / "found.json"
    options = "--model tiny --batches 2 16 --prompt 16 --new-tokens 48 --realistic 1 2 --repeats 1"
    env = os.environ | {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parents[2]), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), "--out", str(out), *options.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert [(row["arm"], row["answers"], row["new_tokens"]) for row in found["rows"]] == [
        (arm, answers, length) for answers, length in ((2, 48), (16, 48), (2, "realistic")) for arm in ("verl", "ours")
    ]
    for row in found["rows"]:
        assert row["tokens_per_s"] > 0
        assert 0 < row["server_share"] < 2
        assert 0 < row["engine_share"] < 2
    verl, ours = found["rows"][2:4]
    assert ours["server_share"] * ours["seconds"] < verl["server_share"] * verl["seconds"]
