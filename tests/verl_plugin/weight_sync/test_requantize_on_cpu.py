import json

import pytest

pytest.importorskip("verl")

import torch
from safetensors.torch import save_file

from verl_qerl.checkpoints.manifest import NAME, Manifest, checksum
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import FORMATS, NVFP4, get_format
from verl_qerl.formats.reference import dequantize
from verl_qerl.verl_plugin.weight_sync.requantize import check_unquantized, quantized_for_rollout

Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")


def model(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"{module}.weight": (32, 64) for module in (Q, K, V)} | {
        f"{Q}.bias": (32,),
        "model.embed_tokens.weight": (128, 64),
        "model.norm.weight": (64,),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}


def sent(tensors, form, tied=False, ignore=("lm_head",)):
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return list(quantized_for_rollout(tensors.items(), shapes, form, ignore, tied))


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("tied", [True, False])
def test_the_manifest_counts_what_was_sent(name, tied):
    form = get_format(name)
    *tensors, (last, manifest) = sent(model(), form, tied)
    names = {f"{module}.{part}" for module in (Q, K, V) for part in form.parts}
    names |= {f"{Q}.bias", "model.embed_tokens.weight", "model.norm.weight"} | (set() if tied else {"lm_head.weight"})
    assert (last, len(tensors), {name for name, _ in tensors}) == (NAME, len(names), names)
    found = Manifest.from_tensor(manifest)
    assert found.checksums == {name: int(checksum(tensor)) for name, tensor in tensors}
    assert found.num_bytes == sum(tensor.nbytes for _, tensor in tensors)
    others = 32 + 64 + 128 * 64 * (1 if tied else 2)
    assert found.num_bytes_bf16 == 2 * (3 * 32 * 64 + others)
    linear_bytes = {"int8": 64 + 4, "fp8": 64 + 4, "mxfp4": 32 + 2, "nvfp4": 32 + 4}[name] * 96
    assert found.num_bytes == 2 * others + linear_bytes + (12 if name == "nvfp4" else 0)


def test_a_model_that_diverged_is_named():
    tensors = model()
    tensors[f"{V}.weight"][1, 2] = float("inf")
    with pytest.raises(ValueError, match=rf"'{V}' holds 1 NaN or infinite values\. INT8 holds finite weights only\."):
        sent(tensors, get_format("int8"))


def test_a_group_that_is_ignored_in_part_is_refused():
    with pytest.raises(ValueError, match="a group of linears that vLLM runs as one is ignored in part"):
        sent(model(), get_format("int8"), ignore=("lm_head", K))


def test_a_quantized_directory_cannot_be_trained(tmp_path):
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    check_unquantized(str(tmp_path), "nvfp4")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": NVFP4().config()}))
    with pytest.raises(CheckpointFormatError, match=r"is quantized already \(nvfp4\) and model\.lora_r"):
        check_unquantized(str(tmp_path), "nvfp4")


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_a_mixture_of_experts_cannot_be_trained_whole(tmp_path, key):
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", key: 16}))
    with pytest.raises(CheckpointFormatError, match=r"is a mixture of 16 experts, .*lora_rank=0 .*rollout=int8"):
        check_unquantized(str(tmp_path), "int8")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_the_actor_rounds_to_is_what_a_sync_brings(name):
    from verl_qerl.verl_plugin.weight_sync.requantize import round_group

    form, tensors = get_format(name), model()
    parts = dict(sent(tensors, form))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as in verl's passes
        found = round_group({module: tensors[f"{module}.weight"] for module in (Q, K, V)}, form)
    for module in (Q, K, V):
        there = {part: parts[f"{module}.{part}"] for part in form.parts}
        assert torch.equal(found[module], dequantize(form.from_tensors(module, there), torch.float32)), module
