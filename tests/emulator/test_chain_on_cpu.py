"""Kernels of a layer in one graph, each started early into memory that others have just left: the same bits always."""

import functools

import pytest
import torch
from qerl_testing import load_beside

from verl_qerl.kernels.rollout import attention, elementwise, rotation
from verl_qerl.kernels.rollout import launch as launch_module
from verl_qerl.kernels.rollout.attention import decode_attention
from verl_qerl.kernels.rollout.launch import Kernel, read_source
from verl_qerl.kernels.rollout.w4a16_launch import EACH, STREAM_K, Launch
from verl_qerl.kernels.rollout.w4a16_matmul import w4a16_matmul

HIDDEN, HEAD, LAYERS = 384, 64, 2
Pool = load_beside(__file__, "graph_memory").Pool

# In the place of vLLM's attention, which does not start early: those after it start when it has ended.
ATTENTION = """
extern "C" __global__ void attention(const u16* q, const u16* k, u16* out, int columns, int k_columns, int count) {
  const int at = blockIdx.x * 128 + threadIdx.x;
  if (at < count) out[at] = to_bf16(from_bf16(q[at]) * 0.5f + from_bf16(k[at / columns * k_columns + at % k_columns]));
}
"""


def make_cache(rows, length, seed):
    """Of `length` tokens of each sequence and fewer, with the new one: cache, lengths, table, slots."""
    lengths = torch.arange(length, length - rows, -1).clamp(min=1).int()
    columns = -(-length // 16)
    cache = torch.randn((rows * columns, 2, 16, 1, HEAD), generator=torch.Generator().manual_seed(seed)).bfloat16()
    table = torch.arange(rows * columns).view(rows, columns).int()
    slots = torch.arange(rows) * columns * 16 + lengths.long() - 1
    return cache, lengths, table, slots


@pytest.fixture
def forward(gpu, linear, adapter, monkeypatch):
    """Calls the kernels of LAYERS layers for [rows, HIDDEN]; returns the last two tensors, and the caches if any."""
    sizes = {"qkv": (HIDDEN + 2 * HEAD, HIDDEN), "o": (HIDDEN, HIDDEN), "up": (512, HIDDEN), "down": (HIDDEN, 256)}
    weights = {name: linear(K, (N,), seed)[0] for seed, (name, (N, K)) in enumerate(sizes.items())}
    adapters = {name: adapter(K, (N,), 16, 256) for name, (N, K) in sizes.items()}
    table = torch.linspace(-1, 1, 100 * HEAD).bfloat16().view(100, HEAD)
    one_for_all = (torch.linspace(0.5, 1.5, HIDDEN).bfloat16(), 1e-6)
    of_each_token = (torch.linspace(0.5, 1.5, 4 * HIDDEN).view(4, HIDDEN), 1e-6, torch.arange(200).int() % 4)

    def attend_stock(pool, q, k):
        out = pool.empty(*q.shape)
        early, launch_module.programmatic_launch = launch_module.programmatic_launch, False
        kernel = Kernel(read_source("decode.cuh") + ATTENTION, "attention")
        kernel(-(-out.numel() // 128), 128, [q, k, out, q.shape[1], k.shape[1], out.numel()])
        launch_module.programmatic_launch = early
        return out

    def attend(pool, cache, q, k, v):
        out = pool.empty(*q.shape)
        q, k, v, heads = (x.unflatten(1, (-1, HEAD)) for x in (q, k, v, out))
        decode_attention(q, k, v, *cache, 0.1, heads)
        return out

    def multiply(pool, launch, adapted, x, name):
        with pool.scratch() as kept:
            kept.append(w4a16_matmul(x, *weights[name], adapter=adapters[name] if adapted else None, launch=launch))
        return kept[0]

    def layer(pool, launch, adapted, cache, norm, x, residual, positions):
        product = functools.partial(multiply, pool, launch, adapted)
        y, total = elementwise._launch_norm(x, residual, *norm)
        pool.give(x, residual)
        qkv = product(y, "qkv")
        pool.give(y)
        q, k, v = qkv.split([HIDDEN, HEAD, HEAD], 1)
        turned = rotation._launch(q, k, None, 0.0, positions, table, HEAD)
        if cache:
            attended = attend(pool, cache, *turned, v)
            pool.give(qkv, *turned)
        else:
            pool.give(qkv)
            attended = attend_stock(pool, *turned)
            pool.give(*turned)
        x = product(attended, "o")
        pool.give(attended)
        y, residual = elementwise._launch_norm(x, total, *norm)
        pool.give(x, total)
        wide = product(y, "up")
        pool.give(y)
        act = elementwise._launch_silu(wide)
        pool.give(wide)
        x = product(act, "down")
        pool.give(act)
        return x, residual

    def run(rows, launch, early=True, seed=0, adapted=True, cached=0, own=False):
        caches = [make_cache(rows, cached, seed) if cached else None for seed in range(LAYERS)]
        norm, pool = of_each_token if own else one_for_all, Pool()
        tensors = (
            torch.linspace(-2, 2, rows * HIDDEN).view(rows, HIDDEN).bfloat16(),
            torch.ones(rows, HIDDEN).bfloat16(),
        )
        tensors = tuple(pool.empty(rows, HIDDEN).copy_(tensor) for tensor in tensors)
        positions = torch.arange(rows) % 100
        with monkeypatch.context() as patch:
            patch.setattr(launch_module, "programmatic_launch", early)
            patch.setattr(torch, "empty", pool.empty)
            patch.setattr(torch, "empty_like", lambda like: pool.empty(like.shape))
            patch.setattr(rotation, "_rotate_fake", lambda q, k, *_: (pool.empty(q.shape), pool.empty(k.shape)))
            patch.setattr(elementwise, "_half_like", lambda x: pool.empty(len(x), x.shape[1] // 2))
            gpu.seed = seed
            with gpu.graph():
                for cache in caches:
                    tensors = layer(pool, launch, adapted, cache, norm, *tensors, positions)
        kept = [cache[0].flatten() for cache in caches if cache]
        return torch.cat([tensor.flatten() for tensor in (*tensors, *kept)])

    return run


# K has six steps and four: two or fewer for each block of a cluster.
@pytest.mark.parametrize(
    ("rows", "launch"),
    [
        (3, Launch(2, 1, 4, 2)),
        (40, Launch(2, 1, 3, 2)),
        (3, Launch(2, 1, 4, 2, EACH)),
        (40, Launch(2, 1, 3, 2, EACH)),
        (70, Launch(1, 1, 2, 2)),
        (140, Launch(1, 3, STREAM_K, 1)),
        (200, Launch(1, 2, STREAM_K, 1)),
    ],
)
def test_a_graph_gives_the_bits_of_kernels_one_after_the_other(forward, gpu, monkeypatch, rows, launch):
    expected = forward(rows, launch, early=False)
    assert not expected.isnan().any()
    for seed, multiprocessors in enumerate([4, 16, 40, 16]):
        if launch.split_k != STREAM_K:  # whose scratch has a place for each multiprocessor
            monkeypatch.setattr(gpu, "multiprocessors", multiprocessors)
        assert torch.equal(expected, forward(rows, launch, seed=seed))


@pytest.mark.parametrize(("rows", "cached"), [(3, 70), (12, 40)])
def test_so_does_attention_of_ours(forward, gpu, monkeypatch, rows, cached):
    monkeypatch.setattr(attention, "count_multiprocessors", lambda device: 3)  # whose number is that of the parts
    forward = functools.partial(forward, rows, Launch(2, 1, 4, 2), cached=cached)
    expected = forward(early=False)
    assert not expected.isnan().any()
    for seed, multiprocessors in enumerate([4, 16, 40, 16]):
        monkeypatch.setattr(gpu, "multiprocessors", multiprocessors)
        assert torch.equal(expected, forward(seed=seed))


def test_so_do_norms_with_a_weight_for_each_token(forward, gpu, monkeypatch):
    forward = functools.partial(forward, 12, Launch(2, 1, 4, 2), own=True)
    expected = forward(early=False)
    assert not expected.isnan().any()
    for seed, multiprocessors in enumerate([4, 16, 40]):
        monkeypatch.setattr(gpu, "multiprocessors", multiprocessors)
        assert torch.equal(expected, forward(seed=seed))


AWAIT = "await_inputs();\n"
PDL = {
    "x": ("      await_inputs();\n      for (int at_step", "      for (int at_step"),
    "norm": (f"  {AWAIT}  uint4 loaded", "  uint4 loaded"),
    "rotation": (f"  {AWAIT}  for (int head", "  for (int head"),
    "activation": (f"  {AWAIT}  const int at = blockIdx", "  const int at = blockIdx"),
}


@pytest.mark.parametrize("change", PDL)
def test_an_input_read_too_early_is_seen(forward, mutate, monkeypatch, gpu, change):
    """Without an adapter, whose counters two linears at the same time would leave in a state that has no end."""
    forward = functools.partial(forward, 3, Launch(2, 1, 4, 2), adapted=False)
    expected = forward(early=False)
    mutate(PDL[change])
    monkeypatch.setattr(gpu, "multiprocessors", 16)
    assert any(not torch.equal(expected, forward(seed=seed)) for seed in range(6))
    assert all(mutate.found.values())


def test_attention_that_awaits_nothing_is_seen(forward, mutate, monkeypatch, gpu):
    monkeypatch.setattr(attention, "count_multiprocessors", lambda device: 3)
    forward = functools.partial(forward, 3, Launch(2, 1, 4, 2), adapted=False, cached=70)
    expected = forward(early=False)
    mutate(("  await_inputs();\n  for (int s = blockIdx.x", "  for (int s = blockIdx.x"))
    monkeypatch.setattr(attention, "count_multiprocessors", lambda device: 3)
    monkeypatch.setattr(gpu, "multiprocessors", 16)
    assert any(not torch.equal(expected, forward(seed=seed)) for seed in range(6))
    assert all(mutate.found.values())
