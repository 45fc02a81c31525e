import errno
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from verl_qerl.errors import CheckpointFormatError
from verl_qerl.modules.placement.shards import cut_like, join_optimizer, join_shards, join_tensor

WHOLE = torch.arange(15.0).reshape(5, 3)


def first_of(ranks: list) -> DeviceMesh:
    """A mesh as its first rank sees it; without process groups: nothing is sent in these tests."""
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)


@pytest.fixture
def mesh():
    return first_of([0, 1])


def parts(mesh, dim):
    """`WHOLE` as two ranks hold it: 3 and 2 rows, or 2 and 1 columns."""
    pieces = WHOLE.chunk(2, dim)
    shape = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
    return [DTensor.from_local(piece, mesh, [Shard(dim)], run_check=False, **shape) for piece in pieces]


def save(folder, contents):
    files = [folder / f"{rank}.pt" for rank in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        torch.save(content, file)
    return files


@pytest.mark.parametrize("dim", [0, 1])
def test_uneven_shards_are_joined(mesh, dim):
    assert torch.equal(join_tensor(Path("run"), "a", parts(mesh, dim)), WHOLE)


def test_shards_that_do_not_fit_are_refused(mesh):
    first, second = parts(mesh, 0)
    for given, message in (
        ([first], r"'a' is sharded over ranks \[0, 1\] in run"),
        ([first, WHOLE], "rank 1 holds 'a' with another shape"),
        ([first, first], r"the parts of 'a' make \(6, 3\), not \(5, 3\)"),
    ):
        with pytest.raises(CheckpointFormatError, match=message):
            join_tensor(Path("run"), "a", given)
    assert torch.equal(join_tensor(Path("run"), "a", [first, second]), WHOLE)


def test_plain_tensors_are_the_first_ranks(tmp_path):
    files = save(tmp_path, [{"b": torch.ones(2)}, {"b": torch.zeros(2)}])
    assert torch.equal(join_shards(files)["b"], torch.ones(2))
    with pytest.raises(CheckpointFormatError, match="rank 1 holds other names than rank 0"):
        join_shards(save(tmp_path, [{"b": torch.ones(2)}, {}]))


def test_a_file_without_names_is_refused(tmp_path):
    with pytest.raises(CheckpointFormatError, match=r"0\.pt holds a list in place of names and their tensors in "):
        join_shards(save(tmp_path, [[1, 2]]))


@pytest.mark.parametrize("content", [{3: WHOLE}, {"a": 3}])
def test_what_is_no_tensor_by_name_is_refused(tmp_path, content):
    with pytest.raises(CheckpointFormatError, match=r"rank 0 holds (3|'a'), which is no name of a tensor in "):
        join_shards(save(tmp_path, [content] * 2))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_whole_tensor_is_cut_as_its_target_is(mesh, dim):
    target = parts(mesh, dim)[0]
    found = cut_like(WHOLE + 1, target)
    assert isinstance(found, DTensor)
    assert (found.placements, found.shape) == (target.placements, target.shape)
    assert torch.equal(found.to_local(), target.to_local() + 1)
    assert cut_like(WHOLE, torch.zeros(5, 3)) is WHOLE


def test_counters_and_groups_of_an_optimizer_are_kept(tmp_path):
    state = {"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    assert join_optimizer(save(tmp_path, [state, state])) == state


@pytest.mark.parametrize("state", [{}, {0: {"step": torch.tensor(1.0)}}])
def test_optimizers_that_differ_are_refused(tmp_path, state):
    whole = {0: {"step": torch.tensor(1.0), "exp_avg": WHOLE}}
    files = save(tmp_path, [{"state": whole}, {"state": state}])
    with pytest.raises(CheckpointFormatError, match="the ranks hold other optimizer states of parameter 0"):
        join_optimizer(files)


def test_a_cut_file_is_refused(tmp_path):
    files = save(tmp_path, [{"state": {}}])
    os.truncate(files[0], 100)
    with pytest.raises(CheckpointFormatError, match=r"a shard cannot be read: .*0\.pt"):
        join_optimizer(files)


def test_a_file_that_this_account_may_not_read_is_not_called_cut(tmp_path, monkeypatch):
    def refuse(path, **options):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    files = save(tmp_path, [{"state": {}}])
    monkeypatch.setattr(torch, "load", refuse)  # root may read all
    with pytest.raises(PermissionError):
        join_optimizer(files)


def test_replicas_of_shards_are_read_once():
    mesh = first_of([[0, 1], [2, 3]])
    shape = {"run_check": False, "shape": WHOLE.shape, "stride": WHOLE.stride()}
    pieces = [DTensor.from_local(one, mesh, [Replicate(), Shard(0)], **shape) for one in WHOLE.chunk(2)]
    assert torch.equal(join_tensor(Path("run"), "a", pieces * 2), WHOLE)
    copies = [DTensor.from_local(WHOLE, mesh, [Replicate(), Replicate()], **shape)] * 4
    assert torch.equal(join_tensor(Path("run"), "a", copies), WHOLE)
