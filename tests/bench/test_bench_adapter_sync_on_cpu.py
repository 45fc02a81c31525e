import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("bench_adapter_sync.py")


@pytest.mark.usefixtures("quick_starts")
def test_an_adapter_of_a_tiny_model_arrives_by_both_ways(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    out = tmp_path / "sync.json"
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--model", "tiny", "--rank", "8", "--repeats", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(out.read_text())
    assert found["correct"]
    assert set(found["ms"]["ours"]) == {"gather", "receive", "write", "read_back", "total", "first"}
    assert set(found["ms"]["verl"]) == {"gather", "total", "first"}
    assert found["ms"]["ours"]["total"] > found["ms"]["ours"]["write"] > found["ms"]["ours"]["read_back"] > 0
