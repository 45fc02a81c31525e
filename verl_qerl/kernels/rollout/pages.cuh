// A paged cache of keys and values in chunks of 16 tokens of one head: which of them a block reads, and how they come into
// shared memory.

#define CHUNK 16
#define HALVES (HEAD / 64)
#define BOX_BYTES (CHUNK * 128)  // of half a head
#define STAGE_BYTES (2 * HALVES * BOX_BYTES)
#define THREADS (WARPS * 32)

// A chunk of one head of one sequence, of `count`.
struct Place {
  int sequence, head, chunk, count;
};

struct Lengths {
  const int* ends;  // in chunks of a head, of this sequence and those before
  int sequences, heads;
  __device__ __forceinline__ int count(int s) const { return ends[s] - (s ? ends[s - 1] : 0); }
  __device__ __forceinline__ int total() const { return ends[sequences - 1] * heads; }
  // The chunk at a place of the row.
  __device__ __forceinline__ Place find(int at) const {
    int low = 0, high = sequences - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ends[middle] * heads > at) high = middle;
      else low = middle + 1;
    }
    const int own = count(low), within = at - (ends[low] - own) * heads;
    return {low, within / own, within % own, own};
  }
  // `by` chunks on; the row must hold that many.
  __device__ __forceinline__ void advance(Place& p, int by) const {
    p.chunk += by;
    while (p.chunk >= p.count) {
      p.chunk -= p.count;
      if (++p.head < heads) continue;
      p.head = 0;
      while (count(++p.sequence) == 0) {}
      p.count = count(p.sequence);
    }
  }
};

struct Cache {
  const int* tables;
  int table_stride, page;  // tokens
  // Of a chunk's keys, as a row of the cache's matrix; its values lie `page` rows further.
  __device__ __forceinline__ int row(const Place& p) const {
    const int chunks = page / CHUNK, block = __ldcg(tables + (size_t)p.sequence * table_stride + p.chunk / chunks);
    return block * 2 * page + p.chunk % chunks * CHUNK;
  }
};

// Which blocks have a share of the row: block b the part from share(b) to share(b + 1).
struct Shares {
  long long total, blocks;
  __device__ __forceinline__ int start(int block) const { return (int)(total * block / blocks); }
  __device__ __forceinline__ int owner(int at) const { return (int)(((at + 1LL) * blocks - 1) / total); }
};

// Chunks of every sequence, added up: `ends` of Lengths.
__device__ __forceinline__ void add_up(const int* lengths, int sequences, int* ends) {
  __shared__ int totals[WARPS];
  const int each = (sequences + THREADS - 1) / THREADS, first = threadIdx.x * each, lane = threadIdx.x % 32;
  int own = 0;
  for (int i = first; i < min(first + each, sequences); i++) {
    own += (__ldcg(lengths + i) + CHUNK - 1) / CHUNK;
    ends[i] = own;
  }
  int upto = own;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_sync(~0u, upto, max(lane - by, 0));
    if (lane >= by) upto += other;
  }
  if (lane == 31) totals[threadIdx.x / 32] = upto;
  __syncthreads();
  int before = upto - own;
#pragma unroll
  for (int w = 0; w < WARPS; w++) before += w < threadIdx.x / 32 ? totals[w] : 0;
  for (int i = first; i < min(first + each, sequences); i++) ends[i] += before;
  __syncthreads();
}

// Where 16 bytes of a token lie, by the swizzle of the copy engine.
__device__ __forceinline__ u32 place_in(u32 stage, int token, int vector) {
  return stage + vector / 8 * BOX_BYTES + token * 128 + ((vector % 8 ^ token % 8) << 4);
}

__device__ __forceinline__ void fill(u32 stage, u32 full, const TensorMap& cache, int row, int page, int head) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  expect(full, STAGE_BYTES);
#pragma unroll
  for (int i = 0; i < 2 * HALVES; i++) {
    const int kind = i / HALVES, half = i % HALVES;
    copy_block(stage + i * BOX_BYTES, cache, head * HEAD + half * 64, row + kind * page, full, policy);
  }
}
