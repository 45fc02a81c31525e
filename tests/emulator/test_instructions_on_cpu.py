"""The hardware that the emulator models, by kernels of a few lines: what it does, and what it refuses."""

import re

import pytest
import torch

from verl_qerl.kernels.rollout.launch import Kernel, read_source, tensor_map
from verl_qerl.kernels.rollout.w4a16_matmul import _wgmma

HEAD = read_source(
    *("decode.cuh", "grid.cuh", "copies.cuh", "ring.cuh"),
    TOKENS=8,
    WARP_TILES=1,
    WARPGROUPS=1,
    BOX=64,
    STREAM_K=0,
    GIVEN=0,
    EACH=0,
    MULTICAST=1,
)
KERNEL = """
__device__ __forceinline__ u32 load(u32 at) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at));
  return value;
}
__device__ __forceinline__ u32 load_there(u32 at, u32 rank) {
  u32 there, value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(there));
  return value;
}
__device__ __forceinline__ void store(u32 at, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void arrive_there(u32 at, u32 rank) {
  asm volatile("{.reg .u32 r;\\nmapa.shared::cluster.u32 r, %0, %1;\\n"
               "mbarrier.arrive.shared::cluster.b64 _, [r];}" ::"r"(at), "r"(rank) : "memory");
}
__device__ __forceinline__ void copy_to_all(u32 to, const TensorMap& map, u32 barrier, u16 blocks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               ".L2::cache_hint "
               "[%0], [%1, {%2, %3}], [%4], %5, %6;"
               ::"r"(to), "l"(&map), "r"(0), "r"(0), "r"(barrier), "h"(blocks), "l"((u64)0) : "memory");
}
extern "C" __global__ void run(const __grid_constant__ TensorMap map, u32* out) {
  extern __shared__ u8 dynamic[];
  const u32 at = (static_cast<u32>(__cvta_generic_to_shared(dynamic)) + 1023) & ~1023u;
  const int thread = threadIdx.x, rank = blockIdx.x;
  BODY
}
"""


def run(body: str, blocks: int = 1, threads: int = 32, cluster: int = 1) -> torch.Tensor:
    """What `body` writes to out[64]; map is of 8 rows of 64 bf16, swizzled."""
    source = torch.arange(512, dtype=torch.int16).view(8, 64)
    out = torch.zeros(64, dtype=torch.int32)
    kernel = Kernel(HEAD + _product() + KERNEL.replace("BODY", body), "run")
    kernel(blocks, threads, [tensor_map(source, 2, (8, 64), swizzle=True), out], 4096, cluster)
    return out


def _product() -> str:
    return read_source("wgmma.cuh").replace("@WGMMA@", _wgmma(8))


SHARED = """
  if (thread == 0) init_barrier(at + 1024, 1), init_barrier(at + 1032, 2);
  __syncthreads();
  cluster_sync();
"""


def test_a_copy_to_all_blocks_of_a_cluster_lies_at_the_same_place_in_each(gpu):
    body = f"""{SHARED}
  if (thread == 0) expect(at + 1024, 1024);
  if (thread == 0 && rank == 0) copy_to_all(at, map, at + 1024, 3);
  wait_for(at + 1024, 0);
  out[rank * 32 + thread] = load(at + 128 + thread * 4);
  cluster_sync();"""
    out = run(body, blocks=2, cluster=2)
    row = torch.arange(64, 128, dtype=torch.int16).view(8, 8)[torch.arange(8) ^ 1].flatten()  # 16 bytes change places
    assert torch.equal(out.view(torch.int16), row.repeat(2))


def test_a_block_arrives_at_the_barrier_of_another(gpu):
    body = f"""{SHARED}
  if (thread == 0) arrive_there(at + 1032, 0);
  if (thread == 0 && rank == 0) wait_for(at + 1032, 0), out[0] = 7;
  cluster_sync();"""
    assert run(body, blocks=2, cluster=2)[0] == 7


