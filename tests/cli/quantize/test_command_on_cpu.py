import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from qerl_testing import quantize_group, random_decoder
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from verl_qerl.checkpoints.digest import model_digest, weight_digest
from verl_qerl.checkpoints.source import INDEX, open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli import main
from verl_qerl.cli.quantize.command import quantize_checkpoint
from verl_qerl.formats import NVFP4, PackedWeight
from verl_qerl.formats.reference import dequantize

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
NUM_LINEARS = 2 * 7


def make_model(path: Path, family: str = "qwen2", tied: bool = False) -> Path:
    """A bf16 model of two layers and random weights, in several shards, with a tokenizer file."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    others = {"vocab_size": 256, "intermediate_size": 384, "max_position_embeddings": 64}
    model = random_decoder(family, tie_word_embeddings=tied, **heads, **others)
    model.save_pretrained(path, max_shard_size="300KB")
    (path / "tokenizer.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"weights of another format")
    return path


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def quantized(model: Path, out: Path, **options: object) -> tuple[dict, dict[str, torch.Tensor]]:
    report = quantize_checkpoint(model, out, device="cpu", max_shard_bytes=100_000, **options)
    return report, tensors_of(out)


def packed_weights(path: Path) -> dict[str, PackedWeight]:
    return {name: item for name, item in packed_stream(open_source(path)) if isinstance(item, PackedWeight)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers of the same width, so that -0.0 and 0.0 differ."""
    return tensor.view(torch.int16)


@pytest.mark.parametrize(("family", "tied"), [*[(family, False) for family in FAMILIES], ("qwen2", True)], ids=str)
def test_compressed_tensors_decompresses_to_our_values_bit_for_bit(tmp_path: Path, family: str, tied: bool) -> None:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    _, stored = quantized(make_model(tmp_path / "bf16", family, tied), tmp_path / "out")
    assert ("lm_head.weight" in stored) != tied
    scheme = QuantizationScheme.model_validate(NVFP4().config()["config_groups"]["group_0"])
    ours = packed_weights(tmp_path / "out")
    assert len(ours) == NUM_LINEARS
    for module, weight in ours.items():
        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        theirs = NVFP4PackedCompressor.decompress({part: stored[f"{module}.{part}"] for part in parts}, scheme)
        assert torch.equal(bits(theirs["weight"]), bits(dequantize(weight))), module


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_runs_the_output_as_the_model_with_dequantized_weights(tmp_path: Path, family: str) -> None:
    model = make_model(tmp_path / "bf16", family)
    quantized(model, tmp_path / "out", scale="minmax")
    load = transformers.AutoModelForCausalLM.from_pretrained
    expected = load(model, dtype=torch.bfloat16)
    for module, weight in packed_weights(tmp_path / "out").items():
        expected.get_submodule(module).weight.data.copy_(dequantize(weight))
    tokens = torch.arange(48).view(2, 24) * 5 % 256
    with torch.no_grad():
        logits = expected(tokens).logits
        found = load(tmp_path / "out", dtype=torch.bfloat16)(tokens).logits
        original = load(model, dtype=torch.bfloat16)(tokens).logits
    assert torch.equal(found, logits)
    assert not torch.equal(original, logits)


@pytest.mark.parametrize("scale", ["mse", "minmax"])
def test_output_holds_what_quantize_group_gives_and_other_tensors_unchanged(tmp_path: Path, scale: str) -> None:
    model = make_model(tmp_path / "bf16")
    report, stored = quantized(model, tmp_path / "out", scale=scale)
    before = tensors_of(model)
    packed = packed_weights(tmp_path / "out")
    qkv = {f"model.layers.1.self_attn.{kind}_proj" for kind in "qkv"}
    expected = quantize_group({name: before[f"{name}.weight"] for name in qkv}, scale)
    for name in qkv:
        assert weight_digest(packed[name]) == weight_digest(expected[name]) == report["layers"][name]["digest"]
    assert report["model_digest"] == model_digest({name: weight_digest(weight) for name, weight in packed.items()})
    rest = {name for name in before if name.removesuffix(".weight") not in packed}
    assert "model.layers.0.self_attn.q_proj.bias" in rest
    assert "model.embed_tokens.weight" in rest
    assert set(stored) == rest | {f"{name}.{part}" for name in packed for part in _PARTS}
    assert all(torch.equal(stored[name], before[name]) for name in rest)


_PARTS = ("weight_packed", "weight_scale", "weight_global_scale")


