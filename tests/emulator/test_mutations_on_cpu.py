"""Synchronization that is taken out of the matmul is missed: it is not there for nothing, and the emulator sees it."""

import pytest
import torch

from verl_qerl.kernels.rollout import w4a16_matmul as module
from verl_qerl.kernels.rollout.w4a16_launch import EACH, STREAM_K, Launch
from verl_qerl.kernels.rollout.w4a16_matmul import w4a16_matmul

LAST = "if (split > 1) cluster_sync();  // no block leaves while another still reads its memory\n"
BOTH = "      cluster_sync();\n      cluster_sync();\n"
COMMITTED = "      wait_products<1>();\n"
EMPTY = """      // All products of the stage before have ended.
      if (step == 0 && stage > 0 && lane == 0) release(at.empty + before * 8);
"""
CHANGES = {
    "blocks leave at once": (Launch(1, 1, 3, 2), 70, 0, [(LAST, ""), (BOTH, "      cluster_sync();\n")]),
    "products are awaited a step late": (Launch(2, 1, 2, 2), 8, 0, [("wait_products<1>", "wait_products<2>")]),
    "the ring is given back too early": (Launch(2, 1, 1, 2), 40, 0, [(COMMITTED + EMPTY, EMPTY + COMMITTED)]),
    "the ring is filled without a look": (Launch(2, 1, 1, 2), 40, 0, [("filled++ >= ring.stages", "filled++ < 0")]),
    "sums take the place of a ring in use": (
        Launch(1, 2, 2, 1),
        40,
        0,
        [("      join_workers();  // the ring is read no more: sums take its place\n", "")],
    ),
    "fewer bytes are expected": (Launch(2, 1, 2, 2), 8, 0, [("expect(full, X_BYTES)", "expect(full, X_BYTES - 16)")]),
    "low is not fenced": (
        Launch(2, 1, 2, 2),
        8,
        8,
        [('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "")],
    ),
    "low is added up before its tasks have ended": (
        Launch(2, 1, 2, 2),
        60,
        64,
        [("if (thread == 0) await_count(low_done, low_tasks);", "")],
    ),
    "low is multiplied before it is there": (
        Launch(2, 1, 2, 2),
        60,
        64,
        [("wait_for(at.low_ready, 0);", "")],
    ),
    "low is added up too early in a stream": (
        Launch(2, 1, STREAM_K, 2),
        40,
        8,
        [("if (thread == 0) await_count(low_done, low_tasks);", "")],
    ),
    "low of the own part of K is multiplied before it is there": (
        Launch(2, 2, 2, 1, EACH),
        40,
        32,
        [("      join_workers();  // low is there\n", "")],
    ),
    "low of the own part of K is not fenced": (
        Launch(2, 1, 2, 2, EACH),
        20,
        32,
        [('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "")],
    ),
    "the bytes of a are not expected": (
        Launch(2, 1, 2, 2, EACH),
        8,
        32,
        [(" + (EACH ? rows * 128 : 0)", "")],
    ),
    "products with a are awaited a step late": (
        Launch(2, 1, 1, 2, EACH),
        64,
        64,
        [(COMMITTED + EMPTY, EMPTY + COMMITTED)],
    ),
    "tokens without the adapter get it": (
        Launch(2, 1, 2, 2, EACH),
        20,
        32,
        [("own.has_adapter >> i & 1", "true")],
    ),
    "the second member gets what belongs to the first": (
        Launch(2, 3, 2, 1, EACH),
        20,
        16,
        [("at.low + (member - first_member) * low_bytes", "at.low")],
    ),
    "a flag stays": (Launch(2, 1, STREAM_K, 2), 8, 0, [("flags[place] = 0;", "")]),
    "a block does not wait for the other's ring": (
        Launch(1, 2, STREAM_K, 1),
        140,
        0,
        [("arrive_at(empty, rank);", "arrive_at(empty, blockIdx.x % 2);")],
    ),
    "a block copies before the other has begun": (
        Launch(1, 2, STREAM_K, 1),
        140,
        0,
        [("if (MULTICAST > 1) cluster_sync(); else __syncthreads();", "__syncthreads();")],
    ),
    "a block leaves its multicast cluster at once": (
        Launch(1, 2, STREAM_K, 1),
        140,
        0,
        [
            ("    if (MULTICAST > 1) cluster_sync();  // the other block", "    // the other block"),
            ("    if (MULTICAST > 1) cluster_sync();\n", ""),
        ],
    ),
    "sums are handed over before all are there": (
        Launch(1, 2, STREAM_K, 1),
        70,
        0,
        [("  join_workers();\n  if (threadIdx.x == 0) asm", "  if (threadIdx.x == 0) asm")],
    ),
}


def is_right(linear, adapter, on_gpu, launch, rows, rank) -> bool:
    K, slices = 1024, (256, 128)
    tensors, dense = linear(K, slices)
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).bfloat16()
    its = adapter(K, slices, rank, rows) if rank else None
    expected = x.double() @ dense.T
    try:
        out = w4a16_matmul(x, *tensors, None, its, launch)
        if its:
            on_gpu.assert_adapted(out, x, expected, its, slices, on_gpu.own_parts(launch))
    except (RuntimeError, AssertionError):
        return False
    of_base = slice(1, None, 2) if its else slice(None)
    close = (out.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-4
    return bool(close[of_base].all()) and not module._exchange(torch.device("cpu"))[-1].any()


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_taken_out_is_missed(gpu, mutate, linear, adapter, on_gpu, change):
    launch, rows, rank, changes = CHANGES[change]
    mutate(*changes)
    gpu.seed = 1
    assert not all(is_right(linear, adapter, on_gpu, launch, rows, rank) for _ in range(12))
    assert all(mutate.found.values())


def test_what_is_whole_is_right(gpu, linear, adapter, on_gpu):
    cases = {(launch, rows, rank) for launch, rows, rank, _ in CHANGES.values()}
    assert all(is_right(linear, adapter, on_gpu, *case) for case in sorted(cases))
