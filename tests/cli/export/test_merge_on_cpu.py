import shutil
from dataclasses import replace

import pytest

pytest.importorskip("verl")

import torch
from safetensors.torch import load_file, save_file

from verl_qerl.checkpoints.source import open_source
from verl_qerl.checkpoints.stream import packed_stream
from verl_qerl.cli.export.adapter import read_adapter
from verl_qerl.cli.export.fsdp_checkpoint import open_checkpoint
from verl_qerl.cli.export.merge import Merge, open_base
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.formats import NVFP4, PackedWeight
from verl_qerl.formats.reference import dequantize


def merge_of(checkpoint, base=None) -> Merge:
    found = open_base(base, checkpoint)
    return Merge(found, read_adapter(checkpoint, found.shapes), checkpoint, "cpu", lambda _: None)


def dense_base(case, path):
    """What training computed with, in float32; from the files alone."""
    if case.startswith("stock"):
        return dict(open_source(path).tensors())
    return {
        f"{name}.weight" if isinstance(item, PackedWeight) else name: dequantize(item, torch.float32)
        if isinstance(item, PackedWeight)
        else item
        for name, item in packed_stream(open_source(path), NVFP4(scale="minmax"))
    }


@pytest.mark.parametrize("case", ["ours-nvfp4-lora", "ours-bf16-full", "ours-tied-full", "stock-bf16-full"])
def test_the_merged_model_is_base_plus_scaled_product(trained, case):
    found = trained(case)
    merge = merge_of(open_checkpoint(found.actor), None if case.startswith("ours") else str(found.base))
    merged, base = dict(merge.tensors()), dense_base(case, found.base)
    assert merged.keys() == base.keys() == merge.base.specs.keys()
    assert len(merge.relative_update) == 14
    for name, tensor in merged.items():
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, merge.base.specs[name].shape)
        expected = base[name].float()
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.default.weight"
        if key.format("A") in found.found["adapter"]:
            A, B = (found.found["adapter"][key.format(letter)].float() for letter in "AB")
            expected = expected + 2 * (B @ A)  # lora_alpha 16 over r 8
            assert not torch.equal(tensor, base[name].bfloat16()), f"{name} was trained"
        # Within one rounding: the sums in B A may run in another order.
        torch.testing.assert_close(tensor.float(), expected, rtol=2**-8, atol=1e-6)
    assert merge.changed == []


@pytest.mark.parametrize("case", ["ours-tied-full", "uaq-tied-all"])
def test_a_family_may_have_its_head_in_its_embedding(trained, case):
    merge = merge_of(open_checkpoint(trained(case).actor))
    config = {k: v for k, v in merge.base.source.config.items() if k != "tie_word_embeddings"}
    for family in ("smollm3", "llama"):
        source = replace(merge.base.source, config=config | {"model_type": family})
        merge.base = replace(merge.base, source=source)
        if family == "smollm3":
            assert dict(merge.tensors()).keys() == merge.base.specs.keys()
        else:
            with pytest.raises(CheckpointFormatError, match=r"^the checkpoint does not fit the base: it holds 'lm_he"):
                list(merge.tensors())


def test_a_base_that_moved_is_named_anew(trained, models):
    checkpoint = open_checkpoint(trained("ours-nvfp4-lora").actor)
    moved = replace(checkpoint, record=replace(checkpoint.record, base=str(models / "gone")))
    with pytest.raises(ValueError, match=r"^the base is not found: .*/gone\. .* with --base \(eval: --model\)\."):
        merge_of(moved)
    merge = merge_of(moved, str(models / "nvfp4"))
    list(merge.tensors())
    assert merge.digests == checkpoint.record.digests


def test_the_bf16_source_of_a_packed_base_is_the_same_base(trained, models):
    # The record's scale choice is used: `minmax`, with which models/nvfp4 was made.
    checkpoint = open_checkpoint(trained("ours-nvfp4-lora").actor)
    packed, quantized = (dict(merge_of(checkpoint, str(models / name)).tensors()) for name in ("nvfp4", "bf16"))
    assert all(torch.equal(packed[name], quantized[name]) for name in packed)


def test_a_base_with_other_bits_is_refused(trained, models):
    checkpoint = open_checkpoint(trained("ours-nvfp4-lora").actor)
    digests = checkpoint.record.digests
    last = list(digests)[-1]
    for name in (last, "model.layers.9.mlp.up_proj"):  # other bits; a linear that the base lacks
        record = replace(checkpoint.record, digests=digests | {name: "0" * 16})
        with pytest.raises(CheckpointFormatError, match=f"the base is not the one of the checkpoint: .*'{name}'"):
            list(merge_of(replace(checkpoint, record=record)).tensors())
    mse = replace(checkpoint, record=replace(checkpoint.record, scale="mse"))
    with pytest.raises(CheckpointFormatError, match="the base is not the one of the checkpoint"):
        list(merge_of(mse, str(models / "bf16")).tensors())


