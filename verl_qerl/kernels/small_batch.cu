// y[m, n] = sum_k x[m, k] w[n, k] + bias[n] + sum_r low[m, r] b[n, r] for a few rows m; w as 4-bit codes in the layout
// of kernels/tiled.py, low the sum of the parts that kernels/lora.py's `shrink` wrote, rounded to bf16.
//
// Compiled for N and K, SPLIT (thread blocks that share one tile of 64 columns, a cluster), WARPS (of a block), TOKENS
// (rows of x, 8 or 16), AHEAD (tiles under way in a warp) and RANK (of the adapter, 0 for none). A warp takes one
// 64 x 16 tile of w at a time: 16 bytes a lane are the four fragments of an m16n8k16 product with w as its left operand,
// so that nothing passes through shared memory before it is multiplied.
//
// Exactness: a code moved to the low exponent bits of a bf16 is its value times 2^-126, a block scale with 238 added to
// its exponent is its value times 2^118, and their product, six significant bits, is exact. 2^8 is put back at the end.

typedef unsigned int u32;
typedef unsigned short u16;

#define BLOCKS (K / 16)
#define STRIDE (SPLIT * WARPS)

// Powers of two as arguments of the kernel: a product runs beside the masks, a shift by a constant competes with them.
struct Powers {
  u32 of2, of4, of6, of8, of12;
};

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// sign: bits 15 and 31 of each half are signs of codes; rest: bits 8..6 and 24..22 their other three bits.
// -> bf16x2 of both codes, times 2^-126.
__device__ __forceinline__ u32 join(u32 sign, u32 rest) { return (sign & 0x80008000u) | (rest & 0x01C001C0u); }

__device__ __forceinline__ u16 to_bf16(float value) {
  u16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}

__device__ __forceinline__ float load_of_rank(const float* local, u32 rank) {
  u32 address = static_cast<u32>(__cvta_generic_to_shared(local));
  float value;
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %1, %2; ld.shared::cluster.f32 %0, [there];}"
      : "=f"(value)
      : "r"(address), "r"(rank));
  return value;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

struct Tile {
  uint4 words;
  uint2 scales;
  u32 x[TOKENS / 8][2];
};

// Where the lane reads in block 0.
struct Source {
  const uint4* words;
  const uint2* scales;
  const u32* x[TOKENS / 8];
};

__device__ __forceinline__ Tile load_tile(const Source& from, u32 block) {
  Tile tile;
  tile.words = __ldg(from.words + (size_t)block * (N / 2));
  tile.scales = __ldg(from.scales + (size_t)block * (N / 8));
#pragma unroll
  for (int part = 0; part < TOKENS / 8; part++) {
    tile.x[part][0] = __ldg(from.x[part] + (size_t)block * 8);
    tile.x[part][1] = __ldg(from.x[part] + (size_t)block * 8 + 4);
  }
  return tile;
}

__device__ __forceinline__ void multiply_tile(const Tile& tile, const Powers& p, float (&sum)[TOKENS / 8][4][4]) {
  const u32 words[4] = {tile.words.x, tile.words.y, tile.words.z, tile.words.w};
#pragma unroll
  for (int part = 0; part < 4; part++) {
    // Two block scales, of rows r and r + 8 of this fragment.
    u32 bytes = part < 2 ? tile.scales.x : tile.scales.y;
    u32 pair = __byte_perm(bytes, 0, part % 2 ? 0x4342 : 0x4140) * p.of4 + 0x77007700u;
    u32 scale, scale_8;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; mov.b32 %0, {low, low}; mov.b32 %1, {high, high};}"
        : "=r"(scale), "=r"(scale_8)
        : "r"(pair));
    u32 word = words[part], right = word >> 6;
    u32 a[4];
    a[0] = multiply(join(word * p.of12, word * p.of6), scale);
    a[1] = multiply(join(word * p.of8, word * p.of2), scale_8);
    a[2] = multiply(join(word * p.of4, right * p.of4), scale);
    a[3] = multiply(join(word, right), scale_8);
#pragma unroll
    for (int m = 0; m < TOKENS / 8; m++) {
      float(&c)[4] = sum[m][part];
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(tile.x[m][0]), "r"(tile.x[m][1]));
    }
  }
}

#if RANK
// low[token][r] of the member that this tile of columns belongs to; zero for tokens without the adapter.
__device__ __forceinline__ void sum_parts(float* low, const float* parts, const long long* slots, int member, int columns,
                                          int splits, int M) {
  for (int i = threadIdx.x; i < TOKENS * RANK; i += WARPS * 32) {
    int token = i / RANK;
    float total = 0;
    if (token < M && slots[token] >= 0) {
      const float* part = parts + (size_t)token * columns + member * RANK + i % RANK;
#pragma unroll 8
      for (int s = 0; s < splits; s++) total += __ldg(part + (size_t)s * M * columns);
    }
    low[i] = __uint_as_float((u32)to_bf16(total) << 16);
  }
}
#endif

