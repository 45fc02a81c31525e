// Which thread runs next: each has a stack of its own, and goes on where it left it.
#include <algorithm>

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

constexpr u64 CANARY = 0xC0FFEE1234567890ull, MOST_POLLS = 3000000;

struct Event {
  u64 due, order;
  std::function<void()> what;
  bool operator<(const Event& other) const { return due != other.due ? due > other.due : order > other.order; }
};

u64 state, events_made, polls;
int freeze_one_in, delay_bits, yield_one_in, leave_one_in;
bool shuffles;
std::string error;
void* scheduler;
std::vector<Warp*> ready;  // those with threads that may run
Warp* running;
std::priority_queue<Event> events;

u64 random_bits() {  // splitmix64
  u64 z = state += 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

void make_ready(Fiber* fiber) {
  Warp* warp = fiber->warp;
  warp->ready.push_back(fiber);
  if (!warp->listed) warp->listed = true, ready.push_back(warp);
}

void begin() {
  const Grid* grid = me()->of->grid;
  grid->code.run(grid->values);
  u64 canary;
  std::memcpy(&canary, me()->stack, 8);
  if (canary != CANARY) fail("the stack of a thread was too small");
  leave_thread();
  void* unused;
  emu_switch(&unused, scheduler);
}

// A warp, a block or a whole kernel stands still for a while.
void maybe_freeze(Warp* warp) {
  if (freeze_one_in == 0 || random_below(freeze_one_in)) return;
  const u64 until = now + random_delay();
  switch (random_below(3)) {
    case 0: warp->frozen_until = until; break;
    case 1: warp->of->frozen_until = until; break;
    default: warp->of->grid->frozen_until = until;
  }
}

Warp* pick_warp() {
  while (!ready.empty()) {
    std::swap(ready[random_below(ready.size())], ready.back());
    Warp* warp = ready.back();
    ready.pop_back();
    maybe_freeze(warp);
    const u64 until = std::max({warp->frozen_until, warp->of->frozen_until, warp->of->grid->frozen_until});
    if (until <= now) return warp;
    later(until, [warp] { ready.push_back(warp); });
  }
  return nullptr;
}

// Mostly the threads of one warp one after the other.
Fiber* pick() {
  while (running || (running = pick_warp())) {
    Fibers& lanes = running->ready;
    if (lanes.empty()) {
      running->listed = false, running = nullptr;
      continue;
    }
    if (shuffles) std::swap(lanes[random_below(lanes.size())], lanes.back());
    Fiber* fiber = lanes.back();
    lanes.pop_back();
    if (random_below(leave_one_in) == 0) ready.push_back(running), running = nullptr;
    return fiber;
  }
  return nullptr;
}

void let_others_run() {
  Fiber* fiber = me();
  make_ready(fiber);
  if (running) ready.push_back(running), running = nullptr;
  emu_switch(&fiber->stack_pointer, scheduler);
}

void run_all() {
  while (error.empty()) {
    while (!events.empty() && events.top().due <= now) {
      const auto what = events.top().what;
      events.pop();
      what();
      polls = 0;
    }
    place_blocks();
    Fiber* fiber = pick();
    if (fiber) {
      now++;
      if (polls > MOST_POLLS) fail("livelock, threads only poll:" + who_waits());
      fiber->waits = nullptr, fiber->waits_at = 0;
      fiber->of->started = true;
      self = fiber;
      emu_switch(&scheduler, fiber->stack_pointer);
      self = nullptr;
    } else if (!events.empty()) {
      now = events.top().due;
    } else if (all_ended()) {
      return;
    } else {
      fail("deadlock, nothing can run:" + who_waits());
    }
  }
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

void start(Fiber* fiber, int color) {
  std::memcpy(fiber->stack, &CANARY, 8);
  // Not all at the same place of a page: they would share the lines of the host's cache.
  void** top = (void**)(fiber->stack + STACK - 64 - color % 64 * 64);
  *--top = nullptr;  // where begin would return to; keeps the stack aligned as after a call
  *--top = (void*)begin;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  fiber->stack_pointer = top;
  make_ready(fiber);
}

void wait_here(const char* what, u32 at) {
  Fiber* fiber = me();
  fiber->waits = what, fiber->waits_at = at;
  polls = 0;
  emu_switch(&fiber->stack_pointer, scheduler);
}

void wake(Fibers& fibers) {
  for (Fiber* fiber : fibers) make_ready(fiber);
  fibers.clear();
}

void may_yield() {
  if (yield_one_in && random_below(yield_one_in) == 0) let_others_run();
}

void poll() {
  me()->waits = "a value in global memory";
  polls++;
  let_others_run();
}

// Runs what was launched. The error stays until the next call; empty for none.
extern "C" const char* emu_run(u64 seed, int multiprocessors) {
  state = seed * 0xD1342543DE82EF95ull + 1, error = "", now = 0, polls = 0, events_made = 0;
  const int freezes[] = {0, 1024, 128, 16}, bits[] = {4, 10, 14, 17}, yields[] = {0, 64, 8}, leaves[] = {4, 32, 1024};
  freeze_one_in = freezes[random_below(4)], delay_bits = bits[random_below(4)], yield_one_in = yields[random_below(3)];
  leave_one_in = leaves[random_below(3)], shuffles = random_below(2);
  prepare_grids(multiprocessors);
  try {
    run_all();
  } catch (const std::string&) {  // `error` holds it
  }
  drop_grids();
  ready.clear(), running = nullptr, events = {};
  return error.c_str();
}

extern "C" u64 emu_steps() { return now; }

}  // namespace emu
