// The tensor core's instructions for a warpgroup: left operand from registers, right operand from shared memory.

__device__ __forceinline__ u64 descriptor(u32 address) {
  // K-major, rows of 128 bytes with the 128-byte swizzle, 1024 bytes from one group of 8 rows to the next.
  return (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16 | (address >> 4 & 0x3FFF);
}

__device__ __forceinline__ void order_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// d += a x, and for EACH the same with a in shared memory; written by kernels/rollout/w4a16_matmul.py, since the number of operands
// depends on TOKENS.
@WGMMA@
