// The emulated GPU from the inside: who waits for what. device.h is what kernels see of it.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"

namespace emu {

using u64 = unsigned long long;
using u32 = uint32_t;

struct Grid;
struct Cluster;
struct Block;
struct Warp;

// A thread of CUDA: a stack of its own, left at whatever waits.
struct Fiber : Thread {
  void* stack_pointer;
  char* stack;
  Warp* warp;
  Block* of;
  int lane;
  const char* waits;  // for what; null when it may run
  u32 waits_at;
  u64 value, result;  // of an exchange
  int from_lane;
  float* c[4];  // of multiply_warp
  u32 a[4], b[2];
  u32* to[4];  // of load_turned
  u32 row;
  u32 products, groups;  // issued, committed
  bool fenced;
  u64 cluster_phase;
  std::vector<std::pair<u32, int>> unfenced;  // stores that the asynchronous proxy may not see yet
};
using Fibers = std::vector<Fiber*>;

// Sums of one array of accumulators while products are under way: [column][row of the warp].
struct Sums {
  float* registers[32];
  float value[256][16];
  int under_way;
};

struct Product {
  u64 descriptor, left;  // left: of an operand in shared memory
  int columns, issued;
  u32 group;
  bool done;
  const u32* a[32];
  Sums* sums;
};

struct Warp {
  int index;
  Block* of;
  Fiber* lanes[32];
  int live, arrived;
  const char* what;
  Fibers waiting, ready;
  bool listed;  // among the warps that may run, or runs
  u64 frozen_until;
  std::deque<Product> products;
  u32 retired;  // products that are no more in the queue
};

struct NamedBarrier {
  int arrived, count;
  Fibers waiting;
};

struct MBarrier {
  u32 expected, pending;
  long bytes;
  u64 phase;
  Fibers waiting;
};

struct Block {
  Grid* grid;
  Cluster* cluster;
  int index, rank, live;
  bool started, triggered, left;
  unsigned char* shared;
  unsigned char* state;  // of each 2 bytes: 0 nothing written, 1 written, 2 written and not fenced
  u64 frozen_until;
  NamedBarrier barriers[16];
  std::unordered_map<u32, MBarrier> mbarriers;
  std::map<u32, std::vector<u64>> descriptors;  // of each warpgroup's products: the same in its warps
  std::vector<Warp*> warps;
};

struct Cluster {
  std::vector<Block*> blocks;
  int arrived, live;
  u64 phase;
  Fibers waiting;
};

struct Grid {
  std::string name;
  Code code;
  void* values;
  int index, blocks, threads, shared_bytes, cluster;
  bool early, ended, scheduled;
  u64 starts_at, frozen_until;
  int placed, triggered, left;
  u32 dynamic_at;
  std::map<int, u32> static_at;
  u32 static_end;
  Grid* before;
  Fibers waiting;  // for its end
};

constexpr u32 RESERVED = 1024, STATIC_END = 12 << 10, RANK_SHIFT = 24;
constexpr unsigned short POISON = 0x7FFF;  // a NaN as bf16, and twice as float32

constexpr size_t STACK = 16 << 10;

// schedule.cpp
extern u64 now;
inline Fiber* me() { return static_cast<Fiber*>(self); }
[[noreturn]] void fail(const std::string& message);
u64 random_below(u64 limit);
u64 random_delay();
void later(u64 due, std::function<void()> what);
void start(Fiber* fiber, int color);
void wait_here(const char* what, u32 at = 0);
void wake(Fibers& fibers);

// grids.cpp
void prepare_grids(int multiprocessors);
void place_blocks();
void leave_thread();
bool all_ended();
void drop_grids();
std::string who_waits();
std::string name_of(const Block* block);
std::string name_of(const Warp* warp);
std::string name_of(const Fiber* fiber);

// Every lane of the warp calls it; the last one to come runs `last`.
template <class F>
void meet(const char* what, F&& last) {
  Warp& warp = *me()->warp;
  if (warp.live < 32) fail(std::string(what) + ": lanes of the warp have left");
  if (warp.arrived && std::strcmp(warp.what, what)) {
    fail(std::string(what) + ": other lanes of the warp are at " + warp.what);
  }
  warp.what = what;
  if (++warp.arrived < 32) {
    warp.waiting.push_back(me());
    wait_here(what);
    return;
  }
  warp.arrived = 0;
  last();
  wake(warp.waiting);
}

// memory.cpp
struct SharedPlace {
  Block* of;
  u32 at;
};
SharedPlace find_shared(u32 at, int bytes, const char* what);
void store_async(Block* block, u32 at, const void* from, int bytes);
void complete(Block* block, u32 at, long bytes);
void require_barriers(const Block* block);

}  // namespace emu
