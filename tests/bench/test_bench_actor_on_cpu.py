"""The benchmark of the actor, run whole on a shape for a CPU; its gate, its files and its table."""

import json
import statistics

import pytest
import torch

pytest.importorskip("peft")


import bench_actor as bench

models = bench.models
SMALL = ["--shapes", "tiny", "--tokens", "32", "16", "--vocabulary", "64", "--repetitions", "1"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "gpu" / "actor.json"
    assert bench.main(["--out", str(out), *SMALL]) == 0
    return json.loads(out.read_text())


def test_a_row_for_every_arm_and_case(report):
    arms = set(models.ARMS) - set(report["skipped"])
    assert {"bf16_peft", "bf16_fused", "nvfp4_peft", "nvfp4_fused"} <= arms
    cases = [(row["arm"], row["model"], row["tokens"], row["checkpointing"]) for row in report["rows"]]
    assert sorted(cases) == sorted((arm, "tiny", t, c) for arm in arms for t in (32, 16) for c in (False, True))
    assert all(row[phase] > 0 for row in report["rows"] for phase in bench.PHASES)
    # A CPU computes what it launches. Another process may come between two looks at the clock, if not at every row.
    ratios = [row["host_ms"] / (row["forward_ms"] + row["backward_ms"]) for row in report["rows"]]
    assert 0.99 < min(ratios) <= statistics.median(ratios) < 1.3
    assert {row["layers"] for row in report["rows"]} == {2}
    assert [(row["tokens"], row["forward_ms"] > 0, row["backward_ms"] > 0) for row in report["heads"]] == [
        (32, True, True),
        (16, True, True),
    ]


def test_says_what_was_measured(report):
    assert {"gpu", "driver", "commit", "time"} <= set(report)
    assert {"torch", "transformers", "peft"} <= set(report["versions"])
    assert report["options"] == {"rank": models.RANK, "sequence": bench.SEQUENCE}


def test_the_base_in_memory_is_that_of_the_arm(report):
    gib = {row["arm"]: row["layer_gib"] for row in report["rows"]}
    assert gib["nvfp4_peft"] == gib["nvfp4_fused"] <= gib["bf16_peft"]


def test_every_arm_but_nf4_computes_with_the_same_weights(report):
    errors = report["gate"]["tiny"]
    assert set(errors) == {row["arm"] for row in report["rows"]}
    assert all(found["output"] < 0.02 for name, found in errors.items() if name != "nf4_peft")


@pytest.mark.parametrize("what", ["forward", "gradient"])
def test_a_wrong_arm_is_not_timed(what, tmp_path, monkeypatch):
    right = models.build

    def wrong(base, arm, device):
        model = right(base, arm, device)
        if arm.fused:
            name = next(name for name, _ in model.named_parameters() if "lora_B" in name)
            parameter = model.get_parameter(name)
            if what == "forward":
                parameter.data.mul_(2)
            else:
                parameter.register_hook(lambda grad: 2 * grad)
        return model

    monkeypatch.setattr(models, "build", wrong)
    with pytest.raises(RuntimeError, match=r"^tiny nvfp4_fused did not pass the gate: .* Nothing is timed\.$"):
        bench.main(["--out", str(tmp_path / "actor.json"), *SMALL, "--arms", "nvfp4_fused"])
    assert not (tmp_path / "actor.json").exists()


def test_the_table_by_hand(tmp_path, capsys):
    row = {"model": "7b", "tokens": 8192, "checkpointing": False, "log_prob_ms": 2.0, "forward_ms": 3.0}
    rows = [row | {"arm": "bf16_peft", "backward_ms": 5.0}, row | {"arm": "nvfp4_fused", "backward_ms": 3.0}]
    rows += [row | {"arm": "nvfp4_peft", "backward_ms": 5.0, "host_ms": 7.9}]
    report = {
        "gpu": "G",
        "versions": {"torch": "2"},
        "commit": "abc",
        "rows": rows,
        "skipped": {"nf4_peft": "not there"},
    }
    path = tmp_path / "actor.json"
    path.write_text(json.dumps(report))
    assert bench.main(["--table", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| 7b | 8192 | no | step | 8.00 (1.00) | 6.00 (0.75) | 8.00* (1.00) |" in printed
    assert "| 7b | 8192 | no | log-prob | 2.00 (1.00) | 2.00 (1.00) | 2.00* (1.00) |" in printed
    assert "nf4_peft: not run, not there" in printed


def test_random_packed_weights_look_like_trained_ones():
    packed = models.random_packed(64, 256, torch.Generator().manual_seed(0))
    dense = bench.models.dequantize(packed).float()
    assert dense.shape == (64, 256)
    assert 0.01 < dense.std() < 0.05
    assert abs(dense.mean()) < 2e-3


def test_out_or_table_is_required(capsys):
    with pytest.raises(SystemExit):
        bench.parse([])
    assert "--out FILE" in capsys.readouterr().err
