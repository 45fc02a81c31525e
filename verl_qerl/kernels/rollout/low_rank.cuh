// low = x a^T, the LoRA intermediate, in bf16, divided by what the sums are multiplied by at the end (256 times the global
// scale, a power of two); zero for rows without the adapter.
//
// With few rows it is computed by warps beside those that multiply by w, and costs no launch. The first blocks of the grid
// share the work: a task is 16 rows of x, 8 * LOW_TILES rows of a and a part of K. Its sums go through global memory; in
// blocks that add the adapter the same warps wait for all tasks and add their sums in a fixed order. Or EACH block
// computes what it needs (own_intermediate.cuh). With more rows it is GIVEN by the launch before (low_rank.cu), which
// takes less time, and goes through the ring.

#if !GIVEN && !EACH

#define LOW_TILE (16 * 8 * LOW_TILES)
#define LOW_THREADS (LOW_WARPS * 32)
#define LOW_GATHER (TOKENS < 32 ? TOKENS / 8 : 4)  // times 4 columns of low that a thread makes at once

// Macros are not expanded in a pragma. Loads under way: chunks of K in a task, parts of a sum.
constexpr int AHEAD = LOW_AHEAD, PARTS = (TOKENS < 32 ? 8 : 16) / LOW_GATHER;

struct LowRank {
  const uint4 *x, *a;
  const long long* slots;  // negative for rows without the adapter
  float* parts;            // [split][M][columns]
  int* done;               // tasks, blocks that need them no more; zero before and after
  int M, K, columns, rank, split, tasks, workers;
};

__device__ __forceinline__ void join_low() { asm volatile("bar.sync 2, %0;" ::"n"(LOW_THREADS) : "memory"); }

__device__ __forceinline__ void add_to(float4& sum, const float4& next) {
  sum.x += next.x, sum.y += next.y, sum.z += next.z, sum.w += next.w;
}

__device__ __forceinline__ uint2 round_four(const float4& sum, float over) {
  const float four[4] = {sum.x, sum.y, sum.z, sum.w};
  u32 bits[4];
#pragma unroll
  for (int j = 0; j < 4; j++) bits[j] = round_low(four[j], over);
  return {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
}

// Four columns of a row of low.
struct Quad {
  int m, n;
  __device__ __forceinline__ bool is_in(const LowRank& r) const { return m < r.M && n < r.columns; }
  __device__ __forceinline__ float4* part(const LowRank& r, int s) const {
    return reinterpret_cast<float4*>(r.parts + ((size_t)s * r.M + m) * r.columns + n);
  }
};

__device__ __forceinline__ void do_task(const LowRank& r, float4* partial, int task, int thread) {
  const int lane = thread % 32, warp = thread / 32, row = lane / 4;
  const int column_blocks = (r.columns + 8 * LOW_TILES - 1) / (8 * LOW_TILES), part = task % r.split, tile = task / r.split;
  const int token = tile / column_blocks * 16, column = tile % column_blocks * (8 * LOW_TILES);
  const size_t pitch = r.K / 8;  // of a row, in 16 bytes
  const uint4* x_low = r.x + min(token + row, r.M - 1) * pitch + lane % 4;
  const uint4* x_high = r.x + min(token + row + 8, r.M - 1) * pitch + lane % 4;
  const uint4* a_row[LOW_TILES];
#pragma unroll
  for (int t = 0; t < LOW_TILES; t++) a_row[t] = r.a + min(column + t * 8 + row, r.columns - 1) * pitch + lane % 4;
  float sum[LOW_TILES][4] = {};
#pragma unroll AHEAD
  for (int chunk = part * LOW_WARPS + warp; chunk < r.K / 32; chunk += r.split * LOW_WARPS) {
    multiply_chunk(sum, x_low, x_high, a_row, chunk);
  }
  float* own = reinterpret_cast<float*>(partial) + warp * LOW_TILE;
#pragma unroll
  for (int i = 0; i < LOW_TILES * 4; i++) {
    const int t = i / 4, j = i % 4;
    own[(row + j / 2 * 8) * (8 * LOW_TILES) + t * 8 + lane % 4 * 2 + j % 2] = sum[t][j];
  }
  join_low();
  for (int i = thread; i < LOW_TILE / 4; i += LOW_THREADS) {
    float4 total = {};
#pragma unroll
    for (int w = 0; w < LOW_WARPS; w++) add_to(total, partial[w * LOW_TILE / 4 + i]);
    const Quad quad = {token + i / (2 * LOW_TILES), column + i % (2 * LOW_TILES) * 4};
    if (quad.is_in(r)) __stcg(quad.part(r, part), total);
  }
  __threadfence();
  join_low();
  if (thread == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(r.done) : "memory");
}

// What of a the tasks of this block need.
__device__ __forceinline__ void prefetch_a(const LowRank& r, int thread) {
  const int lane = thread % 32, column_blocks = (r.columns + 8 * LOW_TILES - 1) / (8 * LOW_TILES);
  for (int task = blockIdx.x; task < r.tasks && blockIdx.x < r.workers; task += r.workers) {
    const int part = task % r.split, column = task / r.split % column_blocks * (8 * LOW_TILES) + lane;
    const uint4* row = r.a + (size_t)column * (r.K / 8);
    for (int chunk = part * LOW_WARPS + thread / 32; chunk < r.K / 32; chunk += r.split * LOW_WARPS) {
      if (lane < 8 * LOW_TILES && column < r.columns) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + chunk * 4));
    }
  }
}

