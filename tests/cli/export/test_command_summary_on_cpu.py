import re

import pytest

from verl_qerl.cli.export.command import summary

BASE = {"r": 8, "scaling": 2.0, "base_digest": "0123", "base_digest_checked": True, "changed_besides_the_adapter": []}


def quantized(error: float, update: float):
    layers = {
        f"model.layers.{i}.mlp.up_proj": {"relative_error": error * (i + 1), "relative_update": update}
        for i in range(2)
    }
    return BASE | {"layers": layers, "scale": "minmax"}


def test_an_adapter_is_told_in_a_line():
    text = summary(BASE | {"layers": {"a": {}, "b": {}}})
    assert text == (
        "adapter: r=8, scaling 2, 2 linears; base 0123, as the checkpoint names its packed linears"
        " (the base's other tensors are not compared)"
    )


def test_what_is_not_known_or_not_usual_is_said():
    report = BASE | {"layers": {}, "base_digest": None, "base_digest_checked": False}
    text = summary(report | {"changed_besides_the_adapter": ["model.norm.weight"]})
    assert "base not packed, which the checkpoint does not name" in text
    assert "1 tensors besides the adapter come from the checkpoint" in text


@pytest.mark.parametrize(("update", "told"), [(0.4, "0.25 of their update"), (0.0, "no update")])
def test_trained_norms_are_told_with_what_bf16_takes(update, told):
    norms = {name: {"update": update / 2, "lost_in_bf16": 0.05} for name in "ab"}
    assert f"2 trained norms; rounding them to bf16 loses {told}" in summary(BASE | {"layers": {}, "norms": norms})


def test_costs_are_means_and_maxima_by_kind():
    header, row = summary(quantized(0.02, 0.3)).splitlines()[1:]
    assert header.split() == ["linear", "count", "mean", "error", "max", "error", "mean", "update", "error/update"]
    assert row.split() == ["up_proj", "2", "3.00e-02", "4.00e-02", "3.00e-01", "0.10"]


@pytest.mark.parametrize(("update", "lost"), [(0.3, False), (0.03, True), (0.0, False)])
def test_an_error_as_large_as_the_update_is_announced(update, lost):
    assert ("quantization takes the training back" in summary(quantized(0.02, update))) == lost


def test_trained_linears_that_stay_in_bf16_have_no_error():
    report = quantized(0.02, 0.03)  # its updates, of 0.06 together, are just taken back
    report["layers"]["model.layers.0.mlp.down_proj"] = {"relative_update": 0.5}
    *_, row, told, last = summary(report).splitlines()
    assert row.split() == ["up_proj", "2", "3.00e-02", "4.00e-02", "3.00e-02", "1.00"]
    assert told == "1 trained linears stay in bf16"
    assert last.startswith("quantization takes the training back")


@pytest.mark.parametrize(("rank", "remedy"), [(8, r"Serve the base with .* or use"), (0, r"is\. Use")])
def test_a_run_of_all_weights_is_told_of_no_adapter(rank, remedy):
    text = summary(quantized(0.02, 0.03) | {"r": rank, "changed_besides_the_adapter": ["model.norm.weight"]})
    assert re.search(rf"{remedy} --to merged-bf16\.$", text)
    assert ("adapter" in text) == (rank > 0)
