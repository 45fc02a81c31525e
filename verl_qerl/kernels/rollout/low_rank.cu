// low = x a^T in bf16, divided by what w4a16_matmul multiplies its sums by at the end (256 times the global scale, a power
// of two), zero for rows without the adapter: a right operand of w4a16_matmul.
//
// Latency is all: a cluster shares K, each of its warps takes 32 of K at a time, all loads under way at once. Sums go
// through shared memory, of the cluster in the end, and are added in a fixed order.

#define TILE (16 * 8 * TILES)
#define THREADS (WARPS * 32)

// x is written by a kernel that may still run when this one starts: no __restrict__.
extern "C" __global__ void __launch_bounds__(THREADS)
low_rank(const uint4* x, const uint4* __restrict__ a, const float* __restrict__ global_scale, const long long* slots,
         u16* low, int M, int K, int columns) {
  __shared__ float partial[WARPS * TILE], total[TILE];
  start_next();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4;
  const int part = blockIdx.x % CLUSTER, block = blockIdx.x / CLUSTER, column_blocks = (columns + 8 * TILES - 1) / (8 * TILES);
  const int token = block / column_blocks * 16, column = block % column_blocks * (8 * TILES);
  const size_t pitch = K / 8;  // of a row, in 16 bytes
  const uint4* a_row[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++) a_row[t] = a + min(column + t * 8 + row, columns - 1) * pitch + lane % 4;
  const int first = part * WARPS + warp;
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    if (first < K / 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(a_row[t] + first * 4));
  }
  await_inputs();
  const uint4* x_low = x + min(token + row, M - 1) * pitch + lane % 4;
  const uint4* x_high = x + min(token + row + 8, M - 1) * pitch + lane % 4;
  float sum[TILES][4] = {};
#pragma unroll 4
  for (int chunk = first; chunk < K / 32; chunk += CLUSTER * WARPS) {
    multiply_chunk(sum, x_low, x_high, a_row, chunk);
  }
#pragma unroll
  for (int i = 0; i < TILES * 4; i++) {
    const int t = i / 4, j = i % 4;
    partial[warp * TILE + (row + j / 2 * 8) * (8 * TILES) + t * 8 + lane % 4 * 2 + j % 2] = sum[t][j];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TILE; i += THREADS) {
    float added = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) added += partial[w * TILE + i];
    total[i] = added;
  }
  cluster_sync();
  const float over = 1.0f / (256.0f * __ldg(global_scale));
  for (int i = part * TILE / CLUSTER + threadIdx.x; i < (part + 1) * TILE / CLUSTER; i += THREADS) {
    const int m = token + i / (8 * TILES), n = column + i % (8 * TILES);
    float added = 0;
    for (int r = 0; r < CLUSTER; r++) added += load_of_rank(total + i, r);
    if (m < M && n < columns) low[(size_t)m * columns + n] = slots[m] < 0 ? 0 : round_low(added, over);
  }
  cluster_sync();  // no block leaves while another still reads its memory
}
