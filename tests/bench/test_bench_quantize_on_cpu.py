"""The benchmark itself, on a model of a few kilobytes."""

import json
from pathlib import Path

import bench_quantize as bench
import pytest


def test_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LINEARS", {"self_attn.o_proj": (32, 64), "mlp.down_proj": (64, 32)})
    monkeypatch.setattr(bench, "gate_passes", lambda: True)
    out = tmp_path / "results/quantize.json"
    arguments = ["--out", str(out), "--layers", "2", "--repetitions", "1", "--scales", "mse", "--dir", str(tmp_path)]
    assert bench.main(arguments) == 0
    report = json.loads(out.read_text())
    assert report["bytes"] == 2 * (2 * 32 * 64 + 3584) * 2  # layers, two linears and a norm, bf16
    assert set(report["gb_per_s"]) == {"plain read", "safetensors", "stream mse", "quantize mse"}
    assert all(rates["cold"] >= 0 and rates["warm"] >= 0 for rates in report["gb_per_s"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_nothing_is_timed_when_the_tests_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "gate_passes", lambda: False)
    assert bench.main(["--out", str(tmp_path / "quantize.json")]) == 1
    assert not list(tmp_path.iterdir())
