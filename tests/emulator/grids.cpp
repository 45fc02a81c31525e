// Kernels, and the blocks and warps of each: when they start, where they meet, what is left when they end.
#include <algorithm>

#include <sys/mman.h>

#include "machine.h"

namespace emu {

namespace {

constexpr size_t STACKS = 4096, ROOM = 512 << 10;  // of a block: shared memory, and its state

long capacity, used;
bool may_place;
std::vector<Grid*> grids;
std::vector<Cluster*> clusters;
std::vector<char*> stacks;
std::vector<unsigned char*> rooms;

void* pages(size_t bytes) {
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  madvise(made, bytes, MADV_HUGEPAGE);
  return made;
}

char* new_stack() {
  if (stacks.empty()) {
    char* many = (char*)pages(STACKS * STACK);
    for (size_t i = STACKS; i-- > 0;) stacks.push_back(many + i * STACK);
  }
  char* stack = stacks.back();
  stacks.pop_back();
  return stack;
}

unsigned char* new_room() {
  if (rooms.empty()) rooms.push_back((unsigned char*)pages(ROOM));
  unsigned char* room = rooms.back();
  rooms.pop_back();
  return room;
}

void make_fiber(Block* block, Warp* warp, int thread) {
  Fiber* fiber = new Fiber();
  const Grid* grid = block->grid;
  fiber->thread = {(unsigned)thread, 0, 0}, fiber->block = {(unsigned)block->index, 0, 0};
  fiber->grid = {(unsigned)grid->blocks, 1, 1}, fiber->dim = {(unsigned)grid->threads, 1, 1};
  fiber->stack = new_stack();
  fiber->warp = warp, fiber->of = block, fiber->lane = thread % 32;
  warp->lanes[thread % 32] = fiber, warp->live++;
  start(fiber, block->index * 37 + thread);
}

void make_block(Grid* grid, Cluster* cluster, int rank) {
  Block* block = new Block();
  block->grid = grid, block->cluster = cluster, block->rank = rank;
  block->index = grid->placed++, block->live = grid->threads;
  block->shared = new_room(), block->state = block->shared + ROOM / 2;
  const u32 end = grid->dynamic_at + grid->shared_bytes;
  std::fill_n((unsigned short*)block->shared, end / 2, POISON);
  std::memset(block->state, 0, end / 2);
  std::memset(block->state + RESERVED / 2, 1, (STATIC_END - RESERVED) / 2);  // C++ reads and writes it unseen
  cluster->blocks.push_back(block);
  cluster->live += grid->threads;
  for (int thread = 0; thread < grid->threads; thread++) {
    if (thread % 32 == 0) {
      Warp* warp = new Warp();
      warp->index = thread / 32, warp->of = block;
      block->warps.push_back(warp);
    }
    make_fiber(block, block->warps.back(), thread);
  }
}

long cost(const Grid* grid) {  // 2048 threads or 228 KiB: one multiprocessor
  return std::max<long>(grid->threads, (grid->shared_bytes + 1024L) * 2048 / (228 << 10));
}

bool may_start(const Grid* grid) {
  const Grid* before = grid->before;
  return !before || before->ended || (grid->early && before->triggered == before->blocks);
}

void trigger(Block* block) {
  if (block->triggered) return;
  block->triggered = true;
  if (++block->grid->triggered == block->grid->blocks) may_place = true;
}

void finish_cluster_barrier(Cluster* cluster) {
  if (cluster->arrived == 0 || cluster->arrived < cluster->live) return;
  cluster->arrived = 0, cluster->phase++;
  wake(cluster->waiting);
}

void finish_barrier(Block* block, NamedBarrier& barrier) {
  if (barrier.arrived == 0 || barrier.arrived < (barrier.count ? barrier.count : block->live)) return;
  barrier.arrived = 0;
  wake(barrier.waiting);
}

void leave_block(Block* block) {
  Grid* grid = block->grid;
  require_barriers(block);
  block->left = true;
  rooms.push_back(block->shared);
  block->shared = nullptr;
  used -= cost(grid);
  may_place = true;
  trigger(block);
  if (++grid->left == grid->blocks) {
    grid->ended = true;
    wake(grid->waiting);
  }
}

void for_each_fiber(const std::function<void(Fiber*)>& what) {
  for (Cluster* cluster : clusters) {
    for (Block* block : cluster->blocks) {
      for (Warp* warp : block->warps) {
        for (Fiber* fiber : warp->lanes) {
          if (fiber) what(fiber);
        }
      }
    }
  }
}

}  // namespace

// In the order of the launches: a grid gets places only when all blocks of those before have theirs.
void place_blocks() {
  if (!may_place) return;
  may_place = false;
  for (Grid* grid : grids) {
    if (grid->placed == grid->blocks) continue;
    if (!may_start(grid)) return;
    if (!grid->scheduled) {
      grid->scheduled = true;
      grid->starts_at = now + random_delay();
      later(grid->starts_at, [] { may_place = true; });
    }
    if (now < grid->starts_at) return;
    while (grid->placed < grid->blocks) {
      if (used && used + cost(grid) * grid->cluster > capacity) return;
      Cluster* cluster = new Cluster();
      clusters.push_back(cluster);
      used += cost(grid) * grid->cluster;
      for (int rank = 0; rank < grid->cluster; rank++) make_block(grid, cluster, rank);
    }
  }
}

bool all_ended() {
  return std::all_of(grids.begin(), grids.end(), [](const Grid* grid) { return grid->ended; });
}

void prepare_grids(int multiprocessors) {
  capacity = multiprocessors * 2048L, used = 0, may_place = true;
  for (Grid* grid : grids) grid->dynamic_at = STATIC_END + 16 * random_below(64);
}

void drop_grids() {
  for_each_fiber([](Fiber* fiber) {
    if (fiber->stack) stacks.push_back(fiber->stack);
    delete fiber;
  });
  for (Cluster* cluster : clusters) {
    for (Block* block : cluster->blocks) {
      for (Warp* warp : block->warps) delete warp;
      if (block->shared) rooms.push_back(block->shared);
      delete block;
    }
    delete cluster;
  }
  for (Grid* grid : grids) grid->code.drop(grid->values), delete grid;
  clusters.clear(), grids.clear();
}

void leave_thread() {
  Fiber* fiber = me();
  Block* block = fiber->of;
  if (!fiber->warp->products.empty()) fail("a thread ends while its products are under way");
  if (fiber->warp->arrived) fail(std::string("a thread ends while its warp is at ") + fiber->warp->what);
  stacks.push_back(fiber->stack);
  fiber->stack = nullptr;
  fiber->warp->live--, block->live--, block->cluster->live--;
  finish_barrier(block, block->barriers[0]);
  finish_cluster_barrier(block->cluster);
  if (block->live == 0) leave_block(block);
}

void bar_sync(int id, int count) {
  Block* block = me()->of;
  NamedBarrier& barrier = block->barriers[id];
  if (count % 32) fail("bar.sync of " + std::to_string(count) + " threads: not whole warps");
  if (barrier.arrived && barrier.count != count) fail("bar.sync " + std::to_string(id) + " with two counts of threads");
  barrier.count = count, barrier.arrived++;
  barrier.waiting.push_back(me());
  finish_barrier(block, barrier);
  wait_here("bar.sync", id);
}

void sync_warp() {
  meet("__syncwarp", [] {});
}

void cluster_arrive() {
  Cluster* cluster = me()->of->cluster;
  me()->cluster_phase = cluster->phase;
  cluster->arrived++;
  finish_cluster_barrier(cluster);
}

void cluster_wait() {
  Cluster* cluster = me()->of->cluster;
  may_yield();
  while (cluster->phase == me()->cluster_phase) {
    cluster->waiting.push_back(me());
    wait_here("the barrier of its cluster");
  }
}

void launch_dependents() {
  may_yield();
  trigger(me()->of);
  may_yield();
}

void await_grids() {
  Grid* before = me()->of->grid->before;
  while (me()->of->grid->early && before && !before->ended) {
    before->waiting.push_back(me());
    wait_here("the end of the kernel before");
  }
}

u64 exchange(u64 value, int from_lane, const char* what) {
  me()->value = value, me()->from_lane = from_lane & 31;
  meet(what, [] {
    Warp* warp = me()->warp;
    for (Fiber* lane : warp->lanes) lane->result = warp->lanes[lane->from_lane]->value;
  });
  return me()->result;
}

std::string name_of(const Block* block) {
  const Grid* grid = block->grid;
  return grid->name + " (launch " + std::to_string(grid->index) + ") block " + std::to_string(block->index);
}

std::string name_of(const Warp* warp) { return name_of(warp->of) + " warp " + std::to_string(warp->index); }

std::string name_of(const Fiber* fiber) { return name_of(fiber->warp) + " lane " + std::to_string(fiber->lane); }

std::string who_waits() {
  std::map<std::string, int> waits;
  for_each_fiber([&waits](const Fiber* fiber) {
    if (!fiber->stack) return;
    const std::string at = fiber->waits_at ? " at " + std::to_string(fiber->waits_at) : "";
    waits[name_of(fiber->warp) + ": " + (fiber->waits ? fiber->waits : "runs") + at]++;
  });
  std::string all;
  int lines = 0;
  for (const auto& [what, count] : waits) {
    if (lines++ < 60) all += "\n  " + what + " (" + std::to_string(count) + " threads)";
  }
  return all;
}

extern "C" void emu_launch(Code code, const char* name, void** arguments, int blocks, int threads, int shared_bytes,
                           int cluster, int early) {
  Grid* grid = new Grid();
  grid->name = name, grid->code = code, grid->values = code.bind(arguments), grid->index = grids.size();
  grid->blocks = blocks, grid->threads = threads, grid->shared_bytes = shared_bytes, grid->cluster = cluster;
  grid->early = early, grid->before = grids.empty() ? nullptr : grids.back(), grid->static_end = RESERVED;
  grids.push_back(grid);
}

}  // namespace emu
