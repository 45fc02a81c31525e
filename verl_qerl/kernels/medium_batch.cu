// y[m, n] = sum_k x[m, k] w[n, k] + bias[n] + sum_r low[m, r] b[n, r] for up to TOKENS rows m; w as 4-bit codes in the
// layout of kernels/tiled.py, low as shrink.cu wrote it.
//
// Compiled for TOKENS (8 to 128, a multiple of 8), PIECES (1, 2 or 4) and GROUPS. A thread block owns COLUMNS columns of y
// and, in a cluster, a part of K. Two lanes fill a ring in shared memory, 64 of K at a time: one with codes and
// scales, one with x in the swizzle that wgmma reads. low is multiplied like further steps of K. GROUPS warpgroups decode codes into registers, the left operand of wgmma: the
// 64 rows of one wgmma are 16 rows of w from each of its warps, PIECES wgmmas for each 16 of K. Decoding overlaps with the
// wgmmas of the step before. The
// blocks of a cluster add their sums through shared memory, in float32 and in a fixed order.

typedef unsigned long long u64;
typedef unsigned char u8;

struct alignas(64) TensorMap {
  u64 opaque[16];
};

#define COLUMNS (64 * PIECES * GROUPS)
#define WORKERS (GROUPS * 128)  // threads that multiply
#define X_BYTES (TOKENS * 128)
#define WORD_BYTES (4 * COLUMNS * 8)
#define SCALE_BYTES (4 * COLUMNS)
#define PITCH (COLUMNS + 4)  // floats between rows of the sums in shared memory: no two lanes in one bank

__device__ __forceinline__ void init_barrier(u32 at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count));
}

__device__ __forceinline__ void arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// Arrives, and makes the barrier wait for as many bytes.
__device__ __forceinline__ void expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for(u32 at, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:}" ::"r"(at),
      "r"(parity)
      : "memory");
}

// A block of the tensor that `map` describes, at (column, row) of it.
__device__ __forceinline__ void copy_block(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], "
      "%5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

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

// d += a x; written by kernels/medium_batch.py, since the number of operands depends on TOKENS.
@WGMMA@

// PIECES words and their scales, of one lane for one step of K.
struct Codes {
  u32 word[PIECES];
  u32 scales[(PIECES + 1) / 2];
};

__device__ __forceinline__ Codes load_codes(u32 words, u32 scales) {
  Codes codes;
#if PIECES == 4
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(codes.word[0]), "=r"(codes.word[1]), "=r"(codes.word[2]), "=r"(codes.word[3])
               : "r"(words));
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(codes.scales[0]), "=r"(codes.scales[1]) : "r"(scales));
#elif PIECES == 2
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(codes.word[0]), "=r"(codes.word[1]) : "r"(words));
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(codes.scales[0]) : "r"(scales));
#else
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(codes.word[0]) : "r"(words));
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(codes.scales[0]) : "r"(scales));
#endif
  return codes;
}

// Where things lie in shared memory; the same in every block of a cluster.
struct Places {
  u32 x, low, words, scales, full, empty, low_ready;
};

// One lane fills the ring with codes and scales.
__device__ __forceinline__ void fill_weight(const Places& at, const TensorMap& words, const TensorMap& scales, int column,
                                            int first, int count, int stages) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  int slot = 0;
  u32 parity = 1;
#pragma unroll 1
  for (int stage = 0; stage < count; stage++) {
    if (stage >= stages) wait_for(at.empty + slot * 8, parity);
    const u32 full = at.full + slot * 8;
    expect(full, WORD_BYTES + SCALE_BYTES);
#pragma unroll
    for (int part = 0; part < COLUMNS / BOX; part++) {
      const int row = (first + stage) * 4, n = column + part * BOX;
      copy_block(at.words + slot * WORD_BYTES + part * (BOX * 32), words, n, row, full, policy);
      copy_block(at.scales + slot * SCALE_BYTES + part * (BOX * 4), scales, n, row, full, policy);
    }
    if (++slot == stages) slot = 0, parity ^= 1;
  }
}

// One lane fills the ring with x; the tensor map swizzles, and rows beyond the last one are zero.
__device__ __forceinline__ void fill_x(const Places& at, const TensorMap& x, int first, int count, int stages) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  int slot = 0;
  u32 parity = 1;
#pragma unroll 1
  for (int stage = 0; stage < count; stage++) {
    if (stage >= stages) wait_for(at.empty + slot * 8, parity);
    const u32 full = at.full + slot * 8;
    expect(full, X_BYTES);
    copy_block(at.x + slot * X_BYTES, x, (first + stage) * 64, 0, full, policy);
    if (++slot == stages) slot = 0, parity ^= 1;
  }
}

