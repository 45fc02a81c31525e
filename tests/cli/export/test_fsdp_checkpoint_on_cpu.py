import json
import os
import shutil

import pytest

pytest.importorskip("verl")

import torch

from verl_qerl.cli.export.fsdp_checkpoint import open_checkpoint
from verl_qerl.errors import CheckpointFormatError

CASE = "ours-nvfp4-lora"


@pytest.fixture
def copy(trained, tmp_path):
    """A copy of a checkpoint's folder, to be damaged."""
    return shutil.copytree(trained(CASE).actor, tmp_path / "actor")


def rewrite(file, change):
    shard = torch.load(file, weights_only=True)
    torch.save(change(shard), file)


@pytest.mark.parametrize("case", [CASE, "ours-bf16-full", "stock-bf16-full"])
def test_shards_of_two_ranks_make_what_the_engine_held(trained, case):
    checkpoint = open_checkpoint(trained(case).run / "global_step_4")
    assert checkpoint.world_size == 2
    expected = dict(trained(case).found["adapter"])
    for module, factors in checkpoint.factors.items():
        for letter, factor in zip("AB", factors, strict=True):
            assert torch.equal(factor, expected.pop(f"base_model.model.{module}.lora_{letter}.default.weight"))
    assert not expected


def test_tensors_besides_the_adapter_have_the_names_of_the_base(trained):
    assert open_checkpoint(trained(CASE).actor).others == {}
    ours = open_checkpoint(trained("ours-bf16-full").actor).others
    assert "model.layers.0.self_attn.q_proj.bias" in ours
    assert ours["model.embed_tokens.weight"].shape == (320, 128)
    assert "model.layers.1.mlp.up_proj.weight" in open_checkpoint(trained("stock-bf16-full").actor).others


def test_our_engine_names_base_options_and_digests(trained):
    record = open_checkpoint(trained(CASE).actor).record
    assert record.base == str(trained(CASE).base)
    assert record.digests == trained(CASE).found["digests"]
    assert (record.scale, record.ignore) == ("minmax", ("lm_head",))
    assert (record.adapter["r"], record.adapter["lora_alpha"], len(record.adapter["target_modules"])) == (8, 16, 14)
    stock = open_checkpoint(trained("stock-bf16-full").actor)
    assert (stock.record, stock.lora_meta["r"], stock.lora_meta["lora_alpha"]) == (None, 8, 16)


def test_a_run_a_step_and_the_shards_are_accepted(trained, tmp_path):
    run = shutil.copytree(trained(CASE).run, tmp_path / "run")
    (run / "latest_checkpointed_iteration.txt").write_text("4")
    folders = [open_checkpoint(path).folder for path in (run, run / "global_step_4", run / "global_step_4" / "actor")]
    assert folders == [run / "global_step_4" / "actor"] * 3


@pytest.mark.parametrize(("content", "step"), [(b"\xff4", "\ufffd4"), (b"5", "5")], ids=["no text", "another step"])
def test_a_tracker_that_misleads_is_refused(trained, tmp_path, content, step):
    run = shutil.copytree(trained(CASE).run, tmp_path / "run")
    (run / "latest_checkpointed_iteration.txt").write_bytes(content)
    with pytest.raises(FileNotFoundError, match=rf"^no checkpoint is found: .*, last looked .*step_{step}/actor\."):
        open_checkpoint(run)


def test_no_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match="no checkpoint is found: checkpoint="):
            open_checkpoint(path)


def test_missing_ranks_are_named(copy):
    (copy / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(CheckpointFormatError, match=r"missing=\[1\] of world_size=2"):
        open_checkpoint(copy)


def test_the_shard_of_another_rank_is_refused(copy):
    name = "model_world_size_2_rank_1.pt"
    shutil.copy(copy / "model_world_size_2_rank_0.pt", copy / name)
    with pytest.raises(CheckpointFormatError, match=rf"cannot be put together: {name} holds something else in "):
        open_checkpoint(copy)


@pytest.mark.parametrize("kept", [0, 1000, 5000, -100])
def test_a_cut_shard_is_refused(copy, kept):
    file = copy / "model_world_size_2_rank_1.pt"
    os.truncate(file, kept if kept >= 0 else file.stat().st_size + kept)
    with pytest.raises(CheckpointFormatError, match=r"a shard cannot be read: .*rank_1\.pt"):
        open_checkpoint(copy)


def test_a_half_written_checkpoint_is_refused(copy):
    (copy / "fsdp_config.json").unlink()
    with pytest.raises(CheckpointFormatError, match="the checkpoint is half-written"):
        open_checkpoint(copy)


def test_a_checkpoint_whose_save_did_not_end_is_refused(copy):
    record = json.loads((copy / "verl_qerl_base.json").read_text())
    (copy / "verl_qerl_base.json").write_text(json.dumps(record | {"files": {}}))
    with pytest.raises(CheckpointFormatError, match=r"^the checkpoint is half-written: \S+base\.json lists no files\."):
        open_checkpoint(copy)


@pytest.mark.parametrize("content", ['{"world_size": 2', "[]", '{"FSDP_version": 2}', '{"world_size": 0}'])
def test_a_damaged_description_is_refused(copy, content):
    (copy / "fsdp_config.json").write_text(content)
    with pytest.raises(CheckpointFormatError, match=r"is not JSON|holds a list|names no number of ranks"):
        open_checkpoint(copy)


def test_a_damaged_description_of_the_adapter_is_refused(copy):
    (copy / "lora_train_meta.json").write_text("[]")
    with pytest.raises(CheckpointFormatError, match=r"lora_train_meta\.json holds a list\..* export another step"):
        open_checkpoint(copy)


def test_ranks_of_two_steps_are_refused(copy):
    rewrite(copy / "model_world_size_2_rank_1.pt", lambda shard: dict(list(shard.items())[1:]))
    with pytest.raises(CheckpointFormatError, match="rank 1 holds other names than rank 0"):
        open_checkpoint(copy)


def test_a_rank_named_otherwise_is_refused(copy):
    # Three ranks, of which the tensors know two: joined by the mesh of the tensors, not by the files.
    shutil.copy(copy / "model_world_size_2_rank_0.pt", copy / "model_world_size_1_rank_0.pt")
    (copy / "fsdp_config.json").write_text(json.dumps({"world_size": 1}))
    with pytest.raises(CheckpointFormatError, match=r"is sharded over ranks \[0, 1\]"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector.default.weight", "is no lora_A or lora_B"),
        ("base_model.model.model.norm.modules_to_save.default.weight", "is no lora_A or lora_B"),
        ("base_model.model.model.layers.7.mlp.up_proj.lora_A.default.weight", "has lora_A alone"),
    ],
)
def test_other_adapters_are_refused(copy, added, message):
    for rank in range(2):
        rewrite(copy / f"model_world_size_2_rank_{rank}.pt", lambda shard: shard | {added: torch.zeros(8, 8)})
    with pytest.raises(CheckpointFormatError, match=message):
        open_checkpoint(copy)


def test_a_checkpoint_without_adapter_is_refused(copy):
    for rank in range(2):
        rewrite(copy / f"model_world_size_2_rank_{rank}.pt", lambda shard: {"model.norm.weight": torch.zeros(8)})
    with pytest.raises(CheckpointFormatError, match="the checkpoint holds no adapter"):
        open_checkpoint(copy)
