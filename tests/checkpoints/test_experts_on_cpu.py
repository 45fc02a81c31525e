"""Mixtures of experts as they are read and quantized."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from qerl_testing import quantize_group, random_qwen3_moe
from safetensors.torch import load_file, save_file

from verl_qerl.checkpoints.digest import weight_digest
from verl_qerl.checkpoints.experts import is_expert
from verl_qerl.checkpoints.groups import linears_among
from verl_qerl.checkpoints.source import Source, open_source
from verl_qerl.checkpoints.stream import packed_names, packed_stream
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import PackedWeight

pytest.importorskip("transformers")
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    random_qwen3_moe().save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 3  # gate and up of an expert may lie in different files
    return folder


@pytest.fixture
def changed(tmp_path, model_dir):
    """A copy in one file, its tensors and configuration given to a function that changes them."""

    def make(change) -> Path:
        folder = tmp_path / "changed"
        folder.mkdir()
        tensors = {name: t for file in model_dir.glob("*.safetensors") for name, t in load_file(file).items()}
        config = json.loads((model_dir / "config.json").read_text())
        change(tensors, config)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def packed(source: Source) -> dict[str, PackedWeight]:
    return {name: item for name, item in packed_stream(source) if isinstance(item, PackedWeight)}


def test_every_linear_of_every_expert_is_packed_and_the_router_is_not(model_dir):
    found = packed(open_source(model_dir))
    assert sum(is_expert(name) for name in found) == 4 * 3
    assert len(found) == 4 * 3 + 3 + 2 * 4  # experts, the dense layer's MLP, attention
    assert "model.layers.1.mlp.gate" not in found
    rest = [name for name, item in packed_stream(open_source(model_dir)) if isinstance(item, torch.Tensor)]
    assert "model.layers.1.mlp.gate.weight" in rest
    # Also with rules that do not name it, as an actor's.
    assert "model.layers.1.mlp.gate" not in packed_names(open_source(model_dir), ignore=["lm_head"])


def test_gate_and_up_of_one_expert_share_a_global_scale_and_experts_do_not(changed):
    def unequal(tensors, config):
        tensors[f"{EXPERTS}.2.up_proj.weight"] *= 64
        tensors[f"{EXPERTS}.3.gate_proj.weight"] *= 8

    found = packed(open_source(changed(unequal)))
    scales = {name: float(weight.global_decode_scale) for name, weight in found.items()}
    assert scales[f"{EXPERTS}.2.gate_proj"] == scales[f"{EXPERTS}.2.up_proj"] > scales[f"{EXPERTS}.3.up_proj"]
    assert scales[f"{EXPERTS}.3.gate_proj"] == scales[f"{EXPERTS}.3.up_proj"] > scales[f"{EXPERTS}.0.up_proj"]
    assert scales[f"{EXPERTS}.2.down_proj"] == scales[f"{EXPERTS}.0.down_proj"]


def test_the_bits_are_those_of_the_expert_alone(model_dir):
    tensors = {name: t for file in model_dir.glob("*.safetensors") for name, t in load_file(file).items()}
    pair = {f"{EXPERTS}.1.{kind}_proj": tensors[f"{EXPERTS}.1.{kind}_proj.weight"] for kind in ("gate", "up")}
    found = packed(open_source(model_dir))
    for name, weight in quantize_group(pair).items():
        assert weight_digest(found[name]) == weight_digest(weight)


def expect(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointFormatError, match=message):
        open_source(folder)


def test_a_missing_linear_of_an_expert(changed):
    folder = changed(lambda tensors, config: tensors.pop(f"{EXPERTS}.3.up_proj.weight"))
    expect(folder, r"the experts of 'model\.layers\.1\.mlp' .*: 11 of 12 linears .*first difference 'experts\.3\.up_pr")


@pytest.mark.parametrize(("count", "first"), [(3, "3.down_proj"), (5, "4.down_proj")])
def test_another_number_of_experts_than_the_configuration_says(changed, count, first):
    def change(tensors, config):
        config.pop("num_local_experts", None)
        config["num_experts"] = count

    expect(changed(change), rf"12 of {3 * count} linears .*first difference 'experts\.{first}'\. All of {count} exp")


def test_a_configuration_without_the_number(changed):
    def change(tensors, config):
        config.pop("num_local_experts", None)
        config.pop("num_experts", None)

    expect(changed(change), r"does not say how many experts it has: num_experts=None in config\.json\. A number")


def test_another_family(changed):
    folder = changed(lambda tensors, config: config.update(model_type="deepseek_v3"))
    expect(folder, r"^experts of this family are not supported: model_type=deepseek_v3, .* Accepted are qwen3_moe and")


def test_another_family_whose_experts_have_another_name(changed):
    def change(tensors, config):
        config.update(model_type="granitemoe", num_local_experts=4)
        for name in [name for name in tensors if ".experts." in name]:
            tensors.pop(name)
        tensors["model.layers.1.block_sparse_moe.input_linear.weight"] = torch.zeros(4, 192, 128)
        tensors["model.layers.1.block_sparse_moe.router.layer.weight"] = torch.zeros(4, 128)

    folder = changed(change)
    expect(folder, r"^experts of this family are not supported: model_type=granitemoe, by config\.json of .*")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 1, "num_local_experts": 0}))
    assert packed(open_source(folder))  # as dense models of such a family say it


def shared(tensors, config):
    tensors["model.layers.1.mlp.shared_expert.up_proj.weight"] = torch.zeros(32, 128)


def stacked(tensors, config):
    for name in [name for name in tensors if ".experts." in name]:
        tensors.pop(name)
    tensors[f"{EXPERTS}.down_proj"] = torch.zeros(4, 128, 96)


@pytest.mark.parametrize("change", [shared, stacked])
def test_experts_in_another_form(changed, change):
    expect(
        changed(change), r"holds experts in a form that is not read: 'model\.layers\.1\.mlp\.(shared|experts).* with"
    )


@pytest.mark.parametrize("rule", [r"re:.*\.experts\.3\.", f"{EXPERTS}.0.down_proj", r"re:.*layers\.1\.mlp"])
def test_experts_cannot_be_ignored(model_dir, rule):
    with pytest.raises(ValueError, match=r"^experts are not packed: \d+ of their linears in .* Remove the rule of"):
        packed_names(open_source(model_dir), ignore=["lm_head", rule])


def test_experts_that_an_nvfp4_checkpoint_left_dense(model_dir, tmp_path):
    from verl_qerl.cli.quantize.command import quantize_checkpoint

    quantize_checkpoint(model_dir, tmp_path / "nvfp4", device="cpu")
    assert packed(open_source(tmp_path / "nvfp4")).keys() == packed(open_source(model_dir)).keys()
    tensors = load_file(tmp_path / "nvfp4" / "model.safetensors")
    for part in ("packed", "scale", "global_scale"):
        tensors.pop(f"{EXPERTS}.2.down_proj.weight_{part}")
    shutil.copytree(tmp_path / "nvfp4", tmp_path / "mixed")
    save_file(tensors | {f"{EXPERTS}.2.down_proj.weight": torch.ones(128, 96)}, tmp_path / "mixed/model.safetensors")
    with pytest.raises(ValueError, match=rf"^experts are not packed: 1 of .* first '{EXPERTS}\.2\.down_proj'\."):
        list(packed_stream(open_source(tmp_path / "mixed")))


def test_the_stacked_experts_of_a_full_precision_actor():
    shapes = {name: tuple(tensor.shape) for name, tensor in random_qwen3_moe().state_dict().items()}
    with pytest.raises(
        CheckpointFormatError, match=r"^the actor holds experts in a form that is not read: .*gate_up_proj"
    ):
        linears_among(shapes, ["lm_head"], "the actor")
