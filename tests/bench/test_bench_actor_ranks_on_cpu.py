"""The benchmark of several ranks, run whole by two gloo ranks on a shape for a CPU."""

import json
import socket
from pathlib import Path

import pytest

pytest.importorskip("peft")
SCRIPT = Path(__file__).with_name("bench_actor_ranks.py")


def test_rows_of_one_and_two_ranks(fresh_process, tmp_path):
    out = tmp_path / "gpu" / "actor_ranks.json"
    options = ["--out", str(out), "--shapes", "tiny", "--tokens", "16", "--repetitions", "1"]
    for ranks in (1, 2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        # What torchrun tells each rank; warm_python tells two of them which they are.
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
        fresh_process(str(SCRIPT), *options, ranks=ranks, **env, CUDA_VISIBLE_DEVICES="", QERL_COMMIT="abc")
    report = json.loads(out.read_text())
    arms = ["bf16_sharded", "nvfp4_replicated", "nvfp4_sharded"]
    assert [(row["arm"], row["gpus"]) for row in report["rows"]] == [(arm, n) for n in (1, 2) for arm in arms]
    assert all(row["step_s"] > 0 and row["tokens_per_s"] > 0 for row in report["rows"])
    assert [row.get("same_bits") for row in report["rows"]] == [None, True, True] * 2
    assert [row.get("repeats") for row in report["rows"]] == [None, True, True] * 2
    assert [row.get("gradient_error") for row in report["rows"]] == [None, 0.0, 0.0] * 2
    assert report["commit"] == "abc"
