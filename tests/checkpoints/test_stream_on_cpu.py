import errno
import json

import pytest
import torch
from safetensors.torch import save_file

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import check_held, left_out, packed_names, packed_stream
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import FORMATS, NVFP4, get_format
from verl_qerl.formats.base import named_tensors
from verl_qerl.formats.reference import dequantize

NAMES = sorted(FORMATS)
SIBLINGS = [name for name in NAMES if name != "nvfp4"]
LINEARS = [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")]
LINEARS += [f"model.layers.0.{name}" for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")]


def dense(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": (torch.randn(64, 64, generator=generator) * 0.02).to(dtype) for name in LINEARS}
    tensors[f"{LINEARS[0]}.bias"] = torch.randn(64, generator=generator).to(dtype)
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(64, dtype=dtype)
    tensors["lm_head.weight"] = torch.randn(8, 64, generator=generator).to(dtype)
    return tensors


def write(folder, tensors, quantization=None, family="qwen2"):
    folder.mkdir(exist_ok=True)
    config = {"model_type": family} | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return open_source(folder)


def stored(folder, name, change=None, **config):
    """A checkpoint in the format `name`; its tensors given to `change`."""
    form = get_format(name)
    tensors = dense()
    weights = {module: tensors.pop(f"{module}.weight") for module in LINEARS}
    for module, parts in form.quantize_group(weights).items():
        tensors |= named_tensors(module, parts)
    if change:
        change(tensors)
    return write(folder, tensors, form.config() | config)


def digests(items):
    return {name: weight_digest(item) for name, item in items if not isinstance(item, torch.Tensor)}


@pytest.mark.parametrize("name", NAMES)
def test_a_bf16_source_is_quantized_and_the_rest_passes(tmp_path, name):
    form, tensors, seen = get_format(name), dense(), {}
    source = write(tmp_path, tensors)
    items = dict(packed_stream(source, form, observe=lambda module, *weights: seen.update({module: weights})))
    assert {key for key, item in items.items() if not isinstance(item, torch.Tensor)} == set(LINEARS)
    assert packed_names(source, form) == set(LINEARS) == set(seen)
    parts = form.quantize_group({module: tensors[f"{module}.weight"] for module in LINEARS[:3]})
    for module, found in parts.items():
        assert weight_digest(items[module]) == weight_digest(found)
        assert torch.equal(seen[module][0], tensors[f"{module}.weight"])
        assert seen[module][1] is items[module]
    for key in tensors.keys() - {f"{module}.weight" for module in LINEARS}:
        assert torch.equal(items[key], tensors[key])


@pytest.mark.parametrize("name", SIBLINGS)
def test_values_are_quantized_as_they_are_stored(tmp_path, name):
    form, tensors = get_format(name), dense(torch.float32)
    items = dict(packed_stream(write(tmp_path, tensors), form))
    expected = dequantize(form.quantize(tensors[f"{LINEARS[3]}.weight"]), torch.float32)
    assert torch.equal(dequantize(items[LINEARS[3]], torch.float32), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_source_passes_bit_for_bit(tmp_path, name):
    form = get_format(name)
    source = stored(tmp_path / "packed", name)
    items = dict(packed_stream(source, form))
    if name != "nvfp4":  # whose members share a scale with all of the group here
        assert digests(items.items()) == digests(packed_stream(write(tmp_path / "bf16", dense()), form))
    assert (source.format, packed_names(source, form)) == (name, set(LINEARS))
    assert set(items) == set(LINEARS) | (dense().keys() - {f"{module}.weight" for module in LINEARS})
    assert torch.equal(items["lm_head.weight"], dense()["lm_head.weight"])


def test_ignored_modules_stay(tmp_path):
    rules = ["lm_head", "re:.*mlp.*"]
    source = write(tmp_path, dense())
    items = dict(packed_stream(source, get_format("int8"), rules))
    assert packed_names(source, get_format("int8"), rules) == set(LINEARS[:4])
    assert isinstance(items[f"{LINEARS[6]}.weight"], torch.Tensor)


def test_scales_that_other_tools_write_in_bf16_are_read(tmp_path):
    def halve(tensors):
        for key in list(tensors):
            if key.endswith("weight_scale"):
                tensors[key] = tensors[key].bfloat16()

    found = dict(packed_stream(stored(tmp_path, "int8", halve), get_format("int8")))
    scale = found[LINEARS[0]].block_scale
    assert scale.dtype == torch.float32
    assert torch.equal(scale, scale.bfloat16().float())


@pytest.mark.parametrize("name", NAMES)
def test_another_format_is_refused(tmp_path, name):
    other = "fp8" if name == "nvfp4" else "nvfp4"
    sentence = rf"is quantized in another format: {other}, and {name} is asked for\. .*\+rollout={other}"
    with pytest.raises(CheckpointFormatError, match=sentence):
        next(packed_stream(stored(tmp_path, other), get_format(name)))


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_head_is_refused(tmp_path, name):
    form = get_format(name)

    def pack(tensors):
        tensors |= named_tensors("lm_head", form.quantize(tensors.pop("lm_head.weight")))

    sentence = rf"packs 'lm_head', and only linears inside the layers may be packed: .*--format {name}`, which leaves"
    with pytest.raises(CheckpointFormatError, match=sentence):
        check_held(stored(tmp_path, name, pack, ignore=[]), form)


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_not_packed_at_all_are_refused(tmp_path, name):
    source = write(tmp_path, dense(), get_format(name).config())
    with pytest.raises(CheckpointFormatError, match=rf"holds no packed weight, and its config.json says .* {name}\."):
        check_held(source, get_format(name))


@pytest.mark.parametrize("name", NAMES)
def test_linears_that_targets_leave_out_pass_and_are_listed(tmp_path, name):
    form, kept = get_format(name), LINEARS[:4]

    def unpack(tensors):
        for module in kept:
            for part in form.parts:
                del tensors[f"{module}.{part}"]
            tensors[f"{module}.weight"] = dense()[f"{module}.weight"]

    groups = form.config()["config_groups"]
    groups["group_0"]["targets"] = ["re:.*mlp.*"]
    source = stored(tmp_path, name, unpack, config_groups=groups)
    assert left_out(source, form) == ("lm_head", *sorted(kept))
    items = dict(packed_stream(source, form))
    assert packed_names(source, form) == set(LINEARS[4:])
    assert all(torch.equal(items[f"{module}.weight"], dense()[f"{module}.weight"]) for module in kept)


PARTS = [(name, part) for name in NAMES for part in get_format(name).parts]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_weight_without_one_of_its_tensors_is_refused(tmp_path, name, part):
    source = stored(tmp_path, name, lambda tensors: tensors.pop(f"{LINEARS[3]}.{part}"))
    sentence = rf"'{LINEARS[3]}' of .* lacks \['{part}'\]\. Download or quantize the model again"
    if name in ("int8", "fp8") and part == "weight_scale":
        sentence = f"holds codes and no scales of '{LINEARS[3]}'"
    with pytest.raises(CheckpointFormatError, match=sentence):
        list(packed_stream(source, get_format(name)))


DAMAGE = {
    "no codes": (lambda t: t.pop(f"{LINEARS[3]}.weight"), r"lacks \['weight'\]"),
    "zero point": (
        lambda t: t.update({f"{LINEARS[3]}.weight_zero_point": torch.zeros(64, 1)}),
        r"has \['weight_zero_point'\] beside",
    ),
    "scale": (lambda t: t[f"{LINEARS[3]}.weight_scale"].neg_(), "its scales are not all positive numbers"),
    "shape": (
        lambda t: t.update({f"{LINEARS[3]}.weight_scale": torch.ones(1)}),
        r"weight_scale of INT8 .*\(64, 1\)",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_weight_is_refused_by_name(tmp_path, kind):
    change, sentence = DAMAGE[kind]
    with pytest.raises(CheckpointFormatError, match=rf"o_proj' of .*{sentence}.*\.$"):
        list(packed_stream(stored(tmp_path, "int8", change), get_format("int8")))


def test_experts_are_held_by_nvfp4_alone(tmp_path):
    from qerl_testing import random_qwen3_moe

    random_qwen3_moe().save_pretrained(tmp_path)
    source = open_source(tmp_path)
    check_held(source, NVFP4())
    with pytest.raises(CheckpointFormatError, match=r"experts is packed in another format: int8, .* Accepted is nvfp4"):
        check_held(source, get_format("int8"))


@pytest.mark.parametrize(
    ("family", "held", "told"),
    [("mamba", [], "other"), ("gpt_neox", SIBLINGS, "fp8, int8, mxfp4, other"), ("mamba2", NAMES, "")],
)
def test_a_family_that_vllm_does_not_load_in_a_format_is_refused(tmp_path, family, held, told):
    source = write(tmp_path, dense(), family=family)
    for name in NAMES:
        if name in held:
            check_held(source, get_format(name))
            continue
        sentence = rf"^vLLM does not load this family in {name}: model_type={family} of .* Accepted are {told} families"
        with pytest.raises(CheckpointFormatError, match=sentence):
            check_held(source, get_format(name))


def test_a_shard_that_may_not_be_read_is_not_told_as_missing(tmp_path, monkeypatch):
    def refuse(path, framework):  # as safetensors 0.8.0 does; root, who may run this, may read all
        raise FileNotFoundError(f"No such file or directory: {path}")

    write(tmp_path / "m", dense())
    monkeypatch.setattr("verl_qerl.checkpoints.source.safe_open", refuse)
    with pytest.raises(PermissionError) as found:
        open_source(tmp_path / "m")
    assert (found.value.errno, found.value.filename) == (errno.EACCES, str(tmp_path / "m" / "model.safetensors"))
