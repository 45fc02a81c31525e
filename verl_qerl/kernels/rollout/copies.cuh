// Copies by the copy engine from matrices in global memory to shared memory, and the barriers that count their bytes.

typedef unsigned long long u64;
typedef unsigned char u8;

struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ void init_barrier(u32 at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count));
}

__device__ __forceinline__ void arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// The same at the same place of another block of the cluster.
__device__ __forceinline__ void arrive_at(u32 at, u32 rank) {
  asm volatile(
      "{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(at),
      "r"(rank)
      : "memory");
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
