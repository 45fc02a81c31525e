// The elementwise kernels between linears: RMSNorm after the residual's addition, SiLU(gate) * up, and the rotation of q
// and k, with a norm of each head before it if the model has one. With few rows all of it is latency: one row a block,
// all loads in flight at once, and programmatic dependent launch (grid.cuh).
//
// Compiled for THREADS, CHUNKS (8 columns each, of a thread's part of a row), WIDE (a norm's weight in float32), NORMS
// (heads are normalized before they are rotated) and ROWS (each token has a norm's weight of its own).

__device__ __forceinline__ void unpack(const uint4& packed, float (&to)[8]) {
  const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 8; i++) to[i] = from_bf16(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xFFFF);
}

__device__ __forceinline__ float add_up(float value) {
  __shared__ float partial[THREADS / 32];
#pragma unroll
  for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(~0u, value, i);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) total += partial[i];
  return total;
}

// values times scale and 8 entries of a norm's weight.
__device__ __forceinline__ void normalize(float (&values)[8], float scale, const uint4 (&weight)[1 + WIDE]) {
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] *= scale;
#if WIDE
  const float* factor = reinterpret_cast<const float*>(weight);
#else
  // Rounded before the product, as transformers does: it is what the actor computes.
  unpack(pack(values), values);
  float factor[8];
  unpack(weight[0], factor);
#endif
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] *= factor[i];
}

// x and residual are written by kernels that may still run when this one starts: no __restrict__, which would let the
// compiler load them before await_inputs.
extern "C" __global__ void __launch_bounds__(THREADS)
rms_norm(const uint4* x, const uint4* residual, const uint4* weight, uint4* y, uint4* sum, int columns, int adds,
         float epsilon
#if ROWS
         , const int* ids, int rows_per_token
#endif
) {
  start_next();
  const int chunks = columns / 8;
  const size_t row = (size_t)blockIdx.x * chunks;
#if ROWS
  // No kernel of a graph writes ids or weights; ids, which are others in each run of the graph, come from L2.
  weight += (size_t)__ldcg(ids + blockIdx.x / rows_per_token) * chunks * (1 + WIDE);
#endif
  uint4 factors[CHUNKS][1 + WIDE];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = threadIdx.x + c * THREADS;
#pragma unroll
    for (int half = 0; half <= WIDE; half++) factors[c][half] = at < chunks ? weight[at * (1 + WIDE) + half] : uint4{};
  }
  await_inputs();
  uint4 loaded[CHUNKS], added[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = threadIdx.x + c * THREADS;
    loaded[c] = at < chunks ? __ldcg(x + row + at) : uint4{};
    added[c] = at < chunks && adds ? __ldcg(residual + row + at) : uint4{};
  }
  float values[CHUNKS][8], squares = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    float other[8];
    unpack(loaded[c], values[c]);
    unpack(added[c], other);
#pragma unroll
    for (int i = 0; i < 8; i++) values[c][i] += other[i], squares += values[c][i] * values[c][i];
  }
  const float scale = rsqrtf(add_up(squares) / columns + epsilon);
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int at = threadIdx.x + c * THREADS;
    if (at >= chunks) break;
    if (adds) sum[row + at] = pack(values[c]);
    normalize(values[c], scale, factors[c]);
    y[row + at] = pack(values[c]);
  }
}

// y = silu(left half of a row of x) times its right half; silu is rounded before the product, as in eager torch.
extern "C" __global__ void __launch_bounds__(THREADS) silu_mul(const uint4* x, uint4* y, int chunks, int count) {
  start_next();
  await_inputs();
  const int at = blockIdx.x * THREADS + threadIdx.x;
  if (at >= count) return;
  const uint4* left = x + (size_t)at + at / chunks * chunks;
  const uint4 packed[2] = {__ldcg(left), __ldcg(left + chunks)};
  float gate[8], up[8];
  unpack(packed[0], gate);
  unpack(packed[1], up);
#pragma unroll
  for (int i = 0; i < 8; i++) gate[i] = __fdividef(gate[i], 1.0f + __expf(-gate[i]));
  unpack(pack(gate), gate);
#pragma unroll
  for (int i = 0; i < 8; i++) gate[i] *= up[i];
  y[at] = pack(gate);
}

