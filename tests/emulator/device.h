// What a kernel's C++ sees of the emulated GPU: the built-ins of CUDA, and a function for each PTX instruction that
// instructions.txt names. The hardware itself is in schedule.cpp, grids.cpp, memory.cpp and tensor_core.cpp.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

namespace emu {

struct Index {
  unsigned x, y, z;
};

// The thread that runs, as far as a kernel may look at it.
struct Thread {
  Index thread, block, grid, dim;
};
extern Thread* self;

// Blocks of the scheduler.
void bar_sync(int id, int count);  // count 0: all threads of the block
void sync_warp();
void cluster_arrive();
void cluster_wait();
void launch_dependents();
void await_grids();
unsigned long long exchange(unsigned long long value, int from_lane, const char* what);  // among the lanes of a warp
void may_yield();
void poll();

// Shared memory, by 32-bit addresses; the upper 8 bits are 1 + the rank in the cluster, or 0 for this block.
uint32_t to_shared(const void* pointer);
void* static_shared(int site, size_t bytes);
void* dynamic_shared();
void load(void* to, uint32_t at, int bytes);
void store(uint32_t at, const void* from, int bytes);
uint32_t map_to_rank(uint32_t at, uint32_t rank);
void fence_proxy();

void barrier_init(uint32_t at, uint32_t count);
void barrier_arrive(uint32_t at, uint32_t bytes);
void barrier_wait(uint32_t at, uint32_t parity);
void copy_2d(uint32_t to, const void* map, int column, int row, uint32_t barrier, unsigned mask);

void load_turned(uint32_t* const (&to)[4], uint32_t at);
void multiply_warp(float* const (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void multiply_group(float* d, const uint32_t* a, unsigned long long left, unsigned long long descriptor, int columns);
void group_fence();
void group_commit();
void group_wait(int left);

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float wide(uint32_t bf16) { return as_float(bf16 << 16); }
inline uint16_t narrow(float value) {  // to nearest even
  uint32_t bits = as_bits(value);
  if (value != value) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// ---- PTX, in the order in which an instruction names its operands ----

inline void mul_bf16x2(uint32_t& out, uint32_t a, uint32_t b) {
  out = narrow(wide(a & 0xFFFF) * wide(b & 0xFFFF)) | (uint32_t)narrow(wide(a >> 16) * wide(b >> 16)) << 16;
}
inline void spread_halves(uint32_t pair, uint32_t& low, uint32_t& high) {
  low = (pair & 0xFFFF) * 0x10001u, high = (pair >> 16) * 0x10001u;
}
inline void cvt_bf16(uint16_t& out, float value) { out = narrow(value); }

template <class... T>
void load_vector(uint32_t at, T&... to) {
  constexpr int bytes = sizeof(std::tuple_element_t<0, std::tuple<T...>>), count = sizeof...(T);
  unsigned char room[bytes * count];
  load(room, at, bytes * count);
  int i = 0;
  (std::memcpy(&to, room + bytes * i++, bytes), ...);
}
inline void ld_shared_v4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t at) { load_vector(at, a, b, c, d); }
inline void ld_shared_v2(uint32_t& a, uint32_t& b, uint32_t at) { load_vector(at, a, b); }
inline void ld_shared_u32(uint32_t& a, uint32_t at) { load_vector(at, a); }
inline void ld_shared_u16(uint32_t& a, uint32_t at) {  // a narrow load fills a wide register with zeros
  uint16_t half;
  load(&half, at, 2);
  a = half;
}
inline void st_shared_v4(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t all[4] = {a, b, c, d};
  store(at, all, 16);
}
inline void st_shared_v2(uint32_t at, uint32_t a, uint32_t b) {
  const uint32_t both[2] = {a, b};
  store(at, both, 8);
}
inline void st_shared_u32(uint32_t at, uint32_t a) { store(at, &a, 4); }
inline void st_shared_u16(uint32_t at, uint16_t a) { store(at, &a, 2); }
inline void st_shared_f32(uint32_t at, float a) { store(at, &a, 4); }
inline void ld_rank_f32(uint32_t at, uint32_t rank, float& value) { load_vector(map_to_rank(at, rank), value); }
inline void ld_rank_v4_f32(uint32_t at, uint32_t rank, float& a, float& b, float& c, float& d) {
  load_vector(map_to_rank(at, rank), a, b, c, d);
}
inline void arrive_at_rank(uint32_t at, uint32_t rank) { barrier_arrive(map_to_rank(at, rank), 0); }
inline void mapa(uint32_t& out, uint32_t at, uint32_t rank) { out = map_to_rank(at, rank); }
inline void arrive(uint32_t at) { barrier_arrive(at, 0); }

// The policy of L2 changes nothing here.
inline void copy_block(uint32_t to, const void* map, int column, int row, uint32_t barrier, unsigned long long) {
  copy_2d(to, map, column, row, barrier, 0);
}
inline void multicast(uint32_t to, const void* map, int column, int row, uint32_t barrier, uint16_t blocks,
                      unsigned long long) {
  copy_2d(to, map, column, row, barrier, blocks);
}
inline void create_policy(unsigned long long& policy) { policy = 0; }

inline void mma_16_8_16(float& c0, float& c1, float& c2, float& c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                        uint32_t b0, uint32_t b1, float&, float&, float&, float&) {
  multiply_warp({&c0, &c1, &c2, &c3}, {a0, a1, a2, a3}, {b0, b1});
}

inline void ldmatrix_trans(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t at) {
  load_turned({&a, &b, &c, &d}, at);
}

inline void red_release_add(void* at, int by) { may_yield(), *(int*)at += by, may_yield(); }
inline void ld_acquire(int& to, const void* at) { poll(), to = *(const int*)at; }
inline void st_release(void* at, int value) { may_yield(), *(int*)at = value, may_yield(); }
inline void prefetch(const void*) {}
inline void no_effect(...) {}

// ---- a kernel as the launch sees it ----

template <class F>
struct Bound;
template <class... A>
struct Bound<void (*)(A...)> {
  using Values = std::tuple<std::remove_cv_t<A>...>;
  template <size_t... I>
  static void* copy(void** arguments, std::index_sequence<I...>) {
    return new Values(*(std::remove_cv_t<A>*)arguments[I]...);
  }
  static void* bind(void** arguments) { return copy(arguments, std::index_sequence_for<A...>()); }
  static void drop(void* values) { delete (Values*)values; }
  template <void (*kernel)(A...)>
  static void run(void* values) {
    std::apply(kernel, *(Values*)values);
  }
};

struct Code {
  void* (*bind)(void**);
  void (*run)(void*);
  void (*drop)(void*);
};

}  // namespace emu

#define EMU_KERNEL(name)                                                                                    \
  extern "C" emu::Code code_of_##name() {                                                                   \
    using Of = emu::Bound<decltype(&name)>;                                                                 \
    return {Of::bind, Of::run<name>, Of::drop};                                                             \
  }

// ---- CUDA ----

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define threadIdx (emu::self->thread)
#define blockIdx (emu::self->block)
#define gridDim (emu::self->grid)
#define blockDim (emu::self->dim)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class A, class B>
constexpr auto min(A a, B b) { return a < b ? a : b; }
template <class A, class B>
constexpr auto max(A a, B b) { return a > b ? a : b; }

inline size_t __cvta_generic_to_shared(const void* pointer) { return emu::to_shared(pointer); }
inline void __syncthreads() { emu::bar_sync(0, 0); }
inline void __syncwarp() { emu::sync_warp(); }
inline void __threadfence() { emu::may_yield(); }
template <class T>
T __ldg(const T* at) { return *at; }
template <class T>
T __ldcg(const T* at) { return *at; }
template <class T>
void __stcg(T* at, T value) { *at = value; }
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = emu::exchange(bits, lane, "__shfl_sync");
  std::memcpy(&value, &bits, 4);
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with) { return __shfl_sync(mask, value, threadIdx.x % 32 ^ with); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = a | (unsigned long long)b << 32;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned nibble = selector >> 4 * i & 15, byte = both >> 8 * (nibble & 7) & 0xFF;
    out |= (nibble & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << 8 * i;
  }
  return out;
}
inline float __uint_as_float(unsigned bits) { return emu::as_float(bits); }
inline unsigned __float_as_uint(float value) { return emu::as_bits(value); }
inline unsigned atomicInc(unsigned* at, unsigned limit) {
  emu::may_yield();
  const unsigned old = *(volatile unsigned*)at;
  *(volatile unsigned*)at = old >= limit ? 0 : old + 1;
  emu::may_yield();
  return old;
}
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