// All members of low beside each other, like further columns of x, in the same swizzle; a member is 16 wide at least.
__device__ __forceinline__ void fetch_low(const Places& at, const u8* low, int rank, int columns, int M, int lane) {
  const int wide = max(rank / 8, 2), chunks = columns / rank * wide;  // 16 bytes each
  for (int i = lane; i < TOKENS * chunks; i += 32) {
    const int token = i / chunks, chunk = i % chunks, member = chunk / wide, part = chunk % wide * 8;
    const bool there = token < M && part < rank;
    const u8* from = there ? low + ((size_t)token * columns + member * rank + part) * 2 : low;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at.low + chunk / 8 * X_BYTES + token * 128 +
                                                                      ((chunk % 8 ^ token % 8) << 4)),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
  }
  // For this lane, when its copies have ended.
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at.low_ready) : "memory");
}

__device__ __forceinline__ void multiply_stages(const Places& at, const Factors& f, int count, int stages, int unit,
                                                int lane, float (&sum)[PIECES][TOKENS / 2]) {
  const int tile = unit / 4;
  u32 words = at.words + tile * 64 / BOX * (BOX * 32) + tile * 64 % BOX * 8 + lane * 16 + unit % 4 * 4;
  u32 scales = at.scales + tile * 64 / BOX * (BOX * 4) + tile * 64 % BOX + lane / 4 * 8 + unit % 4 * 2;
  int slot = 0, before = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int stage = 0; stage < count; stage++) {
    wait_for(at.full + slot * 8, parity);
    Codes codes[4];
#pragma unroll
    for (int step = 0; step < 4; step++) {
      codes[step] = load_codes(words + slot * WORD_BYTES + step * (BOX * 8), scales + slot * SCALE_BYTES + step * BOX);
    }
    const u64 x = descriptor(at.x + slot * X_BYTES);
    u32 a[2][PIECES][4];
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
      for (int p = 0; p < PIECES; p++) decode(codes[step].word[p], codes[step].scales[p / 2], p % 2, f, a[step % 2][p]);
      order_registers();
#pragma unroll
      for (int p = 0; p < PIECES; p++) wgmma(sum[p], a[step % 2][p], x + step * 2);
      commit();
      wait_products<1>();
      // All products of the stage before have ended.
      if (step == 0 && stage > 0 && lane == 0) arrive(at.empty + before * 8);
    }
    before = slot;
    if (++slot == stages) slot = 0, parity ^= 1;
  }
}

__device__ __forceinline__ void multiply_low(const Places& at, const u16* b, int member, int rank, int N, int column,
                                             int unit, int lane,
                                             float (&sum)[PIECES][TOKENS / 2]) {
  wait_for(at.low_ready, 0);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // low was copied as ordinary stores are
  const int start = member * max(rank, 16);
#pragma unroll 1
  for (int from = 0; from < rank; from += 32) {
    u32 a[2][PIECES][4];
#pragma unroll
    for (int i = 0; i < 2 * PIECES * 4; i++) {
      const int step = i / (PIECES * 4), p = i / 4 % PIECES, half = i % 2;
      const int r = from + step * 16 + i % 4 / 2 * 8 + lane % 4 * 2;
      const int n = min(column + (unit + p) * 16 + half * 8 + lane / 4, N - 1);
      a[step][p][i % 4] = r < rank ? __ldg(reinterpret_cast<const u32*>(b + (size_t)n * rank + r)) : 0;
    }
    const u64 low = descriptor(at.low + (start + from) / 64 * X_BYTES) + (start + from) % 64 / 8;
    order_registers();
#pragma unroll
    for (int step = 0; step < 2; step++) {
      if (from + step * 16 >= rank) break;
#pragma unroll
      for (int p = 0; p < PIECES; p++) wgmma(sum[p], a[step][p], low + step * 2);
    }
    commit();
    wait_products<0>();
  }
}

__device__ __forceinline__ void join_workers() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

// Sums of this thread's lane to [TOKENS][PITCH] floats.
__device__ __forceinline__ void store_sums(u32 to, int unit, int lane, const float (&sum)[PIECES][TOKENS / 2]) {
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, n = (unit + p) * 16 + i % 4 / 2 * 8 + lane / 4;
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + (token * PITCH + n) * 4), "f"(sum[p][i]) : "memory");
    }
  }
}

