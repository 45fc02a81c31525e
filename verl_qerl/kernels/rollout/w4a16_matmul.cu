// y[m, n] = sum_k x[m, k] w[n, k] + bias[n] + sum_r low[m, r] b[n, r] for TOKENS rows m at a time. w is packed as 4-bit
// codes (kernels/rollout/repacking.py); low = x a^T, the LoRA intermediate, is bf16.
//
// Compiled for TOKENS (8 to 256, a multiple of 8), WARP_TILES (1 or 2), WARPGROUPS, STREAM_K, GIVEN, EACH and
// MULTICAST. A thread block computes COLUMNS columns of y over a part of K. Two producer lanes fill the ring buffer of
// ring.cuh. The LoRA intermediate is computed meanwhile (low_rank.cuh, own_intermediate.cuh) or by the launch before
// (low_rank.cu), and is multiplied like further steps of K. WARPGROUPS consumer warpgroups decode the codes into
// registers, the left operand of wgmma: the 64 rows of one wgmma are 16 rows of w from each of its warps, with
// WARP_TILES wgmmas for each 16 of K. Decoding overlaps with the wgmmas of the step before.
//
// Work distribution. With STREAM_K the steps of all output tiles are laid end to end, and each block gets an equal share,
// in one launch that fills the GPU once; partial sums of a tile that another block finishes go through global memory.
// Otherwise it is split-K: a block has one part of K of its columns, and a cluster adds its partial sums through
// distributed shared memory. Either way sums are float32 and added in a fixed order.
//
// With MULTICAST (2, for STREAM_K alone) a cluster of two blocks walks the same steps side by side. Each has columns of
// its own and loads half of x into the shared memory of both: x is read from L2 once for twice the columns. A stage of
// their rings is free when both have read it.
//
// Programmatic dependent launch (grid.cuh): the lane that copies codes and scales starts while the kernels before this
// one still run, so that the ring is full of weights when x is there. The warps of the LoRA intermediate and of the
// products prefetch a and b into L2. Everything else waits for the inputs.

#if MULTICAST > 1 && !STREAM_K
#error "multicast is for stream-K"
#endif
#if EACH && (STREAM_K || GIVEN)
#error "a block that computes its own LoRA intermediate has one part of K and of the rows"
#endif

// WARP_TILES 32-bit words of packed codes and their scales, of one lane for one step of K.
struct Codes {
  u32 word[WARP_TILES];
  u32 scales;
};

__device__ __forceinline__ Codes load_codes(u32 words, u32 scales) {
  Codes codes;
#if WARP_TILES == 2
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(codes.word[0]), "=r"(codes.word[1]) : "r"(words));
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(codes.scales) : "r"(scales));
#else
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(codes.word[0]) : "r"(words));
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(codes.scales) : "r"(scales));
#endif
  return codes;
}

template <class Low>
__device__ __forceinline__ void multiply_stages(const Places& at, const Factors& f, int count, Ring& ring, int unit,
                                                int lane, float (&sum)[WARP_TILES][TOKENS / 2], Low& low) {
  const int tile = unit / 4;
  const u32 words = at.words + tile * 64 / BOX * (BOX * 32) + tile * 64 % BOX * 8 + lane * 16 + unit % 4 * 4;
  const u32 scales = at.scales + tile * 64 / BOX * (BOX * 4) + tile * 64 % BOX + lane / 4 * 8 + unit % 4 * 2;
  int before = 0;
#pragma unroll 1
  for (int stage = 0; stage < count; stage++) {
    wait_for(at.full + ring.slot * 8, ring.parity);
    Codes codes[4];
#pragma unroll
    for (int step = 0; step < 4; step++) {
      codes[step] =
          load_codes(words + ring.slot * WORD_BYTES + step * (BOX * 8), scales + ring.slot * SCALE_BYTES + step * BOX);
    }
    const u64 x = descriptor(at.x + ring.slot * X_BYTES);
    u32 a[2][WARP_TILES][4];
#pragma unroll
    for (int step = 0; step < 4; step++) {
      low.multiply(ring.slot, step, x + step * 2);
#pragma unroll
      for (int p = 0; p < WARP_TILES; p++) decode(codes[step].word[p], codes[step].scales, p, f, a[step % 2][p]);
      order_registers();
#pragma unroll
      for (int p = 0; p < WARP_TILES; p++) wgmma(sum[p], a[step % 2][p], x + step * 2);
      commit();
      wait_products<1>();
      // All products of the stage before have ended.
      if (step == 0 && stage > 0 && lane == 0) release(at.empty + before * 8);
    }
    before = ring.slot;
    ring.advance();
  }
  wait_products<0>();
  if (lane == 0) release(at.empty + before * 8);
}

