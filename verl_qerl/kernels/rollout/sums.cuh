// Epilogue: partial sums of thread blocks that share K are added in float32 and in a fixed order, then y is written
// through shared memory in whole rows.

#if STREAM_K

__device__ __forceinline__ int share_end(int total, int share) {
  return (int)((long long)total * (share + 1) / (gridDim.x / MULTICAST));
}

// A block gives at most one partial sum away, that with which its share begins. Blocks of a multicast cluster have the same
// share, and places of their own.
__device__ __forceinline__ int place_of(int share) { return share * MULTICAST + blockIdx.x % MULTICAST; }

__device__ __forceinline__ float4* part_of(float4* parts, int place) {
  return parts + (size_t)place * (WARP_TILES * TOKENS / 8 * WORKERS) + threadIdx.x;
}

__device__ __forceinline__ void give_sums(float4* parts, int* flags, int place, const float (&sum)[WARP_TILES][TOKENS / 2]) {
  float4* to = part_of(parts, place);
#pragma unroll
  for (int i = 0; i < WARP_TILES * TOKENS / 8; i++) {
    const float* four = sum[i / (TOKENS / 8)] + i % (TOKENS / 8) * 4;
    __stcg(to + i * WORKERS, make_float4(four[0], four[1], four[2], four[3]));
  }
  __threadfence();
  join_workers();
  if (threadIdx.x == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flags + place) : "memory");
}

__device__ __forceinline__ void take_sums(float4* parts, int* flags, int place, float (&sum)[WARP_TILES][TOKENS / 2]) {
  if (threadIdx.x == 0) {
    int there;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(flags + place) : "memory");
    } while (!there);
    flags[place] = 0;  // as the next launch wants to find it
  }
  join_workers();
  const float4* from = part_of(parts, place);
#pragma unroll
  for (int i = 0; i < WARP_TILES * TOKENS / 8; i++) {
    const float4 next = __ldcg(from + i * WORKERS);
    float* four = sum[i / (TOKENS / 8)] + i % (TOKENS / 8) * 4;
    four[0] += next.x, four[1] += next.y, four[2] += next.z, four[3] += next.w;
  }
}

// Through shared memory of its own, since the ring is being filled for the next columns.
__device__ __forceinline__ void write_tile(u32 out, u16* y, const u16* bias, float factor, int M, int N, int column,
                                           int unit, int lane, const float (&sum)[WARP_TILES][TOKENS / 2]) {
#pragma unroll
  for (int from = 0; from < TOKENS; from += OUT_TOKENS) {
    if (from > 0) join_workers();
#pragma unroll
    for (int i = 0; i < WARP_TILES * OUT_TOKENS / 2; i++) {
      const int p = i / (OUT_TOKENS / 2), j = i % (OUT_TOKENS / 2);
      const int token = j / 4 * 8 + lane % 4 * 2 + j % 2, n = (unit + p) * 16 + j % 4 / 2 * 8 + lane / 4;
      const float added = bias && column + n < N ? from_bf16(__ldg(bias + column + n)) : 0.0f;
      const u16 value = to_bf16(sum[p][from / 2 + j] * factor + added);
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(out + (token * OUT_PITCH + n) * 2), "h"(value) : "memory");
    }
    join_workers();
    for (int i = threadIdx.x; i < min(M - from, OUT_TOKENS) * (COLUMNS / 8); i += WORKERS) {
      const int token = i / (COLUMNS / 8), n = i % (COLUMNS / 8) * 8;
      if (column + n >= N) continue;
      uint4 eight;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                   : "r"(out + (token * OUT_PITCH + n) * 2));
      *reinterpret_cast<uint4*>(y + (size_t)(from + token) * N + column + n) = eight;
    }
  }
  join_workers();  // before the next columns are put there
}

#else

// Sums of this thread's lane to [TOKENS][PITCH] floats.
__device__ __forceinline__ void store_sums(u32 to, int unit, int lane, const float (&sum)[WARP_TILES][TOKENS / 2]) {
#pragma unroll
  for (int p = 0; p < WARP_TILES; p++) {
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

#endif
