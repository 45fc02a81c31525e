// Products by one warp: m16n8k16 in bf16, sums in float32.

__device__ __forceinline__ void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// sum += 16 rows of x times 8 rows of each a, 32 of K. Which of 32 elements of K is which in a product does not matter
// while both operands agree: so a lane reads 16 bytes at a time. No __ldg for x, which is written while a kernel starts.
template <int COUNT>
__device__ __forceinline__ void multiply_chunk(float (&sum)[COUNT][4], const uint4* x, const uint4* x_8,
                                               const uint4* const (&a)[COUNT], int chunk) {
  const uint4 left = __ldcg(x + chunk * 4), right = __ldcg(x_8 + chunk * 4);
#pragma unroll
  for (int t = 0; t < COUNT; t++) {
    const uint4 other = __ldg(a[t] + chunk * 4);
    multiply_add(sum[t], left.x, right.x, left.y, right.y, other.x, other.y);
    multiply_add(sum[t], left.z, right.z, left.w, right.w, other.z, other.w);
  }
}