// The stages of the ring that hold low, of which a warpgroup multiplies those of its own member.
__device__ __forceinline__ void multiply_low_stages(const Places& at, const Members& members, const u16* b,
                                                    const Segment& segment, Ring& ring, int unit, int lane,
                                                    float (&sum)[WARP_TILES][TOKENS / 2]) {
  const int chunks = members.chunks(), count = low_stages(members, segment), group = unit / (4 * WARP_TILES);
  for (int i = 0; i < count; i++) {
    wait_for(at.full + ring.slot * 8, ring.parity);
    if (count == chunks || i / chunks == group) {
      multiply_low(at.x + ring.slot * X_BYTES, b, members.rank, i % chunks * 64, members.N, segment.column, unit, lane, sum);
    }
    __syncwarp();  // all lanes have seen the stage full, before it can be filled again
    if (lane == 0) release(at.empty + ring.slot * 8);
    ring.advance();
  }
}

extern "C" __global__ void __launch_bounds__(WORKERS + HELPERS * 32, BLOCKS_PER_SM)
w4a16_matmul(const __grid_constant__ TensorMap words, const __grid_constant__ TensorMap scales,
             const float* __restrict__ global_scale, const __grid_constant__ TensorMap x, u16* __restrict__ y,
             const u16* __restrict__ bias, const uint4* rows_of_x, const uint4* __restrict__ a,
             const u16* __restrict__ b, const int* __restrict__ members, const long long* slots, float4* parts, int* flags,
             float* low_parts, int* low_done, const __grid_constant__ TensorMap low_or_a, int M, int N, int K,
             int split, int stages, int has_bias, int rank, int per_entry, int columns, int low_split, int low_tasks,
             int low_workers, int of_scale, int of_second, int of_third, int of_fourth, int row_tiles) {
  extern __shared__ u8 dynamic[];
  const u32 base = (static_cast<u32>(__cvta_generic_to_shared(dynamic)) + 1023) & ~1023u;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int steps = K / 64;
#if STREAM_K
  // The block with the first part of some columns waits for the other parts: those blocks start before it.
  const int share = (gridDim.x - 1 - blockIdx.x) / MULTICAST;
  const int total = (N + COLUMNS * MULTICAST - 1) / (COLUMNS * MULTICAST) * row_tiles * steps;
  const int begin = share_end(total, share - 1), end = share_end(total, share);
#else
  const int part = blockIdx.x % split, tile = blockIdx.x / split;
  const int begin = tile * steps + steps * part / split, end = tile * steps + steps * (part + 1) / split;
#endif
  Places at;
  at.x = base;
  at.low = at.x + stages * X_BYTES;
  const int low_bytes = GIVEN ? 0 : (rank + 63) / 64 * X_BYTES;  // of a member; what is given goes through the ring
#if EACH
  at.a = at.low + columns / rank * low_bytes;  // columns: of low that a block makes
  at.words = at.a + stages * columns * 128;
#else
  at.words = at.low + (STREAM_K ? columns / max(rank, 1) : WARPGROUPS) * low_bytes;
#endif
  at.scales = at.words + stages * WORD_BYTES;
  // Beyond the sums too: an arrival may take effect after another thread's store to the same place.
  at.full = max(at.scales + stages * SCALE_BYTES, base + SUM_BYTES);
  at.empty = at.full + stages * 8;
  at.low_ready = at.empty + stages * 8;
  at.out = at.low_ready + 16;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; i++) {
      init_barrier(at.full + i * 8, 2);
      init_barrier(at.empty + i * 8, WARPGROUPS * 4 * MULTICAST);
    }
#if !GIVEN && !EACH
    init_barrier(at.low_ready, LOW_THREADS);
#endif
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  if (MULTICAST > 1) cluster_sync(); else __syncthreads();
  start_next();

  const float factor = 256.0f * __ldg(global_scale);
  const Members of = {members, rank, per_entry, N};
#if EACH
  const int first_member = of.at(begin / steps * COLUMNS);
#elif !GIVEN
  const LowRank low = {rows_of_x, a, slots, low_parts, low_done, M, K, columns, rank, low_split, low_tasks, low_workers};
  // Who has the first step of some columns adds the adapter; a share comes to it last.
  const bool adds_low = (begin + steps - 1) / steps * steps < end;
#if STREAM_K
  const int first_member = 0, last_member = columns / max(rank, 1) - 1;
#else
  const int tile_column = begin / steps / row_tiles * COLUMNS;
  const int first_member = rank ? of.at(tile_column) : 0, last_member = rank ? of.at(tile_column + COLUMNS - 1) : 0;