// What the blocks of a cluster have stored, added up in the order of their ranks; each block does a part.
__device__ __forceinline__ void write_sums(u32 from, u16* y, const u16* bias, float factor, int M, int N, int column,
                                           int split, int part) {
  for (int i = part * WORKERS + threadIdx.x; i < M * (COLUMNS / 4); i += split * WORKERS) {
    const int token = i / (COLUMNS / 4), quad = i % (COLUMNS / 4), n = column + quad * 4;
    if (n >= N) continue;
    const u32 here = from + (token * PITCH + quad * 4) * 4;
    float4 total = {0, 0, 0, 0};
#pragma unroll 4
    for (int r = 0; r < split; r++) {
      float4 next;
      asm volatile(
          "{.reg .u32 there; mapa.shared::cluster.u32 there, %4, %5;\n"
          "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
          : "=f"(next.x), "=f"(next.y), "=f"(next.z), "=f"(next.w)
          : "r"(here), "r"(r));
      total.x += next.x, total.y += next.y, total.z += next.z, total.w += next.w;
    }
    uint2 added = {0, 0};
    if (bias) added = __ldg(reinterpret_cast<const uint2*>(bias + n));
    const u32 bits[4] = {to_bf16(total.x * factor + from_bf16(added.x & 0xFFFF)),
                         to_bf16(total.y * factor + from_bf16(added.x >> 16)),
                         to_bf16(total.z * factor + from_bf16(added.y & 0xFFFF)),
                         to_bf16(total.w * factor + from_bf16(added.y >> 16))};
    *reinterpret_cast<uint2*>(y + (size_t)token * N + n) = {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS + HELPERS * 32, BLOCKS)
medium_batch(const __grid_constant__ TensorMap words, const __grid_constant__ TensorMap scales, const float* __restrict__ global_scale,
             const __grid_constant__ TensorMap x, u16* __restrict__ y, const u16* __restrict__ bias, const u8* __restrict__ low,
             const u16* __restrict__ b, const int* __restrict__ members, int M, int N,
             int K, int split, int stages, int has_bias, int rank, int per_entry, int columns, int of4,
             int of_even, int of_odd) {
  extern __shared__ u8 dynamic[];
  const u32 base = (static_cast<u32>(__cvta_generic_to_shared(dynamic)) + 1023) & ~1023u;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int part = blockIdx.x % split, column = blockIdx.x / split * COLUMNS;
  const int first = K / 64 * part / split, count = K / 64 * (part + 1) / split - first;
  const bool adds_low = rank && part == split - 1;
  Places at;
  at.x = base;
  at.low = at.x + stages * X_BYTES;
  at.words = at.low + (rank ? (columns / rank * max(rank, 16) + 63) / 64 * X_BYTES : 0);
  at.scales = at.words + stages * WORD_BYTES;
  at.full = at.scales + stages * SCALE_BYTES;
  at.empty = at.full + stages * 8;
  at.low_ready = at.empty + stages * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; i++) {
      init_barrier(at.full + i * 8, 2);
      init_barrier(at.empty + i * 8, GROUPS * 4);
    }
    init_barrier(at.low_ready, 32);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();

  const float factor = 256.0f * __ldg(global_scale);
  if (warp >= GROUPS * 4) {
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
    if (warp == GROUPS * 4) {
      if (lane == 0) fill_weight(at, words, scales, column, first, count, stages);
    } else if (warp == GROUPS * 4 + 1) {
      // Only the weights are there before the kernel that this one overlaps with has ended.
      asm volatile("griddepcontrol.wait;" ::: "memory");
      if (adds_low) fetch_low(at, low, rank, columns, M, lane);
      if (lane == 0) fill_x(at, x, first, count, stages);
    }
    __syncwarp();
    if (split > 1) {
      cluster_sync();
      cluster_sync();
    }
  } else {
#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
    const Factors f = {(u32)of4, (u32)of_even, (u32)of_odd};
    const int unit = warp * PIECES;  // of 16 columns
    float sum[PIECES][TOKENS / 2] = {};
    multiply_stages(at, f, count, stages, unit, lane, sum);
    if (adds_low) {
      const int member = __ldg(members + min(column + warp / 4 * 64 * PIECES, N - 1) / per_entry);
      multiply_low(at, b, member, rank, N, column, unit, lane, sum);
    }
    wait_products<0>();
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
#pragma unroll
      for (int i = 0; i < TOKENS / 2; i++) asm volatile("" : "+f"(sum[p][i])::"memory");
    }
    join_workers();  // the ring is read no more: sums take its place
    store_sums(base, unit, lane, sum);
    if (split > 1) cluster_sync(); else join_workers();
    write_sums(base, y, has_bias ? bias : nullptr, factor, M, N, column, split, part);
    if (split > 1) cluster_sync();  // no block leaves while another still reads its memory
  }
}
