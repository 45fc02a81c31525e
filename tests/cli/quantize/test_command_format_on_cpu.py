"""`quantize --format`: what other readers make of the output. NVFP4: test_command_on_cpu.py."""

import json
import os
import platform
from pathlib import Path

import pytest
import torch
from qerl_testing import answer_of, log_probs, random_qwen2
from safetensors.torch import load_file

from verl_qerl.checkpoints.digest import model_digest, weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli import main
from verl_qerl.cli.quantize.command import quantize_checkpoint
from verl_qerl.formats import PackedWeight, get_format
from verl_qerl.formats.reference import dequantize

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

SIBLINGS = ("fp8", "int8", "mxfp4")
SCRIPT = Path(__file__).parents[1] / "ask_vllm.py"
TOKENS = [(7 * i) % 300 for i in range(64)]  # of ask_vllm.py


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "bf16"
    random_qwen2(0, 3, vocab_size=320, max_position_embeddings=256).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def outputs(model, tmp_path_factory):
    """Format -> (directory, report)."""
    folder = tmp_path_factory.mktemp("quantized")
    found = {}
    for name in SIBLINGS:
        report = quantize_checkpoint(model, folder / name, form=name, device="cpu", max_shard_bytes=100_000)
        found[name] = (folder / name, report)
    return found


def weights(folder, name):
    items = packed_stream(open_source(folder), get_format(name))
    return {module: item for module, item in items if isinstance(item, PackedWeight)}


@pytest.mark.parametrize("name", SIBLINGS)
def test_compressed_tensors_decompresses_to_our_values_bit_for_bit(outputs, name):
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    folder, _ = outputs[name]
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    ours = weights(folder, name)
    assert len(ours) == 14
    for module, weight in ours.items():
        theirs = compressor.decompress(weight.form.to_tensors(weight), scheme)["weight"]
        assert torch.equal(theirs, dequantize(weight, theirs.dtype)), module


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int8"])
def test_transformers_runs_what_is_made_of_float16_as_config_json_says(tmp_path, name):
    random_qwen2(0, 3).half().save_pretrained(tmp_path / "half")
    quantize_checkpoint(tmp_path / "half", tmp_path / "out", form=name, device="cpu")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("half", "out"))
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    assert after["model.norm.weight"].dtype == torch.float16
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model(torch.arange(8)[None]).logits.isfinite().all()
    assert model.dtype == (torch.float16 if name == "int8" else torch.bfloat16)


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_report_states_format_errors_sizes_and_digests(outputs, model, name):
    folder, report = outputs[name]
    assert report == json.loads((folder / "quantization_report.json").read_text()) | {"ignore": ("lm_head",)} | {
        "layers": report["layers"]
    }
    assert report["format"] == name
    before = load_file(model / "model.safetensors")
    found = weights(folder, name)
    assert report["model_digest"] == model_digest({module: weight_digest(one) for module, one in found.items()})
    for module, weight in found.items():
        layer, original = report["layers"][module], before[f"{module}.weight"].double()
        error = (dequantize(weight, torch.float32).double() - original).norm() / original.norm()
        assert layer["relative_error"] == pytest.approx(float(error), rel=1e-5)
        assert layer["bits_per_weight"] == pytest.approx(
            {"mxfp4": 4.25}.get(name, 8 + 32 / original.shape[1]), abs=1e-4
        )
    rest = {key for key in before if key.removesuffix(".weight") not in found}
    stored = {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}
    assert all(torch.equal(stored[key], before[key]) for key in rest)
    assert len(stored) == len(rest) + 2 * len(found)


def test_the_command_takes_a_format(model, tmp_path, refused):
    args = ["quantize", "--model", str(model), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main([*args, "--format", "int8"]) == 0
    assert open_source(tmp_path / "out").format == "int8"
    assert "scale='mse' of int8. Accepted are minmax." in refused(
        *args[:3], "--out", tmp_path / "other", "--format", "int8", "--scale", "mse"
    )
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.usefixtures("quick_starts")
def test_stock_vllm_computes_int8_as_the_dequantized_model(outputs, model):
    pytest.importorskip("vllm")
    vnni = {"avx512_vnni", "avx_vnni"}
    if platform.machine() == "x86_64" and not vnni & set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("vLLM's INT8 kernel computes wrong products on this CPU, which has no VNNI")
    folder, _ = outputs["int8"]
    case = {"name": "int8", "model": str(folder), "lora": None, "reference_kernel": False}
    case["options"] = {"kv_cache_memory_bytes": 1 << 26}
    method, values = answer_of(SCRIPT, [case])[0]["int8"]
    assert method == "compressed-tensors"
    expected = transformers.Qwen2ForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    differences = {}
    for kind in ("int8", "rolled"):
        for module, weight in weights(folder, "int8").items():
            dense = dequantize(weight)
            expected.get_submodule(module).weight.data = dense if kind == "int8" else dense.roll(1, 0)
        found = log_probs(expected, torch.tensor([TOKENS]))
        differences[kind] = float((found - torch.tensor(values, dtype=torch.float64)).abs().mean())
    assert differences["int8"] < 2e-2 < 20 * differences["int8"] < differences["rolled"]