#endif
#endif
  if (warp >= WARPGROUPS * 4) {
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(HELPER_REGISTERS));
#endif
    Ring ring = {stages, 0, 1};
    int filled = 0;
    if (warp == WARPGROUPS * 4) {
      for (int at_step = begin; lane == 0 && at_step < end;) {
        const Segment segment = segment_at(at_step, end, steps, row_tiles);
        fill_weight(at, words, scales, low_or_a, columns, of, segment, ring, filled);
        at_step += segment.count;
      }
    } else if (warp == WARPGROUPS * 4 + 1) {
      await_inputs();
      for (int at_step = begin; lane == 0 && at_step < end;) {
        const Segment segment = segment_at(at_step, end, steps, row_tiles);
        fill_x(at, x, low_or_a, of, segment, ring, filled);
        at_step += segment.count;
      }
#if !GIVEN && !EACH
    } else if (low_tasks && warp >= WARPGROUPS * 4 + HELPERS - LOW_WARPS) {
      const int thread = threadIdx.x - (WARPGROUPS * 4 + HELPERS - LOW_WARPS) * 32;
      prefetch_a(low, thread);
      await_inputs();
      do_tasks(low, thread);
      if (adds_low) {
        if (thread == 0) await_count(low_done, low_tasks);
        join_low();
        for (int i = first_member; i <= last_member; i++) {
          gather_low(at.low + (i - first_member) * low_bytes, low, 1.0f / factor, i, thread);
        }
        arrive(at.low_ready);
        join_low();
      }
      if (thread == 0) leave_tasks(low);
#endif
    }
    __syncwarp();
#if STREAM_K
    if (MULTICAST > 1) cluster_sync();
#else
    if (split > 1) {
      cluster_sync();
      cluster_sync();
    }
#endif
  } else {
#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
    const Factors f = {(u32)of_scale, (u32)of_second, (u32)of_third, (u32)of_fourth};
    const int unit = warp * WARP_TILES;  // of 16 columns
    Ring ring = {stages, 0, 0};
#pragma unroll 1
    for (int at_step = begin; at_step < end;) {
      const Segment segment = segment_at(at_step, end, steps, row_tiles);
      const int column = segment.column;
      float sum[WARP_TILES][TOKENS / 2] = {};
      if (EACH || (rank && segment.first == 0)) prefetch_b(b, rank, N, column);
      await_inputs();
      NoLow none;
#if EACH
      if (WARPGROUPS == 1 || warp < 4) {
        OwnLow own = {at.a, columns, tokens_with_adapter(slots, M, lane), {}};
        multiply_stages(at, f, segment.count, ring, unit, lane, sum, own);
        store_low(at.low, own, rank, 1.0f / factor, warp, lane);
      } else {
        multiply_stages(at, f, segment.count, ring, unit, lane, sum, none);
      }
      join_workers();  // low is there
#else
      multiply_stages(at, f, segment.count, ring, unit, lane, sum, none);
#endif
#if GIVEN
      multiply_low_stages(at, of, b, segment, ring, unit, lane, sum);
#else
      if (EACH || (rank && segment.first == 0)) {
        const int member = of.at(column + warp / 4 * 64 * WARP_TILES);
#if !EACH
        wait_for(at.low_ready, 0);
#endif
        const u32 from = at.low + (member - first_member) * low_bytes;
        for (int i = 0; i < rank; i += 64) multiply_low(from + i / 64 * X_BYTES, b, rank, i, N, column, unit, lane, sum);
      }
#endif
#pragma unroll
      for (int p = 0; p < WARP_TILES; p++) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) asm volatile("" : "+f"(sum[p][i])::"memory");
      }
#if STREAM_K
      if (segment.first > 0) {
        give_sums(parts, flags, place_of(share), sum);
      } else {
        const int last = at_step + steps;  // of these columns
        for (int other = share + 1, from = end; from < last; other++) {
          const int to = share_end(total, other);
          if (to > from) take_sums(parts, flags, place_of(other), sum);
          from = to;
        }
        const int row = segment.row;
        write_tile(at.out, y + (size_t)row * N, has_bias ? bias : nullptr, factor, M - row, N, column, unit, lane, sum);
      }
#else
      join_workers();  // the ring is read no more: sums take its place
      store_sums(base, unit, lane, sum);
      if (split > 1) cluster_sync(); else join_workers();
      const int row = segment.row;
      write_sums(base, y + (size_t)row * N, has_bias ? bias : nullptr, factor, min(M - row, TOKENS), N, column, split, part);
      if (split > 1) cluster_sync();  // no block leaves while another still reads its memory
#endif
      at_step += segment.count;
    }
#if STREAM_K
    if (MULTICAST > 1) cluster_sync();  // the other block may still write to this one's shared memory
#endif
  }
}
