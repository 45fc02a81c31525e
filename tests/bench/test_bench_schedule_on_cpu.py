"""The scheduler's benchmark measures both arms of every batch, each with its own scheduler."""

import json

import pytest

from verl_qerl.testing import load_beside

pytest.importorskip("vllm")


@pytest.fixture
def bench():
    return load_beside(__file__, "bench_schedule")


def test_every_batch_has_both_arms(bench, tmp_path, monkeypatch):
    managers, timed = {}, bench.schedule_ms

    def watched(engine, batch, new_tokens):
        manager = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        managers[type(manager).__name__] = managers.get(type(manager).__name__, 0) + 1
        return timed(engine, batch, new_tokens)

    monkeypatch.setattr(bench, "schedule_ms", watched)
    out = tmp_path / "schedule.json"
    arguments = ["--out", str(out), "--batches", "1", "3", "--new-tokens", "20", "--rounds", "2"]
    assert bench.main(arguments) == 0
    found = json.loads(out.read_text())
    assert [(row["arm"], row["batch"]) for row in found["rows"]] == [("vllm", 1), ("ours", 1), ("vllm", 3), ("ours", 3)]
    assert all(row["ms"] > 0 and 30 < row["steps"] <= 40 for row in found["rows"])
    assert managers == {"KVCacheManager": 4, "RoomyKVCacheManager": 4}
    assert found["commit"]
