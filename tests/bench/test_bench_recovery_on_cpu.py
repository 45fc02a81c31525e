"""The report of formats on a tiny model: a row for each, in the order of what they keep, and their arithmetic."""

import json
from pathlib import Path

import bench_recovery as bench
import pytest
import torch
from chat_tokenizer import train_tokenizer
from qerl_testing import random_qwen2

from verl_qerl.formats import get_format


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("recovery")
    rows = [{"question": f"Mia has {i} apples. How many?", "answer": f"{i} and none #### {i}"} for i in range(40)]
    for name, part in (("train", rows[:30]), ("test", rows[30:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    tokenizer = train_tokenizer([row["question"] for row in rows], 320)
    random_qwen2(gain=3.0, vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    files = [
        f"--train={folder / 'train.jsonl'}",
        f"--data={folder / 'test.jsonl'}",
        f"--out={folder / 'recovery.json'}",
    ]
    return [f"--model={folder / 'model'}", *files, "--train-texts=30", "--texts=4", "--input-tokens=60"]


def test_each_method_has_a_row_and_the_calibrated_one_the_least_error_of_its_size(command, capsys) -> None:
    bench.main(command)
    (run,) = json.loads(Path(command[3].removeprefix("--out=")).read_text())["runs"]
    found = {row["method"]: row for row in run["rows"]}
    assert list(found) == ["bf16", *bench.METHODS]
    assert (run["shapes"]["hidden_size"], run["shapes"]["num_hidden_layers"]) == (128, 2)
    errors = {method: row["output_error"] for method, row in found.items() if method != "bf16"}
    assert errors["nvfp4 gptq"] < 0.9 * errors["nvfp4 mse"] < 0.9 * errors["nvfp4 minmax"] < 0.9 * errors["mxfp4"]
    assert 0 < errors["int8 weights"] < errors["int8"] < errors["fp8"] < errors["nvfp4 mse"]
    assert found["int8 weights"]["kl"] < found["int8"]["kl"]
    assert found["nvfp4 gptq"]["weight_error"] > found["nvfp4 mse"]["weight_error"]
    assert all(len(row["linears"]) == 14 and row["kl"] > 0 for row in run["rows"][1:])
    assert found["nvfp4 gptq"]["kl"] < found["nvfp4 mse"]["kl"]
    low, high = found["bf16"]["perplexity_interval"]
    assert low < found["bf16"]["perplexity"] < high
    assert capsys.readouterr().out.count("\n| ") == 1 + 8


def test_the_model_is_as_before_each_method_and_so_are_layers_that_are_left(command) -> None:
    bench.main([*command, "--layers=1", "--methods", "nvfp4 mse", "int8", "nvfp4 gptq"])
    (run,) = json.loads(Path(command[3].removeprefix("--out=")).read_text())["runs"]  # in the place of the other
    together = {row["method"]: row for row in run["rows"]}
    assert {name.split(".")[2] for name in together["int8"]["linears"]} == {"0"}
    bench.main([*command, "--layers=1", "--methods", "nvfp4 gptq"])
    (run,) = json.loads(Path(command[3].removeprefix("--out=")).read_text())["runs"]
    alone = {row["method"]: row for row in run["rows"]}["nvfp4 gptq"]
    assert {name: alone[name] for name in ("kl", "change", "linears")} == {
        name: together["nvfp4 gptq"][name] for name in ("kl", "change", "linears")
    }


def test_the_error_of_a_mean_is_that_of_whole_texts() -> None:
    mean, error = bench.token_mean([torch.full((5,), 1.0), torch.full((5,), 3.0)])
    assert (mean, error) == (2.0, pytest.approx(1.0))  # as of two numbers: tokens of a text say the same
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(5, 50, (200,), generator=generator).tolist()
    texts = [torch.randn(size, generator=generator) for size in sizes]
    assert bench.token_mean(texts)[1] == pytest.approx(sum(sizes) ** -0.5, rel=0.15)  # tokens that are independent


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_inputs_are_rounded_with_a_scale_a_token(form) -> None:
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0)).bfloat16() * torch.arange(1, 7)[None, :, None]
    (found,) = bench.rounding(get_format(form))(None, (x,))
    assert found.shape == x.shape
    errors = (found - x).float().norm(dim=-1) / x.float().norm(dim=-1)
    assert ((errors > 1e-3) & (errors < 0.05)).all()
    (again,) = bench.rounding(get_format(form))(None, (x * 4,))
    assert torch.equal(again, found * 4)


def test_of_an_answer_that_was_sampled_the_answer_alone_is_scored(command) -> None:
    bench.main([*command, "--sampled=9", "--dtype=float32", "--methods", "int8 weights"])
    (run,) = json.loads(Path(command[3].removeprefix("--out=")).read_text())["runs"]
    assert 4 <= run["tokens"] <= 4 * 9
    assert run["rows"][1]["kl"] > 0
    model, _ = bench.load(command[0].removeprefix("--model="), Path(command[2].removeprefix("--data=")), 1)
    ids = list(range(20))
    scored = bench.Recovery.scored(type("", (), {"model": model}), bench.Text(ids, 15))
    assert torch.equal(scored, bench.log_probs(model, ids)[14:])  # of tokens 15 to 19