def test_a_checkpoint_that_names_no_base_wants_one(trained):
    with pytest.raises(ValueError, match=r"^the base is not found: .*actor names none\. .* with --base "):
        open_base(None, open_checkpoint(trained("stock-bf16-full").actor))


@pytest.mark.parametrize("case", ["stock-bf16-full", "uaq-bf16-all"])
def test_a_packed_base_is_not_what_a_run_on_dense_weights_saw(trained, models, case):
    checkpoint = open_checkpoint(trained(case).actor)
    with pytest.raises(ValueError, match=r"^the checkpoint was not trained on a packed base: .* is in nvfp4, "):
        open_base(str(models / "nvfp4"), checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_diverged_is_not_merged(trained, value):
    checkpoint = open_checkpoint(trained("uaq-bf16-all").actor)
    others = dict(checkpoint.others) | {"model.norm.weight": torch.full((128,), value)}
    with pytest.raises(CheckpointFormatError, match=r"^the checkpoint holds NaN or infinite values: 'model.norm"):
        list(merge_of(replace(checkpoint, others=others)).tensors())


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_damaged_base_is_not_merged(trained, models, tmp_path, name):
    checkpoint, damaged = (
        open_checkpoint(trained("stock-bf16-full").actor),
        shutil.copytree(models / "bf16", tmp_path / "b"),
    )
    shard = damaged / open_source(damaged).files[name]
    tensors = load_file(shard)
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, shard)
    others = {other: tensor for other, tensor in checkpoint.others.items() if other != name}
    with pytest.raises(ValueError, match=f"^'{name}' holds NaN or infinite values"):
        list(merge_of(replace(checkpoint, others=others), str(damaged)).tensors())


def test_what_was_trained_besides_the_adapter_is_taken_and_named(trained):
    checkpoint = open_checkpoint(trained("ours-bf16-full").actor)
    norm = "model.layers.0.input_layernorm.weight"
    others = dict(checkpoint.others) | {norm: torch.full((128,), 1.5)}
    merge = merge_of(replace(checkpoint, others=others))
    assert torch.equal(dict(merge.tensors())[norm], torch.full((128,), 1.5, dtype=torch.bfloat16))
    assert merge.changed == [norm]


def test_a_linear_of_zeros_has_a_number_in_the_report(trained):
    checkpoint = open_checkpoint(trained("uaq-bf16-all").actor)
    name = "model.layers.0.mlp.down_proj"
    zeros = torch.zeros_like(checkpoint.others[f"{name}.weight"])
    merge = merge_of(replace(checkpoint, others=dict(checkpoint.others) | {f"{name}.weight": zeros}))
    list(merge.tensors())
    assert merge.relative_update[name] == 1.0


@pytest.mark.parametrize("extra", [{"model.other.weight": torch.zeros(4)}, {"model.norm.weight": torch.zeros(64)}])
def test_tensors_without_a_place_in_the_base_are_refused(trained, extra):
    checkpoint = open_checkpoint(trained("ours-nvfp4-lora").actor)
    with pytest.raises(CheckpointFormatError, match="the checkpoint does not fit the base: it holds"):
        list(merge_of(replace(checkpoint, others=extra)).tensors())


def test_the_scale_choice_of_the_base_is_found(trained, models, tmp_path):
    checkpoint = open_checkpoint(trained("ours-nvfp4-lora").actor)
    assert open_base(str(models / "bf16"), checkpoint).scale == "minmax"  # from the record
    assert open_base(str(models / "nvfp4"), checkpoint).scale == "minmax"  # from what `quantize` wrote beside it
    stock = open_checkpoint(trained("stock-bf16-full").actor)
    assert open_base(str(models / "bf16"), stock).scale is None
    unknown = shutil.copytree(models / "nvfp4", tmp_path / "unknown")
    (unknown / "quantization_report.json").write_text('{"layers": {"a": {}}}')
    with pytest.raises(CheckpointFormatError, match="the report beside the base cannot be read"):
        _ = open_base(str(unknown), checkpoint).scale
    (unknown / "quantization_report.json").unlink()
    assert open_base(str(unknown), checkpoint).scale is None


def test_linears_left_in_bf16_are_named_in_full_for_a_quantized_export(trained):
    checkpoint = open_checkpoint(trained("ours-bf16-full").actor)
    record = replace(checkpoint.record, ignore=("lm_head", "re:.*layers.1.mlp"))
    ignore = open_base(None, replace(checkpoint, record=record)).ignore
    assert sorted(ignore) == ["lm_head", *(f"model.layers.1.mlp.{leaf}_proj" for leaf in ("down", "gate", "up"))]
