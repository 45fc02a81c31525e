"""What `quantize --method gptq` refuses, and which texts it reads."""

import json
import re
from pathlib import Path

import pytest
import torch
import word_problems
from safetensors.torch import load_file, save_file

from verl_qerl.checkpoints.source import open_source
from verl_qerl.cli.prompts import tokenize
from verl_qerl.cli.quantize.calibration import Calibration

TEXTS = [f"Ann has {i} apples and buys {i + 3} more. The answer is #### {2 * i + 3}" for i in range(40)]


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture
def why_not(refused, tmp_path):
    """The sentence that `quantize` ends with; nothing is written."""

    def ask(model: Path, *arguments: str) -> str:
        said = refused("quantize", "--model", model, "--out", tmp_path / "out", "--device", "cpu", *arguments)
        assert not (tmp_path / "out").exists()
        return said.splitlines()[-1]

    return ask


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "gptq"], "an argument is missing: --calibration."),
        (["--calibration", "FILE"], "an option has no meaning here: --calibration=FILE with --method rtn."),
        (["--calibration-tokens", "9"], "an option has no meaning here: --calibration-tokens=9 with --method rtn."),
        (["--method", "gptq", "--calibration", "F", "--calibration-samples", "0"], "too small: --calibration-samples="),
        (
            ["--method", "gptq", "--calibration", "F", "--format", "int8"],
            "int8 is not calibrated: --method gptq.",
        ),
        (["--method", "gptq", "--calibration", "F", "--format", "mxfp4"], "mxfp4 is not calibrated"),
        (["--method", "gptq", "--calibration", "F", "--format", "fp8"], "fp8 is not calibrated"),
        (["--method", "gptq", "--calibration", "absent.jsonl"], "a file is missing: path=absent.jsonl"),
        (["--method", "gptq", "--calibration", "texts.txt"], "prompts of an unknown kind: prompts=texts.txt"),
    ],
)
def test_options(models, tmp_path, why_not, arguments, sentence):
    assert sentence in why_not(models / "bf16", *arguments)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], r"a file is empty: path="),
        ([{"question": "x"}], r"row 1 of \S+ cannot be used: text=None\. Text or a list .* in `text` or `prompt` is"),
        ([{"text": "What is 2?"}, {"prompt": "x"}], r"row 2 of \S+ cannot be used: text=None"),
        (
            [{"text": "What is 2 + 3?"}],
            r"too few tokens to calibrate on: \d+ of 1 rows in \S+\. At least 256 are",
        ),
    ],
    ids=["empty", "column", "mixed", "short"],
)
def test_a_file_without_enough_text(models, tmp_path, why_not, rows, sentence):
    file = write(tmp_path / "file.jsonl", rows)
    message = why_not(models / "bf16", "--method", "gptq", "--calibration", str(file))
    assert re.search(sentence, message), message


@pytest.mark.parametrize(
    ("model", "more", "sentence"),
    [
        ("nvfp4", [], "is quantized (nvfp4), and --method gptq calibrates on the answers of the original"),
        ("int8", ["--requantize"], "is quantized (int8), and --method gptq calibrates"),
        ("moe", [], "a mixture of experts is not calibrated: 'model.layers.1.mlp.experts.0.down_proj.weight' of"),
    ],
)
def test_models(models, tmp_path, why_not, texts, model, more, sentence):
    arguments = ["--method", "gptq", "--calibration", str(texts), *more]
    assert sentence in why_not(models / model, *arguments)


def copied(models: Path, folder: Path, rename=lambda name: name, **config) -> Path:
    folder.mkdir()
    tensors = {}
    for file in (models / "tied").iterdir():
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        elif "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    found = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(found))
    return folder


def test_a_family_that_transformers_runs_otherwise(models, tmp_path, why_not, texts):
    model = copied(models, tmp_path / "gemma", model_type="gemma")
    message = why_not(model, "--method", "gptq", "--calibration", str(texts))
    assert "models of this family are not calibrated: model_type=gemma" in message


def test_a_checkpoint_with_other_names(models, tmp_path, why_not, texts):
    model = copied(models, tmp_path / "renamed", lambda name: name.removeprefix("model."))
    message = why_not(model, "--method", "gptq", "--calibration", str(texts))
    assert re.search(
        r"lacks 'model\.layers\.0\.\S+' of shape \(.*\), which transformers needs to run the layers", message
    ), message


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"intermediate_size": 32},
            "lacks 'model.layers.0.mlp.down_proj.weight' of shape (128, 32), which transformers",
        ),
        ({"hidden_act": "x"}, "transformers makes no model of config.json in "),
        ({"num_key_value_heads": 0}, "transformers makes no model of config.json in "),
    ],
)
def test_a_config_of_another_model(models, tmp_path, why_not, texts, config, told):
    model = copied(models, tmp_path / "other", **config)
    assert told in why_not(model, "--method", "gptq", "--calibration", str(texts))


def test_a_config_with_fewer_layers_than_the_checkpoint(models, tmp_path, why_not, texts):
    model = copied(models, tmp_path / "cut", num_hidden_layers=1)
    message = why_not(model, "--method", "gptq", "--calibration", str(texts))
    assert "'model.layers.1.mlp.down_proj' of" in message
    assert "belongs to no layer that transformers runs: it has 1." in message


def test_answers_that_are_not_numbers(models, tmp_path, why_not, texts):
    model = copied(models, tmp_path / "broken")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][3] = torch.inf
    save_file(tensors, model / "model.safetensors")
    message = why_not(model, "--method", "gptq", "--calibration", str(texts))
    assert re.search(r"inputs of 'model\.layers\.0\.\S+' are NaN or infinite", message), message


def test_texts_end_where_the_positions_of_the_model_do(models, tmp_path):
    file = write(tmp_path / "file.jsonl", [{"text": " ".join(TEXTS)}] * 30)
    source = open_source(copied(models, tmp_path / "short", max_position_embeddings=64))
    assert {len(ids) for ids in Calibration(file).read(source, ("lm_head",))} == {64}


def test_rows_and_tokens_are_limited_and_text_comes_before_prompts(models, tmp_path):
    rows = [{"prompt": "not this one", "text": text} for text in TEXTS]
    file, source = write(tmp_path / "file.jsonl", rows), open_source(models / "bf16")
    found = Calibration(file, samples=30, tokens=20).read(source, ("lm_head",))
    assert found == [ids[:20] for ids in tokenize(models / "bf16", TEXTS[:30])]


def test_what_data_writes_is_read_as_chats(models, tmp_path):
    assert word_problems.main(["--out", str(tmp_path / "data"), "--num-train", "40", "--num-test", "2"]) == 0
    found = Calibration(tmp_path / "data" / "train.parquet").read(open_source(models / "bf16"), ("lm_head",))
    assert len(found) == 40
    assert len({tuple(ids[-3:]) for ids in found}) == 1  # the assistant begins
