// The LoRA intermediate x a^T, computed by each thread block for its own part of K (EACH): rows of a come through the
// ring beside the codes, and the first warpgroup multiplies them by x, both in shared memory. What its part of K gives is
// rounded, multiplied by b in the same block and added to the block's other sums: nobody waits for another block.
//
// It takes one wgmma for each 16 of K more, however few columns a block has: for linears of few columns.

// Of a warpgroup that makes none.
struct NoLow {
  __device__ __forceinline__ void multiply(int slot, int step, u64 x) {}
};

#if EACH

struct OwnLow {
  u32 a;     // first stage
  int rows;  // of a in a stage, of as many members as the block's columns may belong to; the other rows of the product, of
             // what lies behind them, are not used
  u32 has_adapter;  // a bit for each token of this lane
  float sum[TOKENS / 2];

  // Before codes are decoded, so that the tensor cores have work meanwhile.
  __device__ __forceinline__ void multiply(int slot, int step, u64 x) {
    order_registers();
    wgmma_shared(sum, descriptor(a + slot * rows * 128) + step * 2, x);
  }
};

__device__ __forceinline__ int token_of(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

__device__ __forceinline__ u32 tokens_with_adapter(const long long* slots, int M, int lane) {
  u32 found = 0;
#pragma unroll
  for (int i = 0; i < TOKENS / 4; i++) {
    const int token = token_of(lane, i);
    if (token < M && __ldg(slots + token) >= 0) found |= 1u << i;
  }
  return found;
}

// To shared memory in the swizzle of x, each member at a place of its own; it is 32 wide at least.
__device__ __forceinline__ void store_low(u32 to, const OwnLow& own, int rank, float factor, int warp, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = warp * 16 + half * 8 + lane / 4, column = row % rank;
    if (row >= own.rows) continue;
    const u32 place = to + row / rank * X_BYTES + column % 8 * 2;
#pragma unroll
    for (int i = 0; i < TOKENS / 4; i++) {
      const int token = token_of(lane, i);
      const u16 value = own.has_adapter >> i & 1 ? round_low(own.sum[i / 2 * 4 + half * 2 + i % 2], factor) : 0;
      const u32 at = place + token * 128 + ((column / 8 ^ token % 8) << 4);
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(value) : "memory");
    }
  }
  const int empty = 4 - rank / 8;  // times 8 columns
  for (int i = warp * 32 + lane; i < own.rows / rank * TOKENS * empty; i += 128) {
    const int row = i / empty, chunk = rank / 8 + i % empty;
    const u32 at = to + row * 128 + ((chunk ^ row % 8) << 4);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(0), "r"(0), "r"(0), "r"(0) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads it
}

#endif
