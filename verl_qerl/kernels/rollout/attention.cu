// One new token of each sequence attends to what a paged cache holds of it, and its key and value go into the cache.
//
// Compiled for HEAD (columns of a head: 64, 128), GROUP (heads of q on one of k and v, up to 8), WARPS and STAGES. The
// cache is read in chunks of 16 tokens of one head. Chunks of all sequences are laid end to end, and every block gets an
// equal share of them, whatever the lengths (as stream-K does with steps); its warps take turns, each with a ring buffer of
// its own. Partial results of one head of one sequence are added in shared memory, and where they cross blocks by the last
// of them, in a fixed order.
//
// Until await_inputs only what the kernels of a graph do not write is read: lengths, tables and the cache. The row that
// this kernel writes may hold anything; the new token takes its place.

#define VECTORS (HEAD / 8)      // of 16 bytes, in a row of a head
#define PITCH (HEAD + 4)        // floats between rows of sums: no two lanes in one bank
#define PART (8 * (HEAD + 2))   // floats of a part: sums, then largest scores, then totals
#define LAID (8 * (PITCH + 2))  // the same in shared memory
#define NONE (-1e30f)           // no score, as an exponent: finite, so that it may be subtracted from itself

__device__ __forceinline__ void load_four(u32 (&to)[4], u32 at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at));
}

__device__ __forceinline__ void store_four(u32 at, const uint4& from) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(from.x), "r"(from.y), "r"(from.z), "r"(from.w)
               : "memory");
}

// Four 8 x 8 matrices, whose rows of 16 bytes the lanes name in turn, turned over.
__device__ __forceinline__ void load_turned(u32 (&to)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

struct New {
  const uint4 *k, *v;
  uint4* cache;
  const long long* slots;
  int k_stride, v_stride, page, heads;  // strides in 16 bytes, a page in tokens
};

// The new token is the last one of its chunk: it takes its row of the stage, and of the cache. Rows after it hold anything,
// and zero times a NaN is one.
__device__ __forceinline__ void put_new(u32 stage, const New& fresh, const Place& p, int row, int lane) {
  const long long slot = __ldcg(fresh.slots + p.sequence);
  if (lane < 2 * VECTORS) {
    const int kind = lane / VECTORS, vector = lane % VECTORS;
    const uint4* from = kind ? fresh.v + (size_t)p.sequence * fresh.v_stride : fresh.k + (size_t)p.sequence * fresh.k_stride;
    const uint4 own = __ldcg(from + p.head * VECTORS + vector);
    store_four(place_in(stage + kind * HALVES * BOX_BYTES, row, vector), own);
    const size_t to = (slot / fresh.page * 2 + kind) * fresh.page + slot % fresh.page;
    if (slot >= 0) fresh.cache[(to * fresh.heads + p.head) * VECTORS + vector] = own;
  }
  for (int i = (row + 1) * VECTORS + lane; i < CHUNK * VECTORS; i += 32) {
    store_four(place_in(stage + HALVES * BOX_BYTES, i / VECTORS, i % VECTORS), uint4{});
  }
  __syncwarp();
}

// What a warp knows of its part of one head of one sequence. Scores are in units of log 2.
struct Sums {
  float o[HEAD / 16][4];  // columns lane / 4 and 8 further of 16, of the heads of q lane % 4 * 2 and the next
  float largest, total;   // of the head lane / 4; of the total this lane's part
};

// q: 16 bytes of the head lane / 4 at a time, those that the lane reads of a key. `valid` tokens of the chunk count.
__device__ __forceinline__ void attend(Sums& sums, const uint4 (&q)[HALVES][2], u32 stage, int valid, float scale, int lane) {
  float score[2][4] = {};
#pragma unroll
  for (int i = 0; i < HALVES * 4; i++) {
    const int n = i % 2, half = i / 4, step = i / 2 % 2;
    u32 key[4];
    load_four(key, place_in(stage, n * 8 + lane / 4, half * 8 + lane % 4 * 2 + step));
    multiply_add(score[n], q[half][step].x, 0, q[half][step].y, 0, key[0], key[1]);
    multiply_add(score[n], q[half][step].z, 0, q[half][step].w, 0, key[2], key[3]);
  }
  float largest = sums.largest;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const bool counts = i / 2 * 8 + lane % 4 * 2 + i % 2 < valid;
    score[i / 2][i % 2] = counts ? score[i / 2][i % 2] * scale : NONE;
    largest = max(largest, score[i / 2][i % 2]);
  }
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
  const float factor = exp2f(sums.largest - largest);
  sums.largest = largest, sums.total *= factor;
#pragma unroll
  for (int i = 0; i < 4; i++) sums.total += score[i / 2][i % 2] = exp2f(score[i / 2][i % 2] - largest);
  const u32 weights[2] = {pack_two(score[0][0], score[0][1]), pack_two(score[1][0], score[1][1])};
  const float factors[2] = {__shfl_sync(~0u, factor, lane % 4 * 8), __shfl_sync(~0u, factor, lane % 4 * 8 + 4)};
  const int token = lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int tile = 0; tile < HEAD / 16; tile++) {
    u32 value[4];
    load_turned(value, place_in(stage + HALVES * BOX_BYTES, token, tile * 2 + lane / 8 % 2));
#pragma unroll
    for (int i = 0; i < 4; i++) sums.o[tile][i] *= factors[i % 2];
    multiply_add(sums.o[tile], value[0], value[1], value[2], value[3], weights[0], weights[1]);
  }
}