PRODUCT = """
  if (thread == 0) init_barrier(at + 1024, 1);
  __syncthreads();
  if (thread == 0) expect(at + 1024, 1024), copy_block(at, map, 0, 0, at + 1024, 0);
  wait_for(at + 1024, 0);
  float sum[4] = {};
  u32 a[4] = {0x3F803F80, 0x3F803F80, 0x3F803F80, 0x3F803F80};
  order_registers();
  wgmma(sum, a, descriptor(at));
  commit();
  AFTER
  wait_products<0>();
  if (thread < 32) out[thread] = __float_as_uint(sum[0]);
"""


def test_a_product_reads_its_operands_until_it_is_waited_for(gpu):
    seen = {tuple(run(PRODUCT.replace("AFTER", after), threads=128).tolist()) for after in ("", "") for _ in range(8)}
    assert len(seen) == 1
    seen = {tuple(run(PRODUCT.replace("AFTER", "a[0] = 0x40004000;"), threads=128).tolist()) for _ in range(16)}
    assert len(seen) > 1


REFUSED = {
    "which nobody has written": ("out[thread] = load(at + thread * 4);", {}),
    "may not have begun": (
        "store(at + thread * 4, 1); load_there(at + thread * 4, 1 - rank);",
        {"blocks": 2, "cluster": 2},
    ),
    "which has left": (
        "store(at + thread * 4, 1); cluster_sync(); load_there(at + thread * 4, 1 - rank);",
        {"blocks": 2, "cluster": 2},
    ),
    "beyond the block's shared memory": ("store(at + 4096, 1);", {}),
    "not aligned": ("store(at + 2, 1);", {}),
    "no mbarrier at": ("wait_for(at, 0);", {}),
    "more arrivals than it counts": ("init_barrier(at, 1); expect(at, 16); arrive(at);", {}),
    "arrive: the mbarrier at .* was over": ("if (thread == 0) init_barrier(at, 1), store(at, 3), arrive(at);", {}),
    "leaves: the mbarrier at .* was over": ("if (thread == 0) init_barrier(at, 1), arrive(at), store(at, 3);", {}),
    "deadlock, nothing can run:\n  run .* warp 0: bar.sync": ("if (thread < 32) join_workers();", {}),
    "deadlock, nothing can run:\n  run .* an mbarrier": ("if (thread == 0) init_barrier(at, 1), wait_for(at, 0);", {}),
    "other lanes of the warp are at": ("if (thread < 4) __shfl_sync(~0u, 1, 0); else __syncwarp();", {}),
    "a copy ends after": (
        "if (thread == 0) init_barrier(at + 1024, 1), copy_block(at, map, 0, 0, at + 1024, 0);",
        {},
    ),
    "is not fenced": (
        PRODUCT.replace("float sum", "store(at + thread * 4, 0); float sum").replace("AFTER", ""),
        {"threads": 128},
    ),
    "accumulators were written": (PRODUCT.replace("AFTER", "sum[0] = 1;"), {"threads": 128}),
    "wgmma without wgmma.fence": (PRODUCT.replace("order_registers();", "").replace("AFTER", ""), {"threads": 128}),
    "warps of a warpgroup disagree": (
        PRODUCT.replace("descriptor(at)", "descriptor(at + thread / 32 * 1024)").replace("AFTER", ""),
        {"threads": 128},
    ),
}


@pytest.mark.parametrize("message", REFUSED, ids=lambda message: re.sub(r"\W+", "-", message))
def test_what_is_not_defined_is_an_error(gpu, message):
    body, shape = REFUSED[message]
    with pytest.raises(RuntimeError, match=message):  # in some order of the threads
        all(run(body, **shape) is not None for _ in range(20))


def test_an_unknown_instruction_is_an_error(gpu):
    with pytest.raises(ValueError, match=r"no emulation of the instruction 'fence\.proxy\.tensormap'"):
        run('asm volatile("fence.proxy.tensormap;");')
