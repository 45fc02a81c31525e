"""The benchmark itself, on few steps: what it says of UAQ is the algebra, so it can be asserted."""

import json
import sys
from pathlib import Path

import bench_uaq as bench
import pytest


def test_uaq_is_a_run_with_other_learning_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(bench, "PRETRAIN_STEPS", 5)
    out = tmp_path / "cpu" / "uaq.json"
    command = ["bench_uaq", "--out", str(out), "--steps", "8", "--seeds", "1", "--lr", "1e-5", "--clip", "0.05"]
    monkeypatch.setattr(sys, "argv", command)
    bench.main()
    rows = {(row["arm"], row["scale"], row["clip"]): row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 9
    assert rows["uaq", 2.0, None]["distance_to_twin"] == 0  # to the bit
    assert rows["uaq", 1.5, None]["distance_to_twin"] < 2e-3
    assert rows["uaq", 1.5, 0.05]["distance_to_twin"] > 5e-4  # 2e-4 unclipped; a clipped gradient is another direction
    for scale in (1.5, 2.0):
        uaq, lr, plain = rows["uaq", scale, None], rows["lr", scale, None], rows["plain", 1.0, None]
        for name in ("relative_update_linears", "update_over_error"):
            assert uaq[name] / plain[name] == pytest.approx(scale, rel=0.1)
            assert uaq[name] / lr[name] == pytest.approx(1, rel=0.02)
        assert uaq["relative_update_norms"] / lr["relative_update_norms"] == pytest.approx(1 / scale, rel=0.1)
    assert rows["uaq", 2.0, None]["logits_change_by_folding"] == 0
    assert 0 < rows["uaq", 1.5, None]["logits_change_by_folding"] < 1e-5
    assert capsys.readouterr().out.count("\n") == 2 + len(rows)
