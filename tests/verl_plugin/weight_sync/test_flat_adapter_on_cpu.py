"""The adapter as one tensor; under verl's engine it is in test_engine_on_cpu.py."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

pytest.importorskip("verl")
from verl_qerl.verl_plugin.weight_sync.flat_adapter import FlatAdapter, FlatReceiver, pieces
from verl_qerl.vllm_plugin.adapter.buffers import unflatten

CPU = torch.device("cpu")
# Over three ranks: uneven, fewer rows than ranks; the shift of a norm, which is sent last.
SHAPES = {"adapter_shift": (7,), "a": (10, 3), "b": (2, 4), "c": (1, 5), "d": (9, 2)}


def expected() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in SHAPES.items()}


def model_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor.clone()))
    return model


def assert_holds(flat: FlatAdapter, tensors: dict[str, torch.Tensor]) -> None:
    found = unflatten(flat.layout, flat.gather())
    assert list(found) == [f"peft.{name}" for name in ("a", "b", "c", "d", "adapter_shift")]
    for name, tensor in tensors.items():
        assert torch.equal(found[f"peft.{name}"], tensor.view(len(tensor), -1)), name


def run_rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    names = {f"peft.{name}": name for name in SHAPES}
    one_dimension = init_device_mesh("cpu", (3,))
    model = fully_shard(model_of(expected()), mesh=one_dimension)
    flat = FlatAdapter(model, names, CPU)
    for step in range(2):
        model.unshard()  # as a pass may leave it
        assert_holds(flat, {name: tensor + step for name, tensor in expected().items()})
        for parameter in model.parameters():
            parameter.data.add_(1)
    columns = {"a": distribute_tensor(expected()["a"], one_dimension, [Shard(1)])}
    with pytest.raises(ValueError, match=r"a of the adapter is sharded as \(Shard\(dim=1\),\)"):
        FlatAdapter(model_of(columns), {"a": "a"}, CPU)
    mixed = {
        "a": distribute_tensor(expected()["a"], one_dimension, [Shard(0)]),
        "b": distribute_tensor(expected()["b"], one_dimension, [Replicate()]),
    }
    with pytest.raises(ValueError, match="spread over 2 groups of ranks"):
        FlatAdapter(model_of(mixed), {"a": "a", "b": "b"}, CPU)
    # Replicas of shards: every group of the last dimension holds the whole.
    two_dimensions = init_device_mesh("cpu", (3, 1))
    spread = {
        name: distribute_tensor(tensor, two_dimensions, [Replicate(), Shard(0)]) for name, tensor in expected().items()
    }
    flat = FlatAdapter(model_of(spread), names, CPU)
    assert_holds(flat, expected())
    dist.destroy_process_group()


def test_three_ranks_put_their_rows_together(fresh_process, tmp_path):
    # No forks of this process: an engine of vLLM in it leaves them a default process group.
    fresh_process(__file__, str(tmp_path / "store"), ranks=3)


def test_one_process_needs_no_group_and_sees_the_present_values():
    model = model_of(expected())
    flat = FlatAdapter(model, {f"peft.{name}": name for name in SHAPES}, CPU)
    model.a = nn.Parameter(torch.zeros(10, 3))  # as loading a checkpoint may do
    assert_holds(flat, expected() | {"a": torch.zeros(10, 3)})
    with pytest.raises(ValueError, match=r"bias of the adapter is \(4,\)"):
        FlatAdapter(model_of({"bias": torch.zeros(4)}), {"bias": "bias"}, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_are_put_together_and_rounded(monkeypatch, dtype):
    monkeypatch.setattr("verl_qerl.verl_plugin.weight_sync.flat_adapter.PIECE_BYTES", 40)
    flat = torch.randn(37)
    sent = list(pieces(flat))
    assert [name for name, _ in sent] == [f"verl_qerl_adapter.{start}" for start in (0, 10, 20, 30)]
    receiver = FlatReceiver(37, dtype, CPU)
    receiver.add(sent, is_last=True)
    assert torch.equal(receiver.whole(), flat.to(dtype))


# One that begins in the one before, and one that only the sum of all gives away.
@pytest.mark.parametrize("spans", [((0, 6), (4, 4), (8, 2)), ((0, 6), (6, 4), (8, 2))], ids=["across", "within"])
def test_pieces_that_overlap_are_refused(spans):
    receiver = FlatReceiver(10, torch.float32, CPU)
    receiver.add([(f"verl_qerl_adapter.{start}", torch.ones(count)) for start, count in spans], is_last=True)
    with pytest.raises(ValueError, match="12 of 10 numbers"):
        receiver.whole()


if __name__ == "__main__":
    run_rank(int(os.environ["RANK"]), sys.argv[1])
