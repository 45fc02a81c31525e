"""Digests and files of every format, bit for bit as they have been: training checkpoints name the digests."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_qerl.checkpoints.digest import model_digest, weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli.quantize.command import quantize_checkpoint
from verl_qerl.formats.nvfp4_layout import modelopt_config

SIZES = {"q_proj": (32, 64), "k_proj": (16, 64), "v_proj": (16, 64), "o_proj": (64, 32)}
# Model digest, and the beginning of the SHA-256 of model.safetensors.
GOLDEN = {
    ("nvfp4", "mse"): ("3c2ae727783dffc7", "776cb909b6353bff"),
    ("nvfp4", "minmax"): ("225f9b2826af9bb6", "cd36451775281d89"),
    ("fp8", None): ("437777324be53897", "cd6fc83012b36096"),
    ("int8", None): ("7b60e910d224d993", "68d590efc703ea16"),
    ("mxfp4", None): ("4e5ea0db1ea1f0e0", "0a20f9aba77e7f1f"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One layer's attention, of numbers that no random generator made."""
    folder, tensors = tmp_path_factory.mktemp("golden"), {"lm_head.weight": torch.ones(4, 64, dtype=torch.bfloat16)}
    for i, (name, (N, K)) in enumerate(SIZES.items(), start=1):
        values = ((torch.arange(N * K) * 7919 % 2003) - 1001).view(N, K) / torch.arange(1, N + 1)[:, None] / 4096 * i
        tensors[f"model.layers.0.self_attn.{name}.weight"] = values.bfloat16()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


@pytest.mark.parametrize(("form", "scale"), GOLDEN)
def test_a_quantized_model_has_the_bits_that_it_had(model, tmp_path, form, scale):
    report = quantize_checkpoint(model, tmp_path / "out", form=form, scale=scale, device="cpu")
    file = (tmp_path / "out" / "model.safetensors").read_bytes()
    found = report["model_digest"], hashlib.sha256(file).hexdigest()[:16]
    assert found == GOLDEN[form, scale]


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_global_scales_of_others_keep_their_digests(model, tmp_path, layout):
    quantize_checkpoint(model, tmp_path / "ours", device="cpu")
    tensors, theirs = load_file(tmp_path / "ours" / "model.safetensors"), tmp_path / "theirs"
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    changed = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        tensor = tensor / 3 if part == "weight_global_scale" else tensor  # no power of two, nor is its inverse
        if layout == "modelopt" and part != "weight":
            part = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"}.get(part, part)
            tensor = (1 / tensor).reshape(()) if part == "weight_scale_2" else tensor
        changed[f"{module}.{part}"] = tensor
    if layout == "modelopt":
        config["quantization_config"] = modelopt_config(["lm_head"])
    theirs.mkdir()
    save_file(changed, theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(config))
    items = packed_stream(open_source(theirs))
    packed = {name: weight_digest(item) for name, item in items if not isinstance(item, torch.Tensor)}
    assert model_digest(packed) == "6c007e3195a156c9"
