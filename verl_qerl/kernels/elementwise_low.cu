// RMSNorm after the residual's addition, and SiLU times its neighbour, each with low = y a^T of its result y, as low_rank.cu
// makes it: without another launch, and without reading y again.
//
// A cluster takes 16 rows, each of its blocks a part of their columns: it makes y there, writes it and keeps it in shared
// memory, and multiplies it by the same part of a. A warp has a row of y, then a slice of K and some columns of low. Sums of
// squares and of low are added up through shared memory, of the cluster in the end, in a fixed order.
//
// Compiled for COLUMNS of low (a multiple of 8), SLICES of K (of a block's part, a divisor of ROWS), CHUNKS (8 columns of y
// each, of a lane's part of a row; the norm's) and WIDE (a weight in float32). The chunks are those of elementwise.cu.

#define ROWS 16
#define THREADS (ROWS * 32)
#define STRIPES (ROWS / SLICES)                       // warps that have a slice of K, each with other columns of low
#define TILES ((COLUMNS / 8 + STRIPES - 1) / STRIPES)  // times 8 columns of low that a warp has
#define WIDTH (STRIPES * TILES * 8)                   // COLUMNS, rounded up
#define LINE (WIDTH | 8)                              // of a row of sums: eight rows meet no bank more than twice
#define AHEAD 4                                       // loads of the activation under way at once

// The part of a block: 32 columns of y at a time.
struct Part {
  int first, count, pitch;  // pitch: of a row in shared memory, in 16 bytes; an odd multiple of four meets no bank twice
  __device__ __forceinline__ Part(int K) {
    const int part = blockIdx.x % CLUSTER, whole = K / 32;
    first = whole * part / CLUSTER, count = whole * (part + 1) / CLUSTER - first;
    pitch = (whole + CLUSTER - 1) / CLUSTER * 4 | 4;
  }
};

// Nobody writes a while a graph runs: its part comes to L2 while the kernels before this one still run.
__device__ __forceinline__ void prefetch_a(const uint4* a, const Part& part, int K) {
  for (int i = threadIdx.x; i < (part.count + 1) / 2 * COLUMNS; i += THREADS) {
    const uint4* row = a + (size_t)(i % COLUMNS) * (K / 8) + part.first * 4;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i / COLUMNS * 8));
  }
}

__device__ __forceinline__ void put(float* at, float value) {
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(at));
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

__device__ __forceinline__ void put(float* at, float first, float second) {
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(at));
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(__float_as_uint(first)), "r"(__float_as_uint(second))
               : "memory");
}

// y: 16 rows of this block's part, in shared memory, where sums [SLICES][ROWS][LINE] take their place.
__device__ __forceinline__ void multiply_by_a(uint4* y, const Part& part, const uint4* a, const float* global_scale,
                                              const long long* slots, u16* low, int M, int K) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4;
  const int slice = warp % SLICES, stripe = warp / SLICES;
  const uint4* a_row[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const int column = min((stripe * TILES + t) * 8 + row, COLUMNS - 1);
    a_row[t] = a + (size_t)column * (K / 8) + part.first * 4 + lane % 4;
  }
  const uint4* left = y + row * part.pitch + lane % 4;
  float sum[TILES][4] = {};
#pragma unroll 1
  for (int chunk = slice; chunk < part.count; chunk += SLICES) {
    multiply_chunk(sum, left[chunk * 4], left[8 * part.pitch + chunk * 4], a_row, chunk);
  }
  __syncthreads();  // y is read no more
  float* partial = (float*)y;
