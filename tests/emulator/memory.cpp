// Shared memory, mbarriers and the copy engine: what is copied comes late, in any order.
#include "machine.h"

namespace emu {

namespace {

constexpr u64 MAGIC = 0xBA881E55BA881E55ull;  // lies where a barrier does: nobody writes there while it is used

// What emulator.py writes into a tensor map.
struct Map {
  u64 address, element_bytes, columns, rows, pitch, box_columns, box_rows, swizzled, magic;
};

std::string hex(u32 at) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%x", at);
  return text;
}

void require_whole(const Block* block, u32 at, const std::string& what) {
  if (std::memcmp(block->shared + at, &MAGIC, 8)) fail(what + ": the mbarrier at " + hex(at) + " was overwritten");
}

MBarrier& find_barrier(SharedPlace place, const char* what) {
  auto found = place.of->mbarriers.find(place.at);
  if (found == place.of->mbarriers.end()) fail(std::string(what) + ": no mbarrier at " + hex(place.at));
  require_whole(place.of, place.at, what);
  return found->second;
}

void finish(MBarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase++, barrier.pending = barrier.expected;
  wake(barrier.waiting);
}

struct Copy {
  Map map;
  int column, row;
  u32 to, barrier;
  Block* block;
};

void perform(const Copy& copy) {
  const Map& map = copy.map;
  const int bytes = map.element_bytes;
  if (copy.block->left) fail("a copy ends after " + name_of(copy.block) + ", to which it goes, has left");
  for (u32 r = 0; r < map.box_rows; r++) {
    for (u32 c = 0; c < map.box_columns; c++) {
      const long row = copy.row + (long)r, column = copy.column + (long)c;
      const bool there = row >= 0 && row < (long)map.rows && column >= 0 && column < (long)map.columns;
      unsigned char element[16] = {};
      if (there) std::memcpy(element, (const char*)map.address + row * map.pitch + column * bytes, bytes);
      u32 at = copy.to + (r * map.box_columns + c) * bytes;
      if (map.swizzled) at ^= (at >> 7 & 7) << 4;
      store_async(copy.block, at, element, bytes);
    }
  }
  complete(copy.block, copy.barrier, (long)map.box_rows * map.box_columns * bytes);
}

}  // namespace

u32 to_shared(const void* pointer) {
  const long at = (const unsigned char*)pointer - me()->of->shared;
  if (at < RESERVED || at > 256 << 10) fail("the address of shared memory of something that lies elsewhere");
  return at;
}

void* static_shared(int site, size_t bytes) {
  Grid* grid = me()->of->grid;
  auto [found, is_new] = grid->static_at.try_emplace(site, grid->static_end);
  if (is_new) grid->static_end += (bytes + 15) / 16 * 16;
  if (grid->static_end > STATIC_END) fail("more static shared memory than the emulator has room for");
  return me()->of->shared + found->second;
}

void* dynamic_shared() { return me()->of->shared + me()->of->grid->dynamic_at; }

SharedPlace find_shared(u32 at, int bytes, const char* what) {
  Block* block = me()->of;
  const u32 rank = at >> RANK_SHIFT;
  at &= (1u << RANK_SHIFT) - 1;
  if (rank) {
    if (rank > block->cluster->blocks.size()) fail(std::string(what) + " of a block that its cluster has not");
    block = block->cluster->blocks[rank - 1];
    if (block->left) fail(std::string(what) + " of " + name_of(block) + ", which has left");
    if (!block->started) fail(std::string(what) + " of " + name_of(block) + ", which may not have begun");
  }
  if (at % bytes) fail(std::string(what) + " of " + std::to_string(bytes) + " bytes at " + hex(at) + ": not aligned");
  if (at < RESERVED || at + bytes > block->grid->dynamic_at + block->grid->shared_bytes) {
    fail(std::string(what) + " at " + hex(at) + ": beyond the block's shared memory");
  }
  return {block, at};
}

void load(void* to, u32 at, int bytes) {
  may_yield();
  const auto [block, place] = find_shared(at, bytes, "a load");
  for (int i = 0; i < bytes; i += 2) {
    if (!block->state[(place + i) / 2]) fail("a load of shared memory at " + hex(place + i) + ", which nobody has written");
  }
  std::memcpy(to, block->shared + place, bytes);
}