// Eight columns of a head of q, of a sum of parts.
struct Vector {
  float sum[8], largest, total;
  __device__ __forceinline__ void add(const float4& low, const float4& high, float its_largest, float its_total) {
    const float both = max(largest, its_largest), old = exp2f(largest - both), its = exp2f(its_largest - both);
    const float next[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = sum[i] * old + next[i] * its;
    largest = both, total = total * old + its_total * its;
  }
  __device__ __forceinline__ uint4 mean() const {
    float scaled[8];
    const float over = 1.0f / total;
#pragma unroll
    for (int i = 0; i < 8; i++) scaled[i] = sum[i] * over;
    return pack(scaled);
  }
};

// The sums of all warps, to shared memory, as one part each.
__device__ __forceinline__ void lay_down(const Sums& sums, float* part, int lane) {
  float total = sums.total + __shfl_xor_sync(~0u, sums.total, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  if (lane % 4 == 0) part[8 * PITCH + lane / 4] = sums.largest, part[8 * PITCH + 8 + lane / 4] = total;
#pragma unroll
  for (int i = 0; i < HEAD / 4; i++) {
    const int column = i / 4 * 16 + lane / 4 + i % 4 / 2 * 8, head = lane % 4 * 2 + i % 2;
    part[head * PITCH + column] = sums.o[i / 4][i % 4];
  }
}

// A block has two parts at most that others complete: that with which its share begins, and that with which it ends.
__device__ __forceinline__ float* part_of(float* parts, const Shares& shares, int block, int first) {
  return parts + (size_t)(2 * block + (shares.start(block) < first)) * PART;
}

// The sums of a part of the row [first, end) of one head of one sequence: to y when they are all, or the last ones.
__device__ __forceinline__ void give(const float* laid, uint4* y, float* parts, unsigned* counters, const Shares& shares,
                                     int first, int end) {
  __shared__ int last[1];
  const int from = shares.owner(first), to = shares.owner(end - 1);
  for (int i = threadIdx.x; i < GROUP * VECTORS; i += THREADS) {
    const int head = i / VECTORS, column = i % VECTORS * 8;
    Vector vector = {{}, NONE, 0};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float* part = laid + w * LAID;
      const float4* four = reinterpret_cast<const float4*>(part + head * PITCH + column);
      vector.add(four[0], four[1], part[8 * PITCH + head], part[8 * PITCH + 8 + head]);
    }
    if (from == to) {
      y[i] = vector.mean();
      continue;
    }
    float* part = part_of(parts, shares, blockIdx.x, first);
#pragma unroll
    for (int j = 0; j < 8; j++) part[head * HEAD + column + j] = vector.sum[j];
    if (column == 0) part[8 * HEAD + head] = vector.largest, part[8 * HEAD + 8 + head] = vector.total;
  }
  if (from == to) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last[0] = atomicInc(counters + from, to - from) == to - from;
  __syncthreads();
  if (!last[0]) return;
  __threadfence();
  for (int i = threadIdx.x; i < GROUP * VECTORS; i += THREADS) {
    const int head = i / VECTORS, column = i % VECTORS * 8;
    Vector vector = {{}, NONE, 0};
#pragma unroll 4
    for (int block = from; block <= to; block++) {
      const float* part = part_of(parts, shares, block, first);
      const float4* four = reinterpret_cast<const float4*>(part + head * HEAD + column);
      vector.add(__ldcg(four), __ldcg(four + 1), __ldcg(part + 8 * HEAD + head), __ldcg(part + 8 * HEAD + 8 + head));
    }
    y[i] = vector.mean();
  }
}

// q, k, v and y are in 16 bytes; y is contiguous, the others have strides. Rows of y of sequences without tokens are zero.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
attention(const __grid_constant__ TensorMap cache, const uint4* q, const uint4* k, const uint4* v, uint4* cache_rows,
          const int* lengths, const int* tables, const long long* slots, uint4* y, float* parts, unsigned* counters,
          int sequences, int heads, int table_stride, int page, int q_stride,
          int k_stride, int v_stride, int least, float scale) {
  extern __shared__ u8 dynamic[];
  start_next();
  const u32 base = static_cast<u32>(__cvta_generic_to_shared(dynamic)), ring = (base + 1023) & ~1023u;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 barriers = ring + WARPS * STAGES * STAGE_BYTES, full = barriers + warp * STAGES * 8;
  float* laid = reinterpret_cast<float*>(dynamic + (barriers - base) + WARPS * STAGES * 8);
  int* ends = reinterpret_cast<int*>(laid + WARPS * LAID);
  if (threadIdx.x < WARPS * STAGES) init_barrier(barriers + threadIdx.x * 8, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  add_up(lengths, sequences, ends);
  const Lengths all = {ends, sequences, heads};
  const Cache pages = {tables, table_stride, page};
  const int total = all.total();
  const Shares shares = {total, max(1, min((int)gridDim.x, total / least))};
  const bool has_share = total > 0 && blockIdx.x < shares.blocks;
  int at = has_share ? shares.start(blockIdx.x) : 0;
  const int to = has_share ? shares.start(blockIdx.x + 1) : 0;
  const u32 own = ring + warp * STAGES * STAGE_BYTES;
  // Of this warp: the chunk that is multiplied next, the one that is filled next, and the row of the latter.
  int mine = at + warp, next = mine, row = 0;
  Place filled = {};
  if (next < to) filled = all.find(next), row = pages.row(filled);
  auto fill_next = [&](int stage) {
    if (next >= to) return;
    if (lane == 0) fill(own + stage * STAGE_BYTES, full + stage * 8, cache, row, page, filled.head);
    next += WARPS;
    if (next < to) all.advance(filled, WARPS), row = pages.row(filled);
  };
  for (int stage = 0; stage < STAGES; stage++) fill_next(stage);
  await_inputs();
  for (int s = blockIdx.x; s < sequences; s += gridDim.x) {
    const int vectors = heads * GROUP * VECTORS;
    for (int i = threadIdx.x; i < vectors && all.count(s) == 0; i += THREADS) y[(size_t)s * vectors + i] = uint4{};
  }
  const New fresh = {k, v, cache_rows, slots, k_stride, v_stride, page, heads};
  int stage = 0;
  u32 parity = 0;
  Place item = {};
  if (at < to) item = all.find(at);
  while (at < to) {
    const int first = at - item.chunk, count = min(to - at, item.count - item.chunk);
    const int length = __ldcg(lengths + item.sequence);
    const size_t place = ((size_t)item.sequence * heads + item.head) * GROUP * VECTORS;
    uint4 query[HALVES][2];
#pragma unroll
    for (int i = 0; i < HALVES * 2; i++) {
      const uint4* from = q + (size_t)item.sequence * q_stride + (item.head * GROUP + lane / 4) * VECTORS;
      query[i / 2][i % 2] = lane / 4 < GROUP ? __ldcg(from + i / 2 * 8 + lane % 4 * 2 + i % 2) : uint4{};
    }
    Sums sums = {{}, NONE, 0};
    for (; mine < at + count; mine += WARPS) {
      const u32 held = own + stage * STAGE_BYTES;
      const Place p = {item.sequence, item.head, item.chunk + mine - at, item.count};
      const int valid = length - p.chunk * CHUNK;
      wait_for(full + stage * 8, parity);
      if (valid <= CHUNK) put_new(held, fresh, p, valid - 1, lane);
      attend(sums, query, held, valid, scale, lane);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what put_new wrote is overwritten
      __syncwarp();
      fill_next(stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __syncthreads();  // what was laid down before has been read
    lay_down(sums, laid + warp * LAID, lane);
    __syncthreads();
    give(laid, y + place, parts, counters, shares, first, first + item.count);
    at += count;
    if (at < to) all.advance(item, count);
  }
}