#pragma unroll
  for (int i = 0; i < TILES * 2; i++) {
    const int t = i / 2, j = i % 2 * 2, m = row + j * 4, n = (stripe * TILES + t) * 8 + lane % 4 * 2;
    put(partial + (slice * ROWS + m) * LINE + n, sum[t][j], sum[t][j + 1]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * WIDTH; i += THREADS) {
    float* at = partial + i / WIDTH * LINE + i % WIDTH;
    float added = *at;
    for (int s = 1; s < SLICES; s++) added += at[s * ROWS * LINE];
    put(at, added);
  }
  cluster_sync();
  const int rank = blockIdx.x % CLUSTER, first_row = blockIdx.x / CLUSTER * ROWS;
  const float over = 1.0f / (256.0f * __ldg(global_scale));
  for (int i = rank * ROWS * COLUMNS / CLUSTER + threadIdx.x; i < (rank + 1) * ROWS * COLUMNS / CLUSTER; i += THREADS) {
    const int m = i / COLUMNS, n = i % COLUMNS;
    float added = 0;
    for (int r = 0; r < CLUSTER; r++) added += load_of_rank(partial + m * LINE + n, r);
    if (first_row + m >= M) continue;
    low[(size_t)(first_row + m) * COLUMNS + n] = slots[first_row + m] < 0 ? 0 : round_low(added, over);
  }
  cluster_sync();  // no block leaves while another still reads its memory
}

// x, residual and slots are written by kernels that may still run when this one starts: no __restrict__.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
rms_norm_low(const uint4* x, const uint4* residual, const uint4* weight, uint4* y, uint4* sum,
             const uint4* __restrict__ a, const float* __restrict__ global_scale, const long long* slots, u16* low, int M,
             int K, float epsilon) {
  extern __shared__ uint4 dynamic[];
  __shared__ float squares_of[ROWS];
  start_next();
  const Part part(K);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.x / CLUSTER * ROWS + warp;
  const int chunks = part.count * 4;
  const size_t row = (size_t)min(token, M - 1) * (K / 8) + part.first * 4;
  uint4 factors[CHUNKS][1 + WIDE];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = lane + c * 32, from = (part.first * 4 + at) * (1 + WIDE);
#pragma unroll
    for (int half = 0; half <= WIDE; half++) factors[c][half] = at < chunks ? weight[from + half] : uint4{};
  }
  prefetch_a(a, part, K);
  await_inputs();
  uint4 loaded[CHUNKS], added[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = lane + c * 32;
    loaded[c] = at < chunks ? __ldcg(x + row + at) : uint4{};
    added[c] = at < chunks ? __ldcg(residual + row + at) : uint4{};
  }
  float values[CHUNKS][8], squares = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) add_rows(loaded[c], added[c], values[c], squares);
  squares = add_up_warp(squares);
  if (lane == 0) squares_of[warp] = squares;
  cluster_sync();
  squares = 0;
#pragma unroll
  for (int r = 0; r < CLUSTER; r++) squares += load_of_rank(squares_of + warp, r);
  const float scale = rsqrtf(squares / K + epsilon);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = lane + c * 32;
    if (at >= chunks) break;
    const uint4 total = pack(values[c]), normalized = normalize(values[c], factors[c], scale);
    dynamic[warp * part.pitch + at] = normalized;
    if (token < M) sum[row + at] = total, y[row + at] = normalized;
  }
  __syncthreads();
  multiply_by_a(dynamic, part, a, global_scale, slots, low, M, K);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
silu_mul_low(const uint4* x, uint4* y, const uint4* __restrict__ a, const float* __restrict__ global_scale,
             const long long* slots, u16* low, int M, int K) {
  extern __shared__ uint4 dynamic[];
  start_next();
  const Part part(K);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, token = blockIdx.x / CLUSTER * ROWS + warp;
  const int chunks = part.count * 4;
  const size_t row = (size_t)min(token, M - 1) * (K / 8) + part.first * 4;
  const uint4* left = x + (size_t)min(token, M - 1) * (K / 4) + part.first * 4;
  prefetch_a(a, part, K);
  await_inputs();
#pragma unroll 1
  for (int from = lane; from < chunks; from += AHEAD * 32) {
    uint4 loaded[AHEAD][2];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int at = min(from + i * 32, chunks - 1);
      loaded[i][0] = __ldcg(left + at), loaded[i][1] = __ldcg(left + K / 8 + at);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int at = from + i * 32;
      if (at >= chunks) break;
      const uint4 made = activate(loaded[i][0], loaded[i][1]);
      dynamic[warp * part.pitch + at] = made;
      if (token < M) y[row + at] = made;
    }
  }
  __syncthreads();
  multiply_by_a(dynamic, part, a, global_scale, slots, low, M, K);
}