extern "C" __global__ void __cluster_dims__(SPLIT, 1, 1) __launch_bounds__(WARPS * 32)
small_batch(const uint4* __restrict__ words, const uint2* __restrict__ scales, const float* __restrict__ global_scale,
            const u32* __restrict__ x, u16* __restrict__ y, const u16* __restrict__ bias,
            const float* __restrict__ parts, const uint4* __restrict__ b, const int* __restrict__ members,
            const long long* __restrict__ slots, int M, int has_bias, int tiles_per_entry, int columns, int splits,
            int of2, int of4, int of6, int of8, int of12) {
  __shared__ float partial[WARPS][64 * TOKENS];
#if RANK
  __shared__ float low[TOKENS * RANK];
#endif
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = blockIdx.x % SPLIT, tile_n = blockIdx.x / SPLIT;
  const Powers powers = {(u32)of2, (u32)of4, (u32)of6, (u32)of8, (u32)of12};
  Source from = {words + tile_n * 32 + lane, scales + tile_n * 8 + lane / 4};
#pragma unroll
  for (int part = 0; part < TOKENS / 8; part++) {
    // Rows beyond the last one repeat it: what they give is not written.
    from.x[part] = x + (size_t)min(part * 8 + lane / 4, M - 1) * (K / 2) + lane % 4;
  }

  // Keeps each address in its registers: it would be put together again, by the units that decode, for every tile.
  asm volatile("" : "+l"(from.words), "+l"(from.scales));
#pragma unroll
  for (int part = 0; part < TOKENS / 8; part++) asm volatile("" : "+l"(from.x[part]));

  float sum[TOKENS / 8][4][4] = {};
  // Blocks of 16 along K are dealt to all warps of the cluster in turn; AHEAD of them are under way in each. Loads
  // beyond the last block repeat it.
  const int first = rank * WARPS + warp;
  const int count = first < BLOCKS ? (BLOCKS - first + STRIDE - 1) / STRIDE : 0;
  Tile ahead[AHEAD];
#pragma unroll
  for (int j = 0; j < AHEAD; j++) ahead[j] = load_tile(from, min(first + j * STRIDE, BLOCKS - 1));
  // Every thread writes one column only, since its steps below are multiples of 64.
  const int n = tile_n * 64 + threadIdx.x % 64;
#if RANK
  asm volatile("prefetch.global.L2 [%0];" ::"l"(b + (size_t)n * (RANK / 8)));
  sum_parts(low, parts, slots, __ldg(members + tile_n / tiles_per_entry), columns, splits, M);
#endif
  int done = 0;
#pragma unroll 1
  for (; done + AHEAD <= count; done += AHEAD) {
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      multiply_tile(ahead[j], powers, sum);
      ahead[j] = load_tile(from, min(first + (done + AHEAD + j) * STRIDE, BLOCKS - 1));
    }
  }
#pragma unroll
  for (int j = 0; j < AHEAD - 1; j++) {
    if (done + j < count) multiply_tile(ahead[j], powers, sum);
  }

  // [64 columns][TOKENS] of this warp; c[0..1] are tokens 2 (lane % 4) + {0, 1} of row lane / 4, c[2..3] of that + 8.
#pragma unroll
  for (int m = 0; m < TOKENS / 8; m++) {
#pragma unroll
    for (int part = 0; part < 4; part++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int n = part * 16 + lane / 4 + (i / 2) * 8, token = m * 8 + lane % 4 * 2 + i % 2;
        partial[warp][token * 64 + n] = sum[m][part][i];
      }
    }
  }
#if RANK
  uint4 b_row[RANK / 8];
#pragma unroll
  for (int i = 0; i < RANK / 8; i++) b_row[i] = __ldg(b + (size_t)n * (RANK / 8) + i);
#endif
  const float added = has_bias ? __uint_as_float((u32)__ldg(bias + n) << 16) : 0.0f;
  const float factor = 256.0f * __ldg(global_scale);
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * TOKENS; i += WARPS * 32) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += partial[w][i];
    partial[0][i] = total;
  }
  if (SPLIT > 1) cluster_sync(); else __syncthreads();
  for (int i = rank * WARPS * 32 + threadIdx.x; i < 64 * TOKENS; i += SPLIT * WARPS * 32) {
    const int token = i / 64;
    float total = 0;
    if (SPLIT == 1) {
      total = partial[0][i];
    } else {
#pragma unroll
      for (int r = 0; r < SPLIT; r++) total += load_of_rank(&partial[0][i], r);
    }
    total = total * factor + added;
#if RANK
    const float* row = low + token * RANK;
#pragma unroll
    for (int j = 0; j < RANK / 8; j++) {
      const u32 pairs[4] = {b_row[j].x, b_row[j].y, b_row[j].z, b_row[j].w};
#pragma unroll
      for (int h = 0; h < 4; h++) {
        total += row[j * 8 + h * 2] * low_half(pairs[h]) + row[j * 8 + h * 2 + 1] * high_half(pairs[h]);
      }
    }
#endif
    if (token < M) y[(size_t)token * N + n] = to_bf16(total);
  }
  if (SPLIT > 1) cluster_sync();  // no block leaves while another still reads its memory
}
