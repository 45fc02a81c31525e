// low[m, r] = sum_k x[m, k] a[r, k] in bf16, over what medium_batch multiplies its sums by (256 times the global scale, a
// power of two); zero for rows without the adapter.
//
// A thread block owns 16 rows and 8 * COLUMN_TILES columns; K is dealt, 32 at a time, to the warps of a cluster, whose sums
// are added through shared memory in float32 and in a fixed order. Which of 32 elements of K is which in an m16n8k16
// product does not matter while both operands agree: so a lane reads 16 bytes at a time. Latency is all that counts here;
// the kernel after this one is let in at the start, to fetch its weights meanwhile.

#define WARPS 8
#define TILE (16 * 8 * COLUMN_TILES)

__device__ __forceinline__ void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
shrink(const uint4* __restrict__ x, const uint4* __restrict__ a, const long long* __restrict__ slots, u16* __restrict__ low,
       const float* __restrict__ global_scale,       int M, int K, int columns, int split, int column_blocks) {
  __shared__ float partial[WARPS][TILE];
  asm volatile("griddepcontrol.launch_dependents;");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = blockIdx.x % split, block = blockIdx.x / split;
  const int token = block / column_blocks * 16, column = block % column_blocks * (8 * COLUMN_TILES);
  const int row = lane / 4, first = part * WARPS + warp;
  const size_t pitch = K / 8;  // of a row, in 16 bytes
  const uint4* x_low = x + min(token + row, M - 1) * pitch + lane % 4;
  const uint4* x_high = x + min(token + row + 8, M - 1) * pitch + lane % 4;
  const uint4* a_row[COLUMN_TILES];
#pragma unroll
  for (int tile = 0; tile < COLUMN_TILES; tile++) a_row[tile] = a + min(column + tile * 8 + row, columns - 1) * pitch + lane % 4;
  float sum[COLUMN_TILES][4] = {};
  // What the kernel before has written is read past the first cache, which may hold what was there when it began.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll 4
  for (int chunk = first; chunk < K / 32; chunk += split * WARPS) {
    const uint4 left = __ldcg(x_low + chunk * 4), right = __ldcg(x_high + chunk * 4);
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; tile++) {
      const uint4 other = __ldg(a_row[tile] + chunk * 4);
      multiply_add(sum[tile], left.x, right.x, left.y, right.y, other.x, other.y);
      multiply_add(sum[tile], left.z, right.z, left.w, right.w, other.z, other.w);
    }
  }
#pragma unroll
  for (int tile = 0; tile < COLUMN_TILES; tile++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      partial[warp][(row + i / 2 * 8) * (8 * COLUMN_TILES) + tile * 8 + lane % 4 * 2 + i % 2] = sum[tile][i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TILE; i += WARPS * 32) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += partial[w][i];
    partial[0][i] = total;
  }
  const float factor = 1.0f / (256.0f * __ldg(global_scale));
  cluster_sync();
  for (int i = part * (TILE / split) + threadIdx.x; i < (part + 1) * (TILE / split); i += WARPS * 32) {
    float total = 0;
#pragma unroll 8
    for (int r = 0; r < split; r++) total += load_of_rank(&partial[0][i], r);
    const int m = token + i / (8 * COLUMN_TILES), n = column + i % (8 * COLUMN_TILES);
    if (m < M && n < columns) low[(size_t)m * columns + n] = __ldcg(slots + m) < 0 ? 0 : to_bf16(from_bf16(to_bf16(total)) * factor);
  }
  cluster_sync();  // no block leaves while another still reads its memory
}
