"""One made-up directory for each entry of a quantization_config that others write."""

import json

import pytest
import torch
from safetensors.torch import save_file

from verl_qerl.checkpoints.quantization_config import _say_unused, stored_format
from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import check_held, left_out, packed_stream
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import NVFP4, get_format
from verl_qerl.formats.base import named_tensors
from verl_qerl.formats.nvfp4_layout import modelopt_config

LINEAR = "model.layers.0.mlp.down_proj"
ROTATED = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"]}]}}}
FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
W4A4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


@pytest.fixture(autouse=True)
def fresh():
    _say_unused.cache_clear()


@pytest.fixture
def write(tmp_path):
    """Writes a linear in a format (`modelopt`: NVFP4 with ModelOpt's names), described by `config`."""

    def make(config, form="nvfp4"):
        layout = "modelopt" if form == "modelopt" else "compressed-tensors"
        chosen = get_format("nvfp4" if form == "modelopt" else form)
        weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
        tensors = named_tensors(LINEAR, chosen.quantize(weight), layout)
        save_file(tensors | {"lm_head.weight": torch.ones(8, 64).bfloat16()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        return tmp_path

    return make


def ours(form, **entries):
    """What the format writes, with these entries of the object, or below it of its group or the group's weights."""
    found = get_format(form).config()
    group = found["config_groups"]["group_0"]
    for name, value in entries.items():
        level, _, key = name.rpartition("__")
        {"": found, "group": group, "weights": group["weights"], "activations": group["input_activations"]}[level][
            key
        ] = value
    return found


def with_group(form, **entries):
    found = ours(form)
    found["config_groups"]["group_1"] = {**found["config_groups"]["group_0"], **entries}
    return found


REFUSED = {
    "transforms": ("nvfp4", ours("nvfp4", transform_config=ROTATED), r"transform_config=\{'config_groups': \{'R4'"),
    "transforms of int8": ("int8", ours("int8", transform_config=ROTATED), r"transform_config="),
    "sparse": ("nvfp4", ours("nvfp4", sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config=.*bitmask"),
    "an unknown entry": ("nvfp4", ours("nvfp4", rotation=True), r"rotation=True in its quantization_config"),
    "of a group": ("nvfp4", ours("nvfp4", group__output_activations=FP8_CACHE), r"group_0\.output_activations="),
    "unknown of a group": ("nvfp4", ours("nvfp4", group__smooth=0.5), r"group_0\.smooth=0\.5"),
    "unknown argument": ("nvfp4", ours("nvfp4", weights__zero_point=3), r"group_0\.weights\.zero_point=3"),
    "columns in another order": ("nvfp4", ours("nvfp4", weights__actorder="group"), r"weights\.actorder=group"),
    "not compressed": ("nvfp4", ours("nvfp4", quantization_status="frozen"), r"quantization_status='frozen'"),
    "two formats": ("nvfp4", with_group("nvfp4", format="float-quantized"), r"group_1\.format='float-quantized'"),
    "groups of 32": (
        "nvfp4",
        ours("nvfp4", weights__group_size=32),
        r"other arguments: group_0\.weights\.group_size=32\. Accepted with nvfp4 are group_0\.weights\.group_size=16\.",
    ),
    "another group's size": (
        "nvfp4",
        with_group("nvfp4", weights=ours("mxfp4")["config_groups"]["group_0"]["weights"]),
        r"other arguments: group_1\.weights\.strategy='group', group_1\.weights\.group_size=32\.",
    ),
    "groups without weights": ("nvfp4", with_group("nvfp4", weights=None), r"other arguments: group_1\.weights=None"),
    "no groups": ("nvfp4", ours("nvfp4", config_groups={}), r"does not say how it is quantized: config_groups=\{\}"),
    "groups of no kind": ("nvfp4", ours("nvfp4", config_groups=["Linear"]), r"config_groups=\['Linear'\]\. An obj"),
    "weights of no kind": (
        "nvfp4",
        with_group("nvfp4", weights=4),
        r"how it is quantized: group_1\.weights=4\. An object",
    ),
    "activations of no kind": (
        "int8",
        with_group("int8", input_activations=["x"]),
        r"quantized: group_1\.input_activations=\['x'\]\. An",
    ),
    "static scales": (
        "fp8",
        ours("fp8", activations__dynamic=False, activations__strategy="tensor"),
        r"other arguments: group_0\.input_activations\.strategy='tensor', group_0\.input_activations\.dynamic=False\."
        r" Accepted with fp8 are .*strategy='token', .*dynamic=True\. Quantize the original model with `python -m",
    ),
    "no activations": ("int8", ours("int8", group__input_activations=None), r"input_activations=None\. Accepted with"),
    "groups of 32 of ModelOpt": (
        "modelopt",
        modelopt_config(["lm_head"]) | {"group_size": 32},
        r"other arguments: group_size=32\. Accepted with nvfp4 are group_size=16\.",
    ),
    "ModelOpt's groups": (
        "modelopt",
        modelopt_config(["lm_head"]) | {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
        r"other arguments: group_0\.weights\.num_bits=8, group_0\.weights\.group_size=None\.",
    ),
    "ModelOpt's AWQ": (
        "modelopt",
        modelopt_config(["lm_head"]) | {"quant_algo": "NVFP4_AWQ", "pre_quant_scale": True},
        r"in a way that is not read: quant_method='modelopt', quant_algo='NVFP4_AWQ'\.",
    ),
    "a scale before the linear": (
        "modelopt",
        modelopt_config(["lm_head"]) | {"pre_quant_scale": True},
        r"pre_quant_scale=True in its quantization_config",
    ),
    "names the packed linear": (
        "nvfp4",
        ours("nvfp4", ignore=[LINEAR]),
        rf"packs '{LINEAR}', which its config\.json",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_honoured_is_refused_by_both_sides_and_every_reader(write, case):
    form, config, sentence = REFUSED[case]
    chosen = get_format("nvfp4" if form == "modelopt" else form)
    path = write(config, form)
    for read in (check_held, lambda *pair: next(packed_stream(*pair))):
        with pytest.raises(CheckpointFormatError, match=rf"^{path} .*{sentence}") as caught:
            read(open_source(path), chosen)
        assert str(caught.value).endswith(".")


HONOURED = {
    "empty entries": ("nvfp4", ours("nvfp4", transform_config={}, sparsity_config={}, rotation=None)),
    "dense": ("nvfp4", ours("nvfp4", sparsity_config={"format": "dense", "global_sparsity": 0.1, "targets": []})),
    "notes": ("nvfp4", ours("nvfp4", version="0.12", global_compression_ratio=1.5)),
    "groups of one kind": ("nvfp4", with_group("nvfp4", targets=["re:.*down_proj"])),
    "a group that leaves the format to the whole": ("nvfp4", with_group("nvfp4", format=None)),
    "GPTQ in the order of columns": ("nvfp4", ours("nvfp4", weights__actorder="static")),
    "patterns as targets": ("fp8", ours("fp8", group__targets=["re:.*down_proj"])),
    "defaults left out": ("fp8", {**ours("fp8"), "kv_cache_scheme": None}),
    "ModelOpt's groups": (
        "modelopt",
        modelopt_config(["lm_head*"])
        | {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}},
    ),
    "ModelOpt without a size": ("modelopt", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}


@pytest.mark.parametrize("case", HONOURED)
def test_the_rest_is_read(write, case):
    form, config = HONOURED[case]
    chosen = get_format("nvfp4" if form == "modelopt" else form)
    source = open_source(write(config, form))
    check_held(source, chosen)
    assert {name for name, item in packed_stream(source, chosen) if not isinstance(item, torch.Tensor)} == {LINEAR}


UNUSED = {
    "cache": ("nvfp4", ours("nvfp4", kv_cache_scheme=FP8_CACHE), "kv_cache_scheme"),
    "activations": ("nvfp4", ours("nvfp4", group__input_activations=W4A4), "group_0.input_activations"),
    "cache of int8": ("int8", ours("int8", kv_cache_scheme=FP8_CACHE), "kv_cache_scheme"),
    "ModelOpt": (
        "modelopt",
        modelopt_config(["lm_head"]) | {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
        "kv_cache_quant_algo, quant_algo=NVFP4 (of activations)",
    ),
}


@pytest.mark.parametrize("case", UNUSED)
def test_what_concerns_activations_and_cache_alone_is_said_once(write, caplog, case):
    form, config, names = UNUSED[case]
    path = write(config, form)
    for _ in range(2):
        check_held(open_source(path), get_format("nvfp4" if form == "modelopt" else form))
    (message,) = caplog.messages
    assert f"{path} was also made for quantized activations or a quantized KV cache ({names}): both stay in" in message


def test_what_we_write_is_read_without_a_word(write, caplog):
    for form in ("nvfp4", "int8", "fp8", "mxfp4"):
        check_held(open_source(write(ours(form), form)), get_format(form))
    check_held(open_source(write(modelopt_config(["lm_head"]), "modelopt")), get_format("nvfp4"))
    assert not caplog.messages


def test_the_older_name_of_the_entry_is_read(write):
    path = write(ours("nvfp4"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"compression_config": config["quantization_config"]}))
    source = open_source(path)
    assert (source.layout, left_out(source, get_format("nvfp4"))) == ("compressed-tensors", ("lm_head",))


@pytest.mark.parametrize(
    ("found", "stored"),
    [
        ({}, (None, "bf16")),
        ({"quantization_config": None}, (None, "bf16")),
        ({"quantization_config": NVFP4().config()}, ("nvfp4", "compressed-tensors")),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, ("nvfp4", "modelopt")),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}}, ("nvfp4", "modelopt")),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
            ("int8", "compressed-tensors"),
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
            ("fp8", "compressed-tensors"),
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}},
            ("mxfp4", "compressed-tensors"),
        ),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, ("finegrained-fp8",) * 2),
    ],
)
def test_format_and_layout_follow_the_config(found: dict, stored: tuple) -> None:
    assert stored_format(found) == stored


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, ", format='pack-quantized'"),
        ({"quant_method": "compressed-tensors", "format": ["int8"]}, r", format=\['int8'\]"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ", quant_algo='FP8'"),
        ({"quant_method": "gptq", "bits": 4}, ""),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ", fmt='e5m2'"),
    ],
)
def test_other_quantizations_are_refused(found: dict, told: str) -> None:
    sentence = rf"is quantized in a way that is not read: quant_method='{found['quant_method']}'{told}\. Accepted"
    with pytest.raises(CheckpointFormatError, match=sentence):
        stored_format({"quantization_config": found})


def test_a_quantization_config_of_another_kind_is_refused() -> None:
    with pytest.raises(CheckpointFormatError, match=r"is quantized: quantization_config='nvfp4'\. An object"):
        stored_format({"quantization_config": "nvfp4"})