def test_members_of_a_fused_group_share_one_power_of_two(tmp_path: Path) -> None:
    model = make_model(tmp_path / "bf16")
    for file in model.glob("*.safetensors"):  # k far from q and v, up far from gate
        scaled = {
            name: tensor * 37 if "k_proj" in name or "up_proj" in name else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(scaled, file, metadata={"format": "pt"})
    _, stored = quantized(model, tmp_path / "out")
    for layer in ("model.layers.0", "model.layers.1"):
        for group in (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]):
            scales = {float(stored[f"{layer}.{module}.weight_global_scale"]) for module in group}
            assert len(scales) == 1
            assert torch.frexp(torch.tensor(scales.pop())).mantissa == 0.5
        assert stored[f"{layer}.self_attn.o_proj.weight_global_scale"].shape == (1,)


def test_shards_index_and_other_files(tmp_path: Path) -> None:
    model = make_model(tmp_path / "bf16")
    report, stored = quantized(model, tmp_path / "out")
    out = tmp_path / "out"
    shards = sorted(out.glob("*.safetensors"))
    assert len(list(model.glob("*.safetensors"))) > 1
    assert len(shards) > 1
    assert [file.name for file in shards] == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values()) == report["bytes_after"]
    for file in shards:
        with safe_open(file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            names = set(shard.keys())
        assert names == {name for name, where in index["weight_map"].items() if where == file.name}
        assert len(names) == 1 or sum(stored[name].nbytes for name in names) <= 100_000
    others = {path.name for path in out.iterdir()} - {file.name for file in shards}
    assert others == {"config.json", "generation_config.json", "tokenizer.json", INDEX, "quantization_report.json"}
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config") == NVFP4().config()
    assert config == json.loads((model / "config.json").read_text())
    assert out.stat().st_mode & 0o777 == model.stat().st_mode & 0o777


def test_one_shard_has_no_index(tmp_path: Path) -> None:
    model = make_model(tmp_path / "bf16")
    quantize_checkpoint(model, tmp_path / "out", device="cpu")
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


def test_ignored_modules_stay_as_they_are(tmp_path: Path) -> None:
    model = make_model(tmp_path / "bf16")
    rule = r"re:.*\.down_proj$"
    report, stored = quantized(model, tmp_path / "out", ignore=["model.layers.0.self_attn.o_proj", rule])
    before = tensors_of(model)
    left = ["model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    assert len(report["layers"]) == NUM_LINEARS - len(left)
    assert all(torch.equal(stored[f"{name}.weight"], before[f"{name}.weight"]) for name in left)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", "model.layers.0.self_attn.o_proj", rule]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.arange(8)[None])


def test_report_and_table_state_errors_and_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "bf16")
    args = ["quantize", "--model", str(model), "--out", str(tmp_path / "out"), "--device", "cpu", "--scale", "minmax"]
    assert main(args) == 0
    report = json.loads((tmp_path / "out/quantization_report.json").read_text())
    before = tensors_of(model)
    assert len(report["layers"]) == NUM_LINEARS
    for name, weight in packed_weights(tmp_path / "out").items():
        layer, original = report["layers"][name], before[f"{name}.weight"].double()
        error = (dequantize(weight, torch.float64) - original).norm() / original.norm()
        assert layer["relative_error"] == pytest.approx(float(error), rel=1e-5)
        assert layer["shape"] == list(weight.shape)
        assert layer["scale"] == "minmax"
        # 4 bits, 8 for 16 weights, and one float32 a matrix
        assert layer["bits_per_weight"] == pytest.approx(4.5 + 32 / original.numel(), abs=1e-4)
        assert layer["digest"] == weight_digest(weight)
    assert report["bytes_before"] == sum(tensor.nbytes for tensor in before.values())
    table = capsys.readouterr().out
    row = re.search(r"^q_proj\s+2\s+(\S+)\s+(\S+)$", table, re.MULTILINE)
    errors = [report["layers"][f"model.layers.{i}.self_attn.q_proj"]["relative_error"] for i in range(2)]
    assert row is not None
    assert float(row[1]) == pytest.approx(sum(errors) / 2, abs=1e-4)
    assert float(row[2]) == pytest.approx(max(errors), abs=1e-4)
    assert report["model_digest"] in table


def _damage(model: Path, kind: str) -> None:
    shard = max(model.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    if kind in ("already quantized", "sees"):
        more = {"vision_config": {"depth": 2}} if kind == "sees" else {"quantization_config": NVFP4().config()}
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | more))
    elif kind == "no head":
        untied = (model / "config.json").read_text()
        shutil.rmtree(model)
        make_model(model, tied=True)
        (model / "config.json").write_text(untied)
    else:
        tensors = load_file(shard)
        dims = 1 if kind == "infinite norm" else 2
        name = next(
            name for name in tensors if ".layers." in name and tensors[name].ndim == dims and "bias" not in name
        )
        if kind == "infinite norm":
            tensors[name][5] = torch.inf
        elif kind == "NaN":
            tensors[name][3, 5] = torch.nan
        elif kind == "lost weight":
            del tensors[name]
            index = json.loads((model / INDEX).read_text())
            del index["weight_map"][name]
            (model / INDEX).write_text(json.dumps(index))
        else:
            tensors[name] = tensors[name][:, :-4].contiguous()
        save_file(tensors, shard, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("lost weight", "Every layer of a qwen2 model must have the same parts"),
        ("already quantized", "quantized already"),
        ("NaN", "1 NaN or infinite values"),
        ("infinite norm", "norm.weight' holds NaN or infinite values"),
        ("in_features", "is not a multiple of 16"),
        ("no head", "A head of this name, or true for a model"),
        ("sees", "no model of text alone"),
    ],
)
def test_bad_input_gives_one_sentence_and_leaves_nothing(tmp_path: Path, refused, kind: str, sentence: str) -> None:
    model = make_model(tmp_path / "bf16")
    _damage(model, kind)
    message = refused("quantize", "--model", model, "--out", tmp_path / "out", "--device", "cpu").splitlines()[-1]
    assert message.startswith("python -m verl_qerl: ")
    assert sentence in message
    assert os.listdir(tmp_path) == ["bf16"]


