"""Kernels that start before the ones before them have ended, against the same kernels one after the other."""

import os
import subprocess
import sys

import pytest
import torch
from qerl_testing import random_packed_weight

from verl_qerl.kernels.rollout import launch
from verl_qerl.kernels.rollout.elementwise import add_rms_norm, silu_mul
from verl_qerl.kernels.rollout.lora import member_of_tile
from verl_qerl.kernels.rollout.repacking import repack
from verl_qerl.kernels.rollout.rotation import rotate
from verl_qerl.kernels.rollout.w4a16_launch import EACH, SHAPES, STREAM_K, Launch, multicast_blocks, padded_rows
from verl_qerl.kernels.rollout.w4a16_matmul import Adapter, _exchange, can_fuse, w4a16_matmul

pytestmark = pytest.mark.gpu

K, LAYERS, RANK, REPLAYS = 1536, 20, 32, 50
LINEARS = [((4096, 4096), K), ((K,), 4096)]


def launches() -> list[tuple[int, Launch]]:
    found = []
    for rows in (1, 16, 64, 128, 192, 256):
        streams = SHAPES[padded_rows(rows)]
        clusters = SHAPES[padded_rows(rows) // multicast_blocks(padded_rows(rows))]
        found += [(rows, Launch(p, g, STREAM_K, b)) for p, g, b in streams]
        found += [(rows, Launch(p, g, split, b)) for p, g, b in clusters for split in (1, 4)]
    return [*found, (16, Launch(2, 1, 4, 2, EACH)), (64, Launch(2, 1, 4, 2, EACH)), (64, Launch(2, 2, 4, 1, EACH))]


def tiles(N: int, columns: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Tensors of a weight as `w4a16_matmul` takes them."""
    return repack(random_packed_weight(N, columns, seed, "cuda"))


@pytest.fixture(scope="module")
def layers():
    """Of each layer its norm and, of each of its linears, the tensors and an adapter that every second row has."""
    torch.manual_seed(0)
    slots = torch.zeros(258, dtype=torch.int64, device="cuda")
    slots[1::2] = -1

    def linear(seed, slices, columns):
        a = (torch.randn(len(slices) * RANK, columns, device="cuda") * columns**-0.5).bfloat16()
        b = torch.randn(sum(slices), RANK, device="cuda").bfloat16()
        return tiles(sum(slices), columns, seed), Adapter(a, b, member_of_tile(slices, "cuda"), slots)

    norms = torch.rand(LAYERS, K, device="cuda").bfloat16()
    return [(norm, *(linear(seed, *one) for one in LINEARS)) for seed, norm in enumerate(norms)]


def captured(run, early, monkeypatch):
    """(graph of `run`, what it writes)"""
    monkeypatch.setattr(launch, "programmatic_launch", early)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def capture(layers, x, residual, how, adapted, early, monkeypatch):
    def run():
        y, total = x, residual
        for norm, gate_up, down in layers:
            y, total = add_rms_norm(y, total, norm, 1e-6)
            for (tensors, adapter), then in ((gate_up, silu_mul), (down, torch.Tensor.contiguous)):
                fits = adapted and can_fuse(*adapter[:3], how)
                y = then(w4a16_matmul(y, *tensors, None, adapter if fits else None, how))
        return y, total

    return captured(run, early, monkeypatch)


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapter"])
@pytest.mark.parametrize(("rows", "how"), launches(), ids=str)
def test_an_early_start_changes_no_bit(layers, rows, how, adapted, monkeypatch):
    x, residual = (torch.zeros(rows, K, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    one_by_one, expected = capture(layers, x, residual, how, adapted, False, monkeypatch)
    early, found = capture(layers, x, residual, how, adapted, True, monkeypatch)
    generator = torch.Generator("cuda").manual_seed(rows)
    wrong, sums = [], []
    for _ in range(REPLAYS):  # each time other inputs, so that what is read too early is wrong
        for tensor in (x, residual):
            tensor.normal_(generator=generator)
        one_by_one.replay()
        early.replay()
        wrong.append(torch.stack([(a != b).any() for a, b in zip(found, expected, strict=True)]))
        sums.append(expected[0].float().sum())
    assert not torch.stack(wrong).any(), torch.stack(wrong).int().sum(0)
    assert torch.stack(sums).isfinite().all()
    assert len(set(torch.stack(sums).tolist())) == REPLAYS
    flags, done = _exchange(torch.device("cuda", torch.cuda.current_device()))[1::2]
    assert not flags.any()
    assert not done.any()


HIDDEN, HEADS, MIDDLE, DEPTH = 768, 12, 2304, 12  # so small that several kernels of a chain have room at once


def make_small_model():
    """Tensors of DEPTH layers: norms, and linears as `w4a16_matmul` takes them."""
    torch.manual_seed(1)
    shapes = [(3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * MIDDLE, HIDDEN), (HIDDEN, MIDDLE)]
    norms = torch.rand(DEPTH, 2, HIDDEN, device="cuda").bfloat16()
    return [(*pair, *(tiles(*shape, 4 * i + j) for j, shape in enumerate(shapes))) for i, pair in enumerate(norms)]


@pytest.fixture(scope="module")
def small_model():
    return make_small_model()


def decode_step(model, x, residual, positions, table):
    """All that a decode step launches of ours, with a kernel of torch in the place of attention."""
    for before, after, qkv, o, gate_up, down in model:
        x, residual = add_rms_norm(x, residual, before, 1e-6)
        q, k, v = w4a16_matmul(x, *qkv).chunk(3, 1)
        q, k = rotate(q, k, positions, table, HIDDEN // HEADS)
        x, residual = add_rms_norm(w4a16_matmul(q + k + v, *o), residual, after, 1e-6)
        x = w4a16_matmul(silu_mul(w4a16_matmul(x, *gate_up)), *down)
    return x, residual


def chained(model, rows, early, monkeypatch):
    """(graph, all it reads, its outputs)"""
    x, residual = (torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    table = torch.randn(512, HIDDEN // HEADS, generator=torch.Generator().manual_seed(2)).bfloat16().cuda()
    graph, out = captured(lambda: decode_step(model, x, residual, positions, table), early, monkeypatch)
    return graph, (x, residual, positions, table), out


def replay(rows, graphs, times):
    """Replays of two graphs on the same inputs, new ones each time: how many differ, and how many are no numbers."""
    generator = torch.Generator("cuda").manual_seed(rows)
    wrong, odd = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
    (one_by_one, given, expected), (early, copies, found) = graphs
    for _ in range(times):
        given[0].normal_(generator=generator)
        given[1].normal_(generator=generator)
        given[2].random_(512, generator=generator)
        for copy, tensor in zip(copies, given, strict=True):
            copy.copy_(tensor)
        one_by_one.replay()
        early.replay()
        wrong += torch.stack([(a != b).any() for a, b in zip(found, expected, strict=True)])
        odd += torch.stack([~out.isfinite().all() for out in (*found[:1], *expected[:1])])
    return wrong.tolist(), odd.tolist()


@pytest.mark.parametrize("company", [0, 3])
def test_a_chain_of_small_kernels_beside_other_processes(small_model, company, monkeypatch):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    neighbours = [subprocess.Popen([sys.executable, __file__], env=env) for _ in range(company)]
    try:
        found = {}
        for rows in (1, 8, 32, 64, 128, 180, 256):
            graphs = [chained(small_model, rows, early, monkeypatch) for early in (False, True)]
            found[rows] = replay(rows, graphs, 400 if company else 2000)
        assert found == {rows: ([0, 0], [0, 0]) for rows in found}
        assert all(one.poll() is None for one in neighbours)  # they were there to the end
    finally:
        for one in neighbours:
            one.kill()


def test_an_early_start_may_follow_anything_in_a_graph():
    x = torch.ones(1, K, device="cuda").bfloat16()
    weight = torch.ones(K, device="cuda").bfloat16()
    add_rms_norm(x, x, weight, 1e-6)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        first, doubled = add_rms_norm(x, x, weight, 1e-6)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tripled = doubled + x
        halved = doubled / 4
        torch.cuda.current_stream().wait_stream(side)
        _, joined = add_rms_norm(tripled, halved, weight, 1e-6)  # after two kernels of two streams
        x.zero_()
        last, _ = add_rms_norm(x, x, weight, 1e-6)  # after what is no kernel
    for value in (3, 5):
        x.fill_(value)
        graph.replay()
        assert torch.allclose(first, torch.ones_like(first), rtol=2**-7)
        assert (joined == 3.5 * value).all()
        assert not last.any()


if __name__ == "__main__":  # a neighbour, until it is killed
    model = make_small_model()
    with pytest.MonkeyPatch.context() as patch:
        graph, *_ = chained(model, 64, True, patch)
        while True:
            for _ in range(100):
                graph.replay()
            torch.cuda.synchronize()