// Both halves of 8 pairs: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), each product and sum rounded, as in eager torch.
__device__ __forceinline__ void rotate_pairs(uint4& first, uint4& second, const float (&cosine)[8], const float (&sine)[8]) {
  float x1[8], x2[8], a[8], b[8];
  unpack(first, x1);
  unpack(second, x2);
#pragma unroll
  for (int i = 0; i < 8; i++) a[i] = x1[i] * cosine[i], b[i] = x2[i] * sine[i];
  unpack(pack(a), a);
  unpack(pack(b), b);
#pragma unroll
  for (int i = 0; i < 8; i++) a[i] -= b[i];
  first = pack(a);
#pragma unroll
  for (int i = 0; i < 8; i++) a[i] = x2[i] * cosine[i], b[i] = x1[i] * sine[i];
  unpack(pack(a), a);
  unpack(pack(b), b);
#pragma unroll
  for (int i = 0; i < 8; i++) a[i] += b[i];
  second = pack(a);
}

// RMSNorm of a head, 16 columns of which are this thread's; the other threads are `half` beside it, a power of two.
__device__ __forceinline__ void normalize_head(uint4& first, uint4& second, const uint4 (&weight)[2][1 + WIDE], int half,
                                               float epsilon) {
  float x1[8], x2[8], squares = 0;
  unpack(first, x1);
  unpack(second, x2);
#pragma unroll
  for (int i = 0; i < 8; i++) squares += x1[i] * x1[i] + x2[i] * x2[i];
  // Threads of other heads may have left the loop.
  const u32 mask = half == 32 ? ~0u : ((1u << half) - 1) << (threadIdx.x % 32 / half * half);
  for (int i = half / 2; i > 0; i /= 2) squares += __shfl_xor_sync(mask, squares, i);
  const float scale = rsqrtf(squares / (16 * half) + epsilon);
  normalize(x1, scale, weight[0]);
  normalize(x2, scale, weight[1]);
  first = pack(x1), second = pack(x2);
}

// A token a block. Sizes and strides count 8 columns; table: cosines, then sines, of each position. No kernel of a graph
// writes weights, positions and table, so they are read before the inputs are there; positions, which are others in each
// run of the graph, from L2.
extern "C" __global__ void __launch_bounds__(THREADS)
rotate(const uint4* q, const uint4* k, const uint4* table, const long long* positions, uint4* q_out, uint4* k_out,
       int half, int q_heads, int k_heads, int q_stride, int k_stride, const uint4* q_weight, const uint4* k_weight,
       float epsilon) {
  start_next();
  const int column = threadIdx.x % half, token = blockIdx.x;
  const uint4* of_position = table + __ldcg(positions + token) * 2 * half + column;
  float cosine[8], sine[8];
  unpack(of_position[0], cosine);
  unpack(of_position[half], sine);
#if NORMS
  uint4 of_q[2][1 + WIDE], of_k[2][1 + WIDE];
#pragma unroll
  for (int part = 0; part < 2; part++)
#pragma unroll
    for (int i = 0; i <= WIDE; i++) {
      const int place = (part * half + column) * (1 + WIDE) + i;
      of_q[part][i] = q_weight[place], of_k[part][i] = k_weight[place];
    }
#endif
  await_inputs();
  for (int head = threadIdx.x / half; head < q_heads + k_heads; head += THREADS / half) {
    const bool is_q = head < q_heads;
    const int at = (is_q ? head : head - q_heads) * 2 * half + column;
    const uint4* from = is_q ? q + (size_t)token * q_stride + at : k + (size_t)token * k_stride + at;
    uint4* to = is_q ? q_out + (size_t)token * q_heads * 2 * half + at : k_out + (size_t)token * k_heads * 2 * half + at;
    uint4 first = __ldcg(from), second = __ldcg(from + half);
#if NORMS
    uint4 weight[2][1 + WIDE];
#pragma unroll
    for (int part = 0; part < 2; part++)
#pragma unroll
      for (int i = 0; i <= WIDE; i++) weight[part][i] = is_q ? of_q[part][i] : of_k[part][i];
    normalize_head(first, second, weight, half, epsilon);
#endif
    rotate_pairs(first, second, cosine, sine);
    to[0] = first, to[half] = second;
  }
}