void store(u32 at, const void* from, int bytes) {
  may_yield();
  const auto [block, place] = find_shared(at, bytes, "a store");
  std::memcpy(block->shared + place, from, bytes);
  std::memset(block->state + place / 2, 2, bytes / 2);
  me()->unfenced.push_back({place, bytes});
}

void fence_proxy() {
  Block* block = me()->of;
  for (auto [at, bytes] : me()->unfenced) std::memset(block->state + at / 2, 1, bytes / 2);
  me()->unfenced.clear();
}

void store_async(Block* block, u32 at, const void* from, int bytes) {
  if (at < RESERVED || at + bytes > block->grid->dynamic_at + block->grid->shared_bytes) {
    fail("a copy to " + hex(at) + ": beyond the shared memory of " + name_of(block));
  }
  std::memcpy(block->shared + at, from, bytes);
  block->state[at / 2] = block->state[(at + bytes - 1) / 2] = 1;
  if (bytes > 4) std::memset(block->state + at / 2, 1, bytes / 2);
}

u32 map_to_rank(u32 at, u32 rank) {
  if (at >> RANK_SHIFT) fail("mapa of an address that was mapped before");
  if (rank >= me()->of->cluster->blocks.size()) fail("mapa to rank " + std::to_string(rank) + " of a smaller cluster");
  return at | (rank + 1) << RANK_SHIFT;
}

// Arrivals may take effect after what another thread stores there: an mbarrier's place is its own to the end.
void require_barriers(const Block* block) {
  for (const auto& [at, barrier] : block->mbarriers) require_whole(block, at, name_of(block) + " leaves");
}

void barrier_init(u32 at, u32 count) {
  const SharedPlace place = find_shared(at, 8, "mbarrier.init");
  MBarrier& barrier = place.of->mbarriers[place.at];
  if (!barrier.waiting.empty()) fail("mbarrier.init: threads wait at it");
  barrier = {count, count, 0, 0, {}};
  std::memcpy(place.of->shared + place.at, &MAGIC, 8);
  std::memset(place.of->state + place.at / 2, 1, 4);
}

void barrier_arrive(u32 at, u32 bytes) {
  may_yield();
  MBarrier& barrier = find_barrier(find_shared(at, 8, "mbarrier.arrive"), "mbarrier.arrive");
  if (barrier.pending == 0) fail("mbarrier.arrive at " + hex(at) + ": more arrivals than it counts");
  barrier.pending--, barrier.bytes += bytes;
  if (barrier.bytes >= 1 << 20) fail("mbarrier.arrive at " + hex(at) + ": it expects 1 MiB or more");
  finish(barrier);
  may_yield();
}

void barrier_wait(u32 at, u32 parity) {
  const SharedPlace place = find_shared(at, 8, "mbarrier.try_wait");
  may_yield();
  while (true) {
    MBarrier& barrier = find_barrier(place, "mbarrier.try_wait");
    if ((barrier.phase & 1) != (parity & 1)) return;
    barrier.waiting.push_back(me());
    wait_here("an mbarrier", place.at);
  }
}

void complete(Block* block, u32 at, long bytes) {
  MBarrier& barrier = find_barrier({block, at}, "complete_tx");
  barrier.bytes -= bytes;
  finish(barrier);
}

// mask 0: to this block; else the same place in each block of the cluster that has its bit.
void copy_2d(u32 to, const void* pointer, int column, int row, u32 barrier, unsigned mask) {
  may_yield();
  Copy copy;
  std::memcpy(&copy.map, pointer, sizeof copy.map);
  const Map& map = copy.map;
  if (map.magic != MAGIC) fail("a copy by something that is no tensor map");
  const SharedPlace place = find_shared(to, 128, "a copy"), counts = find_shared(barrier, 8, "a copy's mbarrier");
  if (map.swizzled && map.box_columns * map.element_bytes != 128) fail("a swizzled copy of rows of other than 128 bytes");
  copy.column = column, copy.row = row, copy.to = place.at, copy.barrier = counts.at;
  Cluster* cluster = me()->of->cluster;
  if (mask >> cluster->blocks.size()) fail("a copy to blocks that the cluster has not");
  for (Block* block : cluster->blocks) {
    if (mask ? !(mask >> block->rank & 1) : block != place.of) continue;
    copy.block = block;
    if (block->left || !block->started) fail("a copy to " + name_of(block) + ", which has left or may not have begun");
    later(now + random_delay(), [copy] { perform(copy); });
  }
}

}  // namespace emu
