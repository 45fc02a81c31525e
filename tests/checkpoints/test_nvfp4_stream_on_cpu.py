import json
import os
from pathlib import Path

import pytest
import torch
from qerl_testing import quantize, quantize_group
from safetensors.torch import save_file

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.source import INDEX, Source, open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import NVFP4, PackedWeight
from verl_qerl.formats.base import named_tensors
from verl_qerl.formats.nvfp4 import nvfp4_weight
from verl_qerl.formats.reference import dequantize

QKV = tuple(f"model.layers.0.self_attn.{kind}_proj" for kind in "qkv")
OTHERS = ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
PLAIN = ("model.embed_tokens.weight", "model.norm.weight", f"{QKV[0]}.bias", "lm_head.weight")
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
COMPRESSED = {"quantization_config": NVFP4().config()}


def bf16_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{module}.weight": torch.randn(32, 64, generator=generator) * 0.02 for module in (*QKV, *OTHERS)}
    tensors[f"{QKV[1]}.weight"] *= 100  # decides the scale of the group
    tensors |= {name: torch.randn(64, 64, generator=generator) for name in PLAIN}
    tensors["model.norm.weight"] = torch.ones(64)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def packed() -> dict[str, PackedWeight]:
    """What the model of `bf16_tensors` should become, by module."""
    weights = {name.removesuffix(".weight"): tensor for name, tensor in bf16_tensors().items()}
    groups = (QKV, OTHERS[:1], OTHERS[1:])
    return {name: item for group in groups for name, item in quantize_group({m: weights[m] for m in group}).items()}


def save(path: Path, shards: list[dict[str, torch.Tensor]], config: dict | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {}))
    if len(shards) == 1:
        save_file(shards[0], path / "model.safetensors")
        return path
    weight_map = {}
    for i, tensors in enumerate(shards):
        save_file(tensors, path / f"shard-{i}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"shard-{i}.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def spread(tensors: dict[str, torch.Tensor], num_shards: int) -> list[dict[str, torch.Tensor]]:
    """Neighbours in different shards, so that every group is spread."""
    names = list(tensors)
    return [{name: tensors[name] for name in names[i::num_shards]} for i in range(num_shards)]


def digests(source: Source, **options: object) -> dict[str, str]:
    """Of every packed weight; each comes once."""
    found = [(name, item) for name, item in packed_stream(source, **options) if isinstance(item, PackedWeight)]
    assert len(found) == len({name for name, _ in found})
    return {name: weight_digest(item) for name, item in found}


EXPECTED = {name: weight_digest(item) for name, item in packed().items()}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 10])
def test_shards_in_any_order_give_the_same_bits(tmp_path: Path, num_shards: int, reverse: bool) -> None:
    shards = spread(bf16_tensors(), num_shards)
    source = open_source(save(tmp_path / "m", shards[::-1] if reverse else shards))
    assert digests(source) == EXPECTED
    rest = {name: item for name, item in packed_stream(source) if isinstance(item, torch.Tensor)}
    assert set(rest) == set(PLAIN)
    assert all(torch.equal(rest[name], bf16_tensors()[name]) for name in PLAIN)


def test_fused_members_use_the_scale_of_the_group_and_others_their_own(tmp_path: Path) -> None:
    source = open_source(save(tmp_path / "m", spread(bf16_tensors(), 3)))
    found = {name: item for name, item in packed_stream(source) if isinstance(item, PackedWeight)}
    assert len({float(found[name].global_decode_scale) for name in QKV}) == 1
    alone = quantize(bf16_tensors()[f"{QKV[0]}.weight"])
    assert weight_digest(alone) != EXPECTED[QKV[0]]
    assert found[OTHERS[0]].global_decode_scale < found[QKV[0]].global_decode_scale