def test_an_existing_output_is_not_touched(tmp_path: Path) -> None:
    model = make_model(tmp_path / "bf16")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("kept")
    with pytest.raises(FileExistsError, match="already exists"):
        quantize_checkpoint(model, tmp_path / "out", device="cpu")
    assert os.listdir(tmp_path / "out") == ["mine"]
    assert sorted(os.listdir(tmp_path)) == ["bf16", "out"]


def test_a_full_disk_is_noticed_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "bf16")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ValueError, match="the disk is too full"):
        quantize_checkpoint(model, tmp_path / "out", device="cpu")
    assert os.listdir(tmp_path) == ["bf16"]


def test_a_mixture_says_that_its_routers_are_not_packed(tmp_path):
    from qerl_testing import random_qwen3_moe

    from verl_qerl.formats.ignore import ROUTER

    random_qwen3_moe().save_pretrained(tmp_path / "moe")
    quantize_checkpoint(tmp_path / "moe", tmp_path / "out", device="cpu")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", ROUTER]


def test_a_quantized_model_that_cannot_be_used_as_it_is_is_quantized_anew(tmp_path: Path, capsys, refused) -> None:
    bf16, packed, out = make_model(tmp_path / "bf16"), tmp_path / "packed", tmp_path / "out"
    left_out = ["model.layers.0.mlp.down_proj"]
    quantize_checkpoint(bf16, packed, ignore=left_out, device="cpu")
    (file,) = packed.glob("*.safetensors")
    tensors = load_file(file)
    for i in range(2):  # global scales of their own, as others write them, no powers of two apart
        tensors[f"model.layers.{i}.self_attn.k_proj.weight_global_scale"] *= 1.5
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"different global scales: .* or this one with --requantize too\."):
        list(packed_stream(open_source(packed)))
    assert "name the original model, or add --requantize." in refused(
        "quantize", "--model", packed, "--out", out, "--device", "cpu"
    )
    assert main(["quantize", "--model", str(packed), "--out", str(out), "--device", "cpu", "--requantize"]) == 0
    assert "errors are those beside the nvfp4 weights of the source, not" in capsys.readouterr().out
    report = json.loads((out / "quantization_report.json").read_text())
    assert report["source"] == "nvfp4"
    again, stored = packed_weights(out), tensors_of(out)
    assert left_out[0] not in again
    assert len(again) == NUM_LINEARS - 1
    assert torch.equal(stored[f"{left_out[0]}.weight"], tensors_of(bf16)[f"{left_out[0]}.weight"])
    for module, weight in again.items():
        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        was = NVFP4().from_tensors(module, {part: tensors[f"{module}.{part}"] for part in parts})
        found, expected = dequantize(weight, torch.float32), dequantize(was, torch.float32)
        error = float((found - expected).norm() / expected.norm())
        assert error == pytest.approx(report["layers"][module]["relative_error"], abs=3e-3)
        assert error < 0.1, module