__device__ __forceinline__ void do_tasks(const LowRank& r, int thread) {
  __shared__ float4 partial[LOW_WARPS * LOW_TILE / 4];
  // Workers are so few that all of them run, whatever waits.
  for (int task = blockIdx.x; task < r.tasks && blockIdx.x < r.workers; task += r.workers) {
    do_task(r, partial, task, thread);
  }
}

// Until as many are counted, by blocks that have released them.
__device__ __forceinline__ void await_count(const int* counter, int count) {
  int there;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(counter) : "memory");
  } while (there < count);
}

// When a block needs the sums no more; the last one leaves the counters as the next launch wants to find them.
__device__ __forceinline__ void leave_tasks(const LowRank& r) {
  if (atomicInc(reinterpret_cast<unsigned*>(r.done) + 1, gridDim.x - 1) == gridDim.x - 1) r.done[0] = 0;
}

// A member of low to shared memory, in the swizzle of x; it is 32 wide at least.
__device__ __forceinline__ void gather_low(u32 to, const LowRank& r, float factor, int member, int thread) {
  const int chunks = max(r.rank / 4, 8), count = TOKENS * chunks;  // 4 columns each
#pragma unroll 1
  for (int from = thread; from < count; from += LOW_GATHER * LOW_THREADS) {
    float4 sum[LOW_GATHER] = {};
    const float4* at[LOW_GATHER];  // null where low is zero
#pragma unroll
    for (int g = 0; g < LOW_GATHER; g++) {
      const int i = from + g * LOW_THREADS, token = i / chunks, column = i % chunks * 4;
      const bool there = i < count && token < r.M && column < r.rank && __ldg(r.slots + token) >= 0;
      const float* place = r.parts + (size_t)token * r.columns + member * r.rank + column;
      at[g] = there ? reinterpret_cast<const float4*>(place) : nullptr;
    }
#pragma unroll PARTS
    for (int s = 0; s < r.split; s++) {
#pragma unroll
      for (int g = 0; g < LOW_GATHER; g++) {
        if (at[g]) add_to(sum[g], __ldcg(at[g] + (size_t)s * r.M * r.columns / 4));
      }
    }
#pragma unroll
    for (int g = 0; g < LOW_GATHER; g++) {
      const int i = from + g * LOW_THREADS, token = i / chunks, chunk = i % chunks;
      if (i >= count) break;
      const uint2 four = round_four(sum[g], factor);
      const u32 place = to + chunk / 16 * X_BYTES + token * 128 + ((chunk / 2 % 8 ^ token % 8) << 4) + chunk % 2 * 8;
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(place), "r"(four.x), "r"(four.y) : "memory");
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads it
}

#endif

// Rows of b for the steps [from, from + 32) of the rank, as a left operand.
__device__ __forceinline__ const u32* place_in_b(const u16* b, int rank, int N, int column, int unit, int lane, int i) {
  const int step = i / (WARP_TILES * 4), p = i / 4 % WARP_TILES, half = i % 2;
  const int n = min(column + (unit + p) * 16 + half * 8 + lane / 4, N - 1);
  return reinterpret_cast<const u32*>(b + (size_t)n * rank + step * 16 + i % 4 / 2 * 8 + lane % 4 * 2);
}

// Up to 64 of the rank, from `first` on; low holds them in the swizzle of x.
__device__ __forceinline__ void multiply_low(u32 low, const u16* b, int rank, int first, int N, int column, int unit,
                                             int lane, float (&sum)[WARP_TILES][TOKENS / 2]) {
#pragma unroll 1
  for (int from = first; from < min(rank, first + 64); from += 32) {
    u32 a[2][WARP_TILES][4];
#pragma unroll
    for (int i = 0; i < 2 * WARP_TILES * 4; i++) {
      const u32* at = place_in_b(b + from, rank, N, column, unit, lane, i);
      a[i / (WARP_TILES * 4)][i / 4 % WARP_TILES][i % 4] = from + i / (WARP_TILES * 4) * 16 + i % 4 / 2 * 8 < rank ? __ldg(at) : 0;
    }
    const u64 operand = descriptor(low) + (from - first) / 8;
    order_registers();
#pragma unroll
    for (int step = 0; step < 2; step++) {
#pragma unroll
      for (int p = 0; p < WARP_TILES; p++) wgmma(sum[p], a[step][p], operand + step * 2);
    }
    commit();
    wait_products<0>();
  }
}

// Of the next columns, before their sums: b comes from memory meanwhile.
__device__ __forceinline__ void prefetch_b(const u16* b, int rank, int N, int column) {
  const int lines = COLUMNS * rank / 64;  // of 128 bytes
  for (int i = threadIdx.x; i < lines; i += WORKERS) {
    if (column * rank + i * 64 < N * rank) asm volatile("prefetch.global.L2 [%0];" ::"l"(b + (size_t)column * rank + i * 64));
  }
}
