// Eight columns of a row at a time, in the arithmetic of vLLM's and transformers' modules.
//
// Compiled for WIDE (a weight of the norm in float32).

__device__ __forceinline__ void unpack(const uint4& packed, float (&to)[8]) {
  const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 8; i++) to[i] = from_bf16(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xFFFF);
}

__device__ __forceinline__ uint4 pack(const float (&from)[8]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = to_bf16(from[i * 2]) | (u32)to_bf16(from[i * 2 + 1]) << 16;
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ float add_up_warp(float value) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) value += __shfl_xor_sync(~0u, value, i);
  return value;
}

// values = x + residual, and squares + their squares.
__device__ __forceinline__ void add_rows(const uint4& x, const uint4& residual, float (&values)[8], float& squares) {
  float other[8];
  unpack(x, values);
  unpack(residual, other);
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] += other[i], squares += values[i] * values[i];
}

__device__ __forceinline__ uint4 normalize(float (&values)[8], const uint4 (&weight)[1 + WIDE], float scale) {
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
  return pack(values);
}

// silu(left) right; silu is rounded before the product, as in eager torch.
__device__ __forceinline__ uint4 activate(const uint4& left, const uint4& right) {
  float gate[8], up[8];
  unpack(left, gate);
  unpack(right, up);
#pragma unroll
  for (int i = 0; i < 8; i++) gate[i] = __fdividef(gate[i], 1.0f + __expf(-gate[i]));
  unpack(pack(gate), gate);
#pragma unroll
  for (int i = 0; i < 8; i++) gate[i] *= up[i];
  return pack(gate);
}
