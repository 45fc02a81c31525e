"""Checkpoints of the engine: what is loaded is what was saved, and nothing else is loaded."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch
from qerl_testing import random_qwen2

from verl_qerl.checkpoints.record import BaseRecord
from verl_qerl.errors import CheckpointFormatError
from verl_qerl.verl_plugin.actor import resume
from verl_qerl.verl_plugin.actor.trained_weights import TrainedWeights

SCRIPT = Path(__file__).with_name("resume_cases.py")
PARTS = ("adapters", "optimizer", "scheduler", "rng")


@pytest.fixture(scope="module")
def found(fresh_process, tmp_path_factory):
    """Case, ranks that ran it and rank -> what resume_cases.py found."""
    models, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("out")
    random_qwen2().save_pretrained(models / "bf16")
    run = [str(SCRIPT), str(models), str(out)]
    fresh_process(*run, "save", "killed", "in parts")
    fresh_process(*run, "save", "restored from 1", "restored from 2", "a copy on each rank", "refused", ranks=2)
    fresh_process(*run, "restored from 2")
    return lambda case, ranks, rank=0: torch.load(out / f"{case}-{ranks}-{rank}.pt", weights_only=False)


def assert_same(one, other, parts=PARTS):
    for part in parts:
        torch.testing.assert_close(one[part], other[part], rtol=0, atol=0)


@pytest.mark.parametrize("contents", ["lora", "full"])
def test_what_was_saved_is_held_after_loading(found, contents):
    for rank in range(2):
        saved, read = found("save", 2, rank)[contents], found("restored from 2", 2, rank)[contents]
        assert read["error"] is None
        assert_same(read["state"], saved)
        assert len(saved["optimizer"]) == 28
        assert saved["scheduler"]["last_epoch"] > 0


def test_what_is_left_out_is_told(found):
    read, saved = found("in parts", 1), found("save", 1)["partial"]
    assert_same(read["state"], saved, ("adapters", "scheduler"))
    one, of_all, all_of_them = read["told"]
    assert one.startswith("not resumed, as checkpoint.load_contents=['model', 'extra'] leaves it out: optimizer of ")
    assert "=hf_model leaves it out: optimizer, extra of " in of_all  # verl finds "model" in the text
    assert "=[] leaves it out: model, optimizer, extra of " in all_of_them


def test_generators_of_ranks_are_their_own(found):
    one, other = (found("restored from 2", 2, rank)["lora"]["state"]["rng"] for rank in range(2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize(("saved_on", "read_on"), [(2, 1), (1, 2)])
def test_adapters_resume_on_another_number_of_ranks(found, saved_on, read_on):
    saved = found("save", saved_on)["lora"]
    for rank in range(read_on):
        read = found(f"restored from {saved_on}", read_on, rank)["lora"]
        assert read["error"] is None
        # The generator of rank 0, whichever ranks there are.
        assert_same(read["state"], saved)
        assert read["norm"] > 0


@pytest.mark.parametrize(("saved_on", "read_on"), [(2, 1), (1, 2)])
def test_a_whole_model_does_not(found, saved_on, read_on):
    for rank in range(read_on):
        error = found(f"restored from {saved_on}", read_on, rank)["full"]["error"]
        assert error.startswith(f"the checkpoint is spread over other ranks: world_size={saved_on}, now {read_on}, in ")
        assert error.endswith(f"Resume on {saved_on} ranks.")


def test_adapters_resume_where_each_rank_has_a_copy_of_them(found):
    for rank in range(2):
        saved, read = found("save", 2, rank)["lora"], found("a copy on each rank", 2, rank)["lora"]
        assert read["error"] is None
        assert_same(read["state"], saved)
        assert read["norm"] > 0


def test_a_whole_model_does_not_resume_there(found):
    for rank in range(2):
        error = found("a copy on each rank", 2, rank)["full"]["error"]
        assert error.startswith("the checkpoint is spread over other ranks: fsdp_size=2, now 1, in ")
        assert error.endswith("Set actor.fsdp_config.fsdp_size=2.")


def test_more_ranks_share_the_generators(tmp_path, monkeypatch):
    record, held = (BaseRecord("m", "max", (), {}, {}, world_size=ranks, lora_only=True) for ranks in (2, 3))
    for rank in range(2):
        (tmp_path / resume.file_name("extra", 2, rank)).write_text(f"of rank {rank}")
    for rank, expected in enumerate(("of rank 0", "of rank 1", "of rank 0")):
        monkeypatch.setattr(resume.dist, "get_rank", lambda rank=rank: rank)
        with resume.for_these_ranks(tmp_path, record, held, ["extra"], torch.nn.Linear(1, 1), None) as folder:
            assert (folder / resume.file_name("extra", 3, rank)).read_text() == expected


@pytest.mark.parametrize("contents", ["model", ["model"]])  # verl takes the name of one part too
def test_files_of_all_that_was_saved_are_found(contents, tmp_path, monkeypatch):
    def gather(into, own):
        into[:] = [own]

    monkeypatch.setattr(resume.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(resume.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(resume.dist, "all_gather_object", gather)
    for name in ("model_world_size_1_rank_0.pt", "fsdp_config.json"):
        (tmp_path / name).write_text(name)
    found = resume.saved_files(tmp_path, contents)
    assert found == {"model_world_size_1_rank_0.pt": [28], "fsdp_config.json": [16]}


@pytest.mark.parametrize("form", ["nvfp4", "int8"])
@pytest.mark.parametrize("files", [{}, {"model_world_size_2_rank_0.pt": 3, "model_world_size_2_rank_1.pt": 4}])
def test_a_packed_base_is_not_taken_for_one_in_bf16(tmp_path, monkeypatch, form, files):
    monkeypatch.setattr(resume.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(resume.dist, "broadcast_object_list", lambda told, src: None)
    weights = TrainedWeights(None, None, None)
    with weights.loadable(tmp_path) as folder:  # without a record
        assert folder == tmp_path
    BaseRecord("m", "max", (), {}, {"r": 8}, files=files, format=form).write(tmp_path)
    (tmp_path / "model_world_size_2_rank_0.pt").write_text("abc")  # that of rank 1 is on another node
    with pytest.raises(CheckpointFormatError, match="on a base in") as caught:
        weights.loadable(tmp_path)
    assert str(caught.value) == (
        f"the checkpoint is of an adapter on a base in {form}, now in bf16, in {tmp_path}. One of a run without"
        f" +rollout is accepted. Add +rollout={form}, or start under another trainer.experiment_name."
    )


def test_a_record_that_verls_own_engine_left_beside_its_files_is_not_theirs(tmp_path, monkeypatch):
    monkeypatch.setattr(resume.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(resume.dist, "broadcast_object_list", lambda told, src: None)
    BaseRecord("m", "max", (), {}, {"r": 8}, files={"model_world_size_1_rank_0.pt": 3}).write(tmp_path)
    (tmp_path / "model_world_size_1_rank_0.pt").write_text("with a base in bf16")
    with TrainedWeights(None, None, None).loadable(tmp_path) as folder:
        assert folder == tmp_path


REFUSED = {
    "no folder": "the checkpoint is half-written, or not of this engine: ",
    "no record": "the checkpoint is half-written, or not of this engine: ",
    "no files in the record": "the checkpoint is half-written, or not of this engine: ",
    "a cut record": "the record of the base cannot be read: ",
    "another rank's model": "the checkpoint is not as it was saved: model_world_size_2_rank_1.pt holds something else",
    "another rank's optimizer": "the checkpoint is not as it was saved: optim_world_size_2_rank_1.pt holds something",
    "a cut model": "the checkpoint is not as it was saved: model_world_size_2_rank_1.pt has ",
    "a cut optimizer": "the checkpoint is not as it was saved: optim_world_size_2_rank_1.pt has ",
    "no extra state": "the checkpoint is not as it was saved: extra_state_world_size_2_rank_0.pt is missing in ",
    "partial": "the checkpoint was saved without a part that is to be loaded: optim_world_size_2_rank_",
    "scale": "the checkpoint is of another base: ",
    "ignore": "the checkpoint is of another base: 6 of 14 weights differ, first 'model.layers.0.mlp.down_proj' (",
    "rank": "the checkpoint is of another adapter: r=8, now 4, in ",
    "alpha": "the checkpoint is of another adapter: lora_alpha=16, now 32, in ",
    "targets": "the checkpoint is of another adapter: target_modules=",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank_before_anything_is_loaded(found, name):
    errors = set()
    for rank in range(2):
        error, unchanged = found("refused", 2, rank)[name]
        assert error is not None
        assert error.startswith(REFUSED[name])
        if name == "no record":  # as one of all weights
            assert " by runs with +rollout and an adapter alone. Resume from an earlier step, with the options" in error
        assert unchanged
        errors.add(error)
    assert len(errors) == 1, "ranks that disagree wait for each other"


def test_killed_at_any_moment_a_checkpoint_is_old_new_or_refused(found):
    killed = found("killed", 1)
    outcomes = killed["outcomes"]
    assert killed["num"] > 12  # three files of torch, the record, the files of rank 0
    assert outcomes[0] == "old", "killed before the first change"
    assert outcomes[-1] == "new", "not killed"
    begun = [name for name in outcomes[:-1] if name != "old"]
    assert outcomes[: -len(begun) - 1] == ["old"] * outcomes.count("old")
    assert set(begun) == {"the checkpoint is half-written, or not of this engine"}
    assert len(begun) > 10
    whole = ["whole"] * outcomes.count("old")
    assert killed["exported"] == [*whole, *["the checkpoint is half-written"] * len(begun), "whole"]
