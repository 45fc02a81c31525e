// A ring buffer in shared memory, filled 64 of K at a time: codes and scales by one producer lane, x by another, in the
// swizzle that wgmma reads. Consumers signal each stage that they have read.

#define COLUMNS (64 * WARP_TILES * WARPGROUPS)
#define WORKERS (WARPGROUPS * 128)  // consumer threads
#define X_BYTES (TOKENS * 128)
#define X_ROWS (TOKENS / MULTICAST)  // that a copy brings
#define WORD_BYTES (4 * COLUMNS * 8)
#define SCALE_BYTES (4 * COLUMNS)
#define PITCH (COLUMNS + 4)  // floats between rows of the sums in shared memory: no two lanes in one bank
#define SUM_BYTES (STREAM_K ? 0 : TOKENS * PITCH * 4)  // of the sums, which take the place of what the ring held
#define OUT_PITCH (COLUMNS + 8)  // the same for y in bf16, OUT_TOKENS rows at a time, a part of TOKENS

__device__ __forceinline__ void join_workers() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

// A stage of the ring may be filled again, by all blocks that fill it.
__device__ __forceinline__ void release(u32 empty) {
  if (MULTICAST == 1) arrive(empty);
  for (u32 rank = 0; MULTICAST > 1 && rank < MULTICAST; rank++) arrive_at(empty, rank);
}

// The same to this address of both blocks of the cluster, each of which has its own barrier at `barrier`.
__device__ __forceinline__ void copy_to_both(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], "
      "[%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((u16)3), "l"(policy)
      : "memory");
}

// Where things lie in shared memory; the same in every block of a cluster.
struct Places {
  u32 x, low, a, words, scales, full, empty, low_ready, out;
};

// Where a ring stands, the same for those who fill it and those who read it.
struct Ring {
  int stages, slot;
  u32 parity;
  __device__ __forceinline__ void advance() {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

// Before the next stage is filled: all have read what it held, if anything.
__device__ __forceinline__ void await_free(const Places& at, const Ring& ring, int& filled) {
  if (filled++ >= ring.stages) wait_for(at.empty + ring.slot * 8, ring.parity);
}

// Steps of K of one block of columns, and of TOKENS rows of x.
struct Segment {
  int column, row, first, count;
};

// Of a share [from, to) of all steps, the part that belongs to the tile of y of its first one. Tiles of the same columns
// follow each other, so that w comes from L2 for all but the first.
__device__ __forceinline__ Segment segment_at(int from, int to, int steps, int row_tiles) {
  const int tile = from / steps, first = from - tile * steps, columns = tile / row_tiles;
  return {(columns * MULTICAST + (int)blockIdx.x % MULTICAST) * COLUMNS, tile % row_tiles * TOKENS, first,
          min(steps - first, to - from)};
}

// Which entries of the LoRA intermediate belong to columns, and the stages of the ring that they take: one for all
// warpgroups, if the columns of this block (and of the other of a multicast cluster) are of one member, else one for each.
struct Members {
  const int* of_entry;
  int rank, per_entry, N;
  __device__ __forceinline__ int chunks() const { return (rank + 63) / 64; }  // of low, a stage each
  __device__ __forceinline__ int at(int column) const { return __ldg(of_entry + min(column, N - 1) / per_entry); }
  __device__ __forceinline__ int stages(int column) const {
    const int from = column / (COLUMNS * MULTICAST) * (COLUMNS * MULTICAST);
    return at(from) == at(from + COLUMNS * MULTICAST - 1) ? 1 : WARPGROUPS;
  }
};

// Stages of a segment that hold the LoRA intermediate, not x: the last ones, if it begins with its columns' first step.
__device__ __forceinline__ int low_stages(const Members& of, const Segment& segment) {
  return GIVEN && of.rank && segment.first == 0 ? of.stages(segment.column) * of.chunks() : 0;
}

// One lane fills the ring with codes and scales, and with `rows` rows of a where EACH block makes low.
__device__ __forceinline__ void fill_weight(const Places& at, const TensorMap& words, const TensorMap& scales,
                                            const TensorMap& a, int rows, const Members& members, const Segment& segment,
                                            Ring& ring, int& filled) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#if EACH
  u64 keep;  // all blocks read the same
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  const int first_row = members.at(segment.column) * members.rank;
#endif
#pragma unroll 1
  for (int step = segment.first; step < segment.first + segment.count; step++) {
    await_free(at, ring, filled);
    const u32 full = at.full + ring.slot * 8;
    expect(full, WORD_BYTES + SCALE_BYTES + (EACH ? rows * 128 : 0));
#if EACH
    copy_block(at.a + ring.slot * rows * 128, a, step * 64, first_row, full, keep);
#endif
#pragma unroll
    for (int part = 0; part < COLUMNS / BOX; part++) {
      const int n = segment.column + part * BOX;
      copy_block(at.words + ring.slot * WORD_BYTES + part * (BOX * 32), words, n, step * 4, full, policy);
      copy_block(at.scales + ring.slot * SCALE_BYTES + part * (BOX * 4), scales, n, step * 4, full, policy);
    }
    ring.advance();
  }
  for (int i = low_stages(members, segment); i > 0; i--) {
    await_free(at, ring, filled);
    arrive(at.full + ring.slot * 8);
    ring.advance();
  }
}

// One lane fills the ring with x, and with low = x a^T of the members where it is given; the tensor maps swizzle, and rows
// beyond the last one are zero.
__device__ __forceinline__ void fill_x(const Places& at, const TensorMap& x, const TensorMap& low, const Members& members,
                                       const Segment& segment, Ring& ring, int& filled) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#pragma unroll 1
  for (int step = segment.first; step < segment.first + segment.count; step++) {
    await_free(at, ring, filled);
    const u32 full = at.full + ring.slot * 8;
    expect(full, X_BYTES);
    const u32 to = at.x + ring.slot * X_BYTES;
#if MULTICAST > 1
    const int row = blockIdx.x % MULTICAST * X_ROWS;
    copy_to_both(to + row * 128, x, step * 64, segment.row + row, full, policy);
#else
    copy_block(to, x, step * 64, segment.row, full, policy);
#endif
    ring.advance();
  }
  const int chunks = members.chunks(), count = low_stages(members, segment);
  for (int i = 0; i < count; i++) {
    await_free(at, ring, filled);
    const int first = members.at(segment.column + i / chunks * 64 * WARP_TILES) * members.rank + i % chunks * 64;
    const u32 full = at.full + ring.slot * 8;
    expect(full, X_BYTES);
    for (int row = 0; row < TOKENS; row += X_ROWS) {
      copy_block(at.x + ring.slot * X_BYTES + row * 128, low, first, segment.row + row, full, policy);
    }
    ring.advance();
  }
}