def test_scale_choice_is_passed_on(tmp_path: Path) -> None:
    source = open_source(save(tmp_path / "m", [bf16_tensors()]))
    expected = weight_digest(quantize(bf16_tensors()[f"{OTHERS[0]}.weight"], "minmax"))
    assert digests(source, form=NVFP4(scale="minmax"))[OTHERS[0]] == expected != EXPECTED[OTHERS[0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_input_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = bf16_tensors(dtype)
    source = open_source(save(tmp_path / "m", [tensors]))
    expected = quantize_group({m: tensors[f"{m}.weight"] for m in QKV})
    found = digests(source)
    assert {m: found[m] for m in QKV} == {m: weight_digest(item) for m, item in expected.items()}
    rest = dict(packed_stream(source))
    assert rest["model.norm.weight"].dtype == dtype


def compressed_tensors_file() -> dict[str, torch.Tensor]:
    plain = {name: bf16_tensors()[name] for name in PLAIN}
    return plain | {key: part for module, item in packed().items() for key, part in named_tensors(module, item).items()}


def modelopt_file() -> dict[str, torch.Tensor]:
    """As ModelOpt writes W4A4: codes named `weight`, the decode scale, scales of activations and of a KV cache."""
    tensors = {name: bf16_tensors()[name] for name in PLAIN}
    for module, item in packed().items():
        tensors[f"{module}.weight"] = item.codes
        tensors[f"{module}.weight_scale"] = item.block_scale
        tensors[f"{module}.weight_scale_2"] = item.global_decode_scale.clone()
        tensors[f"{module}.input_scale"] = torch.tensor(0.5)
    return tensors | {f"{module}.{module[-6]}_scale": torch.tensor(1.0) for module in QKV[1:]}


@pytest.mark.parametrize("num_shards", [1, 5])
@pytest.mark.parametrize(
    ("tensors", "config"),
    [(compressed_tensors_file(), COMPRESSED), (modelopt_file(), MODELOPT)],
    ids=["ct", "modelopt"],
)
def test_packed_checkpoints_pass_as_they_are(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict, num_shards: int
) -> None:
    source = open_source(save(tmp_path / "m", spread(tensors, num_shards), config))
    assert digests(source) == EXPECTED
    rest = {name: item for name, item in packed_stream(source) if isinstance(item, torch.Tensor)}
    assert set(rest) == set(PLAIN)
    assert torch.equal(rest[f"{QKV[0]}.bias"], bf16_tensors()[f"{QKV[0]}.bias"])


def test_global_scales_that_are_no_powers_of_two_are_said_once(tmp_path: Path, caplog) -> None:
    tensors = compressed_tensors_file()
    list(packed_stream(open_source(save(tmp_path / "ours", spread(tensors, 1), COMPRESSED))))
    assert not caplog.messages
    for module in OTHERS:
        tensors[f"{module}.weight_global_scale"] = tensors[f"{module}.weight_global_scale"] * 1.5
    list(packed_stream(open_source(save(tmp_path / "theirs", spread(tensors, 1), COMPRESSED))))
    (message,) = caplog.messages
    assert f"the global scales of {len(OTHERS)} linears are no powers of two" in message


def test_a_modelopt_weight_without_its_global_scale_is_refused(tmp_path: Path) -> None:
    tensors = modelopt_file()
    del tensors[f"{OTHERS[0]}.weight_scale_2"]
    source = open_source(save(tmp_path / "m", [tensors], MODELOPT))
    with pytest.raises(CheckpointFormatError, match=rf"'{OTHERS[0]}' of .* lacks \['weight_scale_2'\]"):
        list(packed_stream(source))


@pytest.mark.parametrize("factor", [2.0, 2.0**-5, 1.5], ids=str)
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_fused_members_that_differ_by_a_power_of_two_share_a_scale_without_loss(
    tmp_path: Path, layout: str, factor: float
) -> None:
    weights = packed()
    other = weights[QKV[2]]
    weights[QKV[2]] = nvfp4_weight(other.codes, other.block_scale, other.global_decode_scale * factor)
    tensors = {name: bf16_tensors()[name] for name in PLAIN}
    for module, weight in weights.items():
        tensors |= named_tensors(module, weight, layout)
    config = COMPRESSED if layout == "compressed-tensors" else MODELOPT
    source = open_source(save(tmp_path / "m", spread(tensors, 3), config))
    if factor == 1.5:
        with pytest.raises(CheckpointFormatError, match=r"different global scales: .* Accepted is one scale for a gr"):
            list(packed_stream(source))
        return
    found = {name: item for name, item in packed_stream(source) if isinstance(item, PackedWeight)}
    assert len({float(found[name].global_decode_scale) for name in QKV}) == 1
    for name, weight in weights.items():
        assert torch.equal(dequantize(found[name], torch.float32), dequantize(weight, torch.float32)), name


def test_a_tensor_that_two_shards_hold_comes_once(tmp_path: Path) -> None:
    shards = spread(bf16_tensors(), 2)
    shards[0] |= shards[1]
    source = open_source(save(tmp_path / "m", shards))
    assert digests(source) == EXPECTED
    names = [name for name, item in packed_stream(source) if isinstance(item, torch.Tensor)]
    assert sorted(names) == sorted(PLAIN)


def test_of_a_tensor_that_two_shards_hold_the_one_counts_that_the_index_names(tmp_path: Path) -> None:
    tensors = bf16_tensors()
    shards = spread(tensors, 2)
    path = save(tmp_path / "m", shards)
    others = {name: tensor * 3 for name, tensor in tensors.items()} | {"model.norm.weight": torch.zeros(8)}
    for i, shard in enumerate(shards):
        save_file(others | shard, path / f"shard-{i}.safetensors")
    source = open_source(path)
    assert digests(source) == EXPECTED
    assert source.specs["model.norm.weight"].shape == (64,)
    rest = {name: item for name, item in packed_stream(source) if isinstance(item, torch.Tensor)}
    assert all(torch.equal(rest[name], tensors[name]) for name in PLAIN)


NO_WEIGHTS = {
    "pickled": (
        "pytorch_model.bin",
        r"holds its weights in another kind of file, pytorch_model\.bin\. .*save_pre",
    ),
    "no index": (
        "model-00001-of-00002.safetensors",
        r"holds 1 safetensors files, first model-0.*, and no model\.safet",
    ),
    "adapter": (
        "adapter_model.safetensors",
        r"holds an adapter and no model\. .* Name the model that it was trained on",
    ),
    "nothing": ("tokenizer.json", r"holds no weights\. Accepted are model\.safetensors, or shards with their model\.s"),
}


@pytest.mark.parametrize("case", NO_WEIGHTS)
def test_a_directory_without_weights_that_are_read_says_what_it_has(tmp_path: Path, case: str) -> None:
    name, sentence = NO_WEIGHTS[case]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointFormatError, match=rf"^{tmp_path} {sentence}") as caught:
        open_source(tmp_path)
    assert "missing" not in str(caught.value)


def test_paths_of_the_wrong_kind_are_said(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(CheckpointFormatError, match=r"a-file is a file\. The directory of a model .* is accepted\."):
        open_source(tmp_path / "a-file")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointFormatError, match=r"config\.json is a directory\. A file with a JSON object is acc"):
        open_source(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "m", spread(bf16_tensors(), 3))
    (path / "shard-1.safetensors").unlink()
    with pytest.raises(CheckpointFormatError, match=r"a shard is missing: .*shard-1\.safetensors"):
        open_source(path)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_cut_shard_is_named(tmp_path: Path, keep: int) -> None:
    path = save(tmp_path / "m", spread(bf16_tensors(), 3))
    shard = path / "shard-2.safetensors"
    os.truncate(shard, keep if keep > 0 else shard.stat().st_size + keep)
    with pytest.raises(CheckpointFormatError, match=r"a shard cannot be read: .*shard-2\.safetensors"):
        open_source(path)


def test_an_indexed_tensor_that_no_shard_holds_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "m", spread(bf16_tensors(), 2))
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.layers.7.lost.weight"] = "shard-0.safetensors"
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointFormatError, match=r"names 1 tensors that their shard does not hold, first 'model"):
        open_source(path)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_model_without_one_of_its_layers_is_refused(tmp_path: Path, num_shards: int) -> None:
    shards = spread(bf16_tensors(), num_shards)
    open_source(save(tmp_path / "whole", shards, {"num_hidden_layers": 1}))
    with pytest.raises(CheckpointFormatError, match=r"holds no layer 1, .* num_hidden_layers=3"):
        open_source(save(tmp_path / "cut", shards, {"num_hidden_layers": 3}))


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}], ids=str)
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, index: dict) -> None:
    path = save(tmp_path / "m", spread(bf16_tensors(), 2))
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointFormatError, match=r"does not say which shard holds what: weight_map="):
        open_source(path)


