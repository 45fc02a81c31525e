// The four registers of a left operand of m16n8k16 (or of a warp's part of wgmma), in bf16, from one word of codes in
// the layout of kernels/rollout/repacking.py; shared by the kernels that multiply by 4-bit weights.
//
// Exactness: a code moved to the low exponent bits of a bf16 is its value times 2^-126, a block scale with 238 added to
// its exponent is its value times 2^118, and their product, six significant bits, is exact. What is decoded is the weight
// over its global scale, times 2^-8.

typedef unsigned int u32;
typedef unsigned short u16;

// Factors as arguments of the kernel: a product runs beside the masks, shifts by a constant would compete with them. There
// are as few masks as the layout of kernels/rollout/repacking.py allows: they, not memory, are what few rows wait for.
struct Factors {
  u32 scale;   // 2^4
  u32 second;  // 2^3: so far right of their place the second codes of a word lie
  u32 third;   // 2^6
  u32 fourth;  // 2^10 + 2^5 + 1: bits 6, 5, 3 and 2 to 6, 15, 8 and 7, without a carry
};

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// The four pairs of a word, times 2^-126, are what `mask` selects: sign in bit 15 of each half, exponent and mantissa in
// bits 8..6. bytes: block scales in E4M3, of rows r and r + 8 in the low half (which = 0) or the high half (which = 1).
__device__ __forceinline__ void decode(u32 word, u32 bytes, int which, const Factors& f, u32 (&a)[4]) {
  const u32 mask = 0x81C081C0u;
  u32 pair = __byte_perm(bytes, 0, which ? 0x4342 : 0x4140) * f.scale + 0x77007700u;
  u32 scale, scale_8;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; mov.b32 %0, {low, low}; mov.b32 %1, {high, high};}"
      : "=r"(scale), "=r"(scale_8)
      : "r"(pair));
  a[0] = multiply(word & mask, scale);
  a[1] = multiply((word & mask >> 3) * f.second, scale_8);
  a[2] = multiply((word & mask >> 6) * f.third, scale);
  a[3] = multiply(((word >> 8 & 0x006C006Cu) * f.fourth) & mask, scale_8);
}

__device__ __forceinline__ u16 to_bf16(float value) {
  u16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
}

__device__ __forceinline__ u32 pack_two(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }

__device__ __forceinline__ uint4 pack(const float (&from)[8]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = pack_two(from[i * 2], from[i * 2 + 1]);
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

// Of low = x a^T: rounded where PEFT rounds, and over what the sums are multiplied by at the end; that factor is exact.
__device__ __forceinline__ u16 round_low(float sum, float over) { return to_bf16(from_bf16(to_bf16(sum)) * over); }

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
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
