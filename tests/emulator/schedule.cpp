// Who runs next: threads as fibers in a random order, blocks when there is room, kernels when those before allow it.
#include <algorithm>

#include <sys/mman.h>

#include "machine.h"

#ifndef __x86_64__
#error "the switch between threads is written for x86-64"
#endif

// Callee-saved registers to the stack, the other stack's from there.
asm(R"(
.text
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void emu_switch(void** from, void* to) asm("emu_switch");

namespace emu {

Thread* self;
u64 now;

namespace {

constexpr size_t STACK = 32 << 10;
constexpr u64 CANARY = 0xC0FFEE1234567890ull, MOST_POLLS = 3000000;

struct Event {
  u64 due, order;
  std::function<void()> what;
  bool operator<(const Event& other) const { return due != other.due ? due > other.due : order > other.order; }
};

u64 state, events_made, polls;
int freeze_one_in, delay_bits, yield_one_in;
long capacity, used;
bool may_place;
std::string error;
void* scheduler;
Fibers ready;
std::priority_queue<Event> events;
std::vector<Grid*> grids;
std::vector<Cluster*> clusters;
std::vector<char*> stacks;
std::vector<unsigned char*> rooms;

u64 random_bits() {  // splitmix64
  u64 z = state += 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

char* new_stack() {
  if (!stacks.empty()) {
    char* stack = stacks.back();
    stacks.pop_back();
    return stack;
  }
  return (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

unsigned char* new_room() {  // shared memory and its state
  if (!rooms.empty()) {
    unsigned char* room = rooms.back();
    rooms.pop_back();
    return room;
  }
  return (unsigned char*)mmap(nullptr, 512 << 10, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

void leave_thread();
void leave_block(Block* block);

void begin() {
  Grid* grid = me()->of->grid;
  grid->code.run(grid->values);
  leave_thread();
}

void make_fiber(Block* block, Warp* warp, int thread) {
  Fiber* fiber = new Fiber();
  Grid* grid = block->grid;
  fiber->thread = {(unsigned)thread, 0, 0}, fiber->block = {(unsigned)block->index, 0, 0};
  fiber->grid = {(unsigned)grid->blocks, 1, 1}, fiber->dim = {(unsigned)grid->threads, 1, 1};
  fiber->stack = new_stack();
  std::memcpy(fiber->stack, &CANARY, 8);
  void** top = (void**)(fiber->stack + STACK - 64);
  *--top = nullptr;  // where begin would return to; keeps the stack aligned as after a call
  *--top = (void*)begin;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber->stack_pointer = top;
  fiber->warp = warp, fiber->of = block, fiber->lane = thread % 32;
  warp->lanes[thread % 32] = fiber, warp->live++;
  ready.push_back(fiber);
}

void make_block(Grid* grid, Cluster* cluster, int rank) {
  Block* block = new Block();
  block->grid = grid, block->cluster = cluster, block->rank = rank;
  block->index = grid->placed++, block->live = grid->threads;
  block->shared = new_room(), block->state = block->shared + (256 << 10);
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

bool may_start(Grid* grid) {
  const Grid* before = grid->before;
  if (!before || before->ended) return true;
  return grid->early && before->triggered == before->blocks;
}

// In the order of the launches: a grid gets places only when all blocks of those before have theirs.
void place() {
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

void end_grid(Grid* grid) {
  grid->ended = true;
  wake(grid->waiting);
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

void leave_thread() {
  Fiber* fiber = me();
  Block* block = fiber->of;
  if (!fiber->warp->products.empty()) fail("a thread ends while its products are under way");
  if (fiber->warp->arrived) fail(std::string("a thread ends while its warp is at ") + fiber->warp->what);
  u64 canary;
  std::memcpy(&canary, fiber->stack, 8);
  if (canary != CANARY) fail("the stack of a thread was too small");
  stacks.push_back(fiber->stack);
  fiber->stack = nullptr;
  fiber->waits = "nothing, it has ended";
  fiber->warp->live--, block->live--, block->cluster->live--;
  finish_barrier(block, block->barriers[0]);
  finish_cluster_barrier(block->cluster);
  if (block->live == 0) leave_block(block);
  void* unused;
  emu_switch(&unused, scheduler);
}

void leave_block(Block* block) {
  Grid* grid = block->grid;
  block->left = true;
  rooms.push_back(block->shared);
  block->shared = nullptr;
  used -= cost(grid);
  may_place = true;
  trigger(block);
  if (++grid->left == grid->blocks) end_grid(grid);
}

void maybe_freeze(Fiber* fiber) {
  if (freeze_one_in == 0 || random_below(freeze_one_in)) return;
  const u64 until = now + random_delay();
  switch (random_below(3)) {
    case 0: fiber->warp->frozen_until = until; break;
    case 1: fiber->of->frozen_until = until; break;
    default: fiber->of->grid->frozen_until = until;
  }
}

Fiber* pick() {
  while (!ready.empty()) {
    std::swap(ready[random_below(ready.size())], ready.back());
    Fiber* fiber = ready.back();
    ready.pop_back();
    maybe_freeze(fiber);
    const u64 until = std::max({fiber->warp->frozen_until, fiber->of->frozen_until, fiber->of->grid->frozen_until});
    if (until <= now) return fiber;
    later(until, [fiber] { ready.push_back(fiber); });
  }
  return nullptr;
}

std::string who_waits() {
  std::map<std::string, int> waits;
  for (Cluster* cluster : clusters) {
    for (Block* block : cluster->blocks) {
      for (Warp* warp : block->warps) {
        for (Fiber* fiber : warp->lanes) {
          if (!fiber || !fiber->stack) continue;
          char at[32] = "";
          if (fiber->waits_at) std::snprintf(at, sizeof at, " at 0x%x", fiber->waits_at);
          waits[name_of(block) + " warp " + std::to_string(warp->index) + ": " + (fiber->waits ? fiber->waits : "runs") + at]++;
        }
      }
    }
  }
  std::string all;
  int lines = 0;
  for (auto& [what, count] : waits) {
    if (lines++ < 60) all += "\n  " + what + " (" + std::to_string(count) + " threads)";
  }
  return all;
}

void run_events() {
  while (!events.empty() && events.top().due <= now) {
    auto what = events.top().what;
    events.pop();
    what();
    polls = 0;
  }
}

void run_all() {
  while (error.empty()) {
    run_events();
    if (may_place) place();
    Fiber* fiber = pick();
    if (!fiber) {
      if (std::all_of(grids.begin(), grids.end(), [](Grid* grid) { return grid->ended; })) return;
      if (events.empty()) {
        error = "deadlock, nothing can run:" + who_waits();
        return;
      }
      now = events.top().due;
      continue;
    }
    now++;
    if (polls > MOST_POLLS) {
      error = "livelock, threads only poll:" + who_waits();
      return;
    }
    fiber->waits = nullptr, fiber->waits_at = 0;
    fiber->of->started = true;
    self = fiber;
    emu_switch(&scheduler, fiber->stack_pointer);
    self = nullptr;
  }
}

void clear() {
  for (Cluster* cluster : clusters) {
    for (Block* block : cluster->blocks) {
      for (Warp* warp : block->warps) {
        for (Fiber* fiber : warp->lanes) {
          if (fiber && fiber->stack) stacks.push_back(fiber->stack);
          delete fiber;
        }
        delete warp;
      }
      if (block->shared) rooms.push_back(block->shared);
      delete block;
    }
    delete cluster;
  }
  for (Grid* grid : grids) grid->code.drop(grid->values), delete grid;
  clusters.clear(), grids.clear(), ready.clear();
  events = {};
}

}  // namespace

u64 random_below(u64 limit) { return random_bits() % limit; }

u64 random_delay() { return random_bits() >> (63 - random_below(delay_bits + 1)); }  // many short ones, a few long ones

void later(u64 due, std::function<void()> what) { events.push({due, events_made++, std::move(what)}); }

void fail(const std::string& message) {
  if (error.empty()) error = (self ? name_of(me()) + ": " : "") + message;
  if (!self) throw error;
  void* unused;
  emu_switch(&unused, scheduler);
  __builtin_unreachable();
}

void wait_here(const char* what, u32 at) {
  Fiber* fiber = me();
  fiber->waits = what, fiber->waits_at = at;
  polls = 0;
  emu_switch(&fiber->stack_pointer, scheduler);
}

void wake(Fibers& fibers) {
  ready.insert(ready.end(), fibers.begin(), fibers.end());
  fibers.clear();
}

void may_yield() {
  if (yield_one_in == 0 || random_below(yield_one_in)) return;
  Fiber* fiber = me();
  ready.push_back(fiber);
  emu_switch(&fiber->stack_pointer, scheduler);
}

void poll() {
  Fiber* fiber = me();
  fiber->waits = "a value in global memory";
  polls++;
  ready.push_back(fiber);
  emu_switch(&fiber->stack_pointer, scheduler);
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
  return block->grid->name + " (launch " + std::to_string(block->grid->index) + ") block " + std::to_string(block->index);
}

std::string name_of(const Fiber* fiber) {
  return name_of(fiber->of) + " warp " + std::to_string(fiber->warp->index) + " lane " + std::to_string(fiber->lane);
}

extern "C" void emu_launch(Code code, const char* name, void** arguments, int blocks, int threads, int shared_bytes,
                           int cluster, int early) {
  Grid* grid = new Grid();
  grid->name = name, grid->code = code, grid->values = code.bind(arguments), grid->index = grids.size();
  grid->blocks = blocks, grid->threads = threads, grid->shared_bytes = shared_bytes, grid->cluster = cluster;
  grid->early = early, grid->before = grids.empty() ? nullptr : grids.back(), grid->static_end = RESERVED;
  grids.push_back(grid);
}

// Runs what was launched. The error stays until the next call; empty for none.
extern "C" const char* emu_run(u64 seed, int multiprocessors) {
  state = seed * 0xD1342543DE82EF95ull + 1, error = "", now = 0, used = 0, polls = 0, events_made = 0;
  capacity = multiprocessors * 2048L, may_place = true;
  const int freezes[] = {0, 4096, 1024, 256}, bits[] = {4, 10, 14, 17}, yields[] = {0, 64, 8};
  freeze_one_in = freezes[random_below(4)], delay_bits = bits[random_below(4)], yield_one_in = yields[random_below(3)];
  for (Grid* grid : grids) grid->dynamic_at = STATIC_END + 16 * random_below(64);
  try {
    run_all();
  } catch (const std::string&) {
  }
  clear();
  return error.c_str();
}

extern "C" u64 emu_steps() { return now; }

}  // namespace emu