def test_a_dtype_we_cannot_read_is_named(tmp_path: Path) -> None:
    tensors = {"model.layers.0.x.weight": torch.zeros(2, 16, dtype=torch.uint16)}
    with pytest.raises(CheckpointFormatError, match=r"holds tensors of dtype \['U16'\]"):
        open_source(save(tmp_path / "m", [tensors]))


def test_a_name_that_is_no_directory_is_looked_up_as_a_hub_id(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointFormatError, match="neither a directory nor a model of the hub"):
        open_source("nobody/no-such-model")


@pytest.mark.parametrize("path", ["./missing", "../missing"])
def test_a_path_that_is_not_there_is_no_hub_id(path):
    with pytest.raises(CheckpointFormatError, match=r"missing does not exist\. A directory in"):
        open_source(path)


def test_a_hub_id_is_fetched_at_its_revision_to_its_folder(monkeypatch, tmp_path):
    path, asked = save(tmp_path / "m", [bf16_tensors()]), []

    def fetched(name: str, **options: object) -> str:
        asked.append((name, options["revision"], options["cache_dir"]))
        return str(path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    open_source("somebody/model", "my-branch", "/data/hub")
    open_source("somebody/model")
    assert asked == [("somebody/model", "my-branch", "/data/hub"), ("somebody/model", None, None)]
    open_source(path, "my-branch")  # a directory has none
    assert len(asked) == 2
