"""The benchmark of scale choices on a tiny model: rows of all, and what is known of their errors."""

import json
from pathlib import Path

import bench_scales as bench
import torch
from chat_tokenizer import train_tokenizer
from qerl_testing import quantize, random_qwen2

from verl_qerl.formats.reference import dequantize


def test_every_choice_has_a_row_and_the_search_the_least_error(tmp_path: Path, capsys) -> None:
    rows = [{"question": f"Mia has {i} apples. How many?", "answer": f"{i} #### {i}"} for i in range(4)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = train_tokenizer([row["question"] for row in rows], 320)
    tokenizer.save_pretrained(tmp_path / "model")
    random_qwen2(gain=3.0, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    out = tmp_path / "cpu" / "scales.json"
    command = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "test.jsonl"), "--out", str(out)]
    bench.main([*command, "--texts", "3"])
    (run,) = json.loads(out.read_text())["runs"]
    assert [row["choice"] for row in run["rows"]] == ["bf16", "mse", "minmax", "four_over_six", "expanded_mse"]
    found = {row["choice"]: row for row in run["rows"][1:]}
    errors = {choice: row["relative_error"] for choice, row in found.items()}
    assert errors["mse"] < errors["expanded_mse"] < errors["four_over_six"] < errors["minmax"]
    assert all(row["kl"] > 0 for row in found.values())
    assert all(row["linears"] == 14 and len(row["kl_of_texts"]) == 3 for row in found.values())
    assert found["mse"]["kl_change"] == 0 != found["minmax"]["kl_change"]
    assert capsys.readouterr().out.count("\n| ") == 1 + 5
    bench.main([*command, "--texts", "2", "--choices", "minmax"])
    (run,) = json.loads(out.read_text())["runs"]  # in the place of the other run of this model
    assert [row["choice"] for row in run["rows"]] == ["bf16", "minmax"]


def test_four_over_six_is_the_better_one_of_two_in_every_block() -> None:
    weight = (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()

    def errors(packed) -> torch.Tensor:
        error = dequantize(packed, torch.float64) - weight.double()
        return error.square().view(64, -1, 16).sum(-1)

    found, minmax, mse = (
        errors(bench.four_over_six(weight)),
        errors(quantize(weight, "minmax")),
        errors(quantize(weight)),
    )
    assert (found <= minmax * (1 + 1e-6)).all()
    assert (mse <= found * (1 + 1e-6)).all()
    assert 0.2 < (found < minmax).float().mean() < 0.6
