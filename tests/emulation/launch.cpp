#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "emulation/streams.h"

#if !defined(__x86_64__)
#error "fibers change stacks by hand, on x86-64 only"
#endif

// The registers that a call must preserve, and the stack.
asm(R"(
.text
.globl emulation_change_stack
emulation_change_stack:
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
extern "C" void emulation_change_stack(void** left, void* entered);

namespace emulation {

thread_local Thread* current = nullptr;

namespace {

constexpr std::size_t kStackBytes = 64 << 10;
constexpr unsigned kRegisters = 6;     // that are pushed above
constexpr unsigned kMostBursts = 16;   // times that lanes of a warp go on before other warps do
constexpr unsigned kMostRests = 2;     // turns that a thread which polls lets pass
constexpr unsigned kMostTurnRests = 64;
constexpr unsigned kPatience = 4;      // idle turns of a block before it lets others go first
constexpr unsigned kMostPasses = 4;    // that it lets pass
constexpr std::chrono::microseconds kNap{50};   // where all blocks wait for other ranks

thread_local void* scheduler = nullptr;
thread_local const std::function<void()>* kernel_of_launch = nullptr;
thread_local std::uint64_t random_state = 88172645463325252ull;

std::uint64_t next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

// A count of arrivals, of bytes that have yet to come, and which turn it is.
struct Turns {
  std::uint16_t turn, wanted;
  std::int16_t missing;
  std::int16_t units;                // pieces of sixteen bytes that have yet to come
};
static_assert(sizeof(Turns) == sizeof(std::uint64_t));

thread_local std::vector<Copy> copies;  // under way

void change(std::uint64_t* word, int arrived, int units) {
  Turns turns;
  std::memcpy(&turns, word, sizeof turns);
  turns.missing = static_cast<std::int16_t>(turns.missing - arrived);
  turns.units = static_cast<std::int16_t>(turns.units + units);
  if (turns.missing < 0) std::abort();   // more arrive than a turn has
  if (turns.missing == 0 && turns.units == 0) {
    turns.missing = static_cast<std::int16_t>(turns.wanted);
    ++turns.turn;
  }
  std::memcpy(word, &turns, sizeof turns);
}

// One copy goes on, or none. A store is read at one time and there at another.
void advance_copies() {
  if (copies.empty()) return;
  const std::size_t which = next_random() % copies.size();
  Copy& c = copies[which];
  if (c.rests > 0) {
    --c.rests;
    return;
  }
  if (c.read.empty()) {
    c.read.assign(static_cast<const char*>(c.from), static_cast<const char*>(c.from) + c.bytes);
    return;
  }
  std::memcpy(c.to, c.read.data(), c.bytes);
  if (c.turns != nullptr) change(c.turns, 0, -static_cast<int>(c.bytes / 16));
  std::swap(c, copies.back());
  copies.pop_back();
}

void leave() {
  Thread* const thread = current;
  emulation_change_stack(&thread->stack_pointer, scheduler);
}

void run_thread() {
  (*kernel_of_launch)();
  for (const Copy& c : copies)
    if (c.thread == current) std::abort();   // its shared memory may be gone before this was read
  current->warp().runs &= ~(1u << current->lane());
  current->block->idle = 0;
  ++current->block->ended;
  leave();
}

// Thread blocks that are resident at once: all, or PPLX_EMULATION_ROOM of them, for tests in which others never become resident.
unsigned room_for_blocks(unsigned grid) {
  static const char* const given = std::getenv("PPLX_EMULATION_ROOM");
  return given == nullptr ? grid : static_cast<unsigned>(std::atoi(given));
}

char* new_stack() {
  void* const memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return static_cast<char*>(memory);
}

// Stacks begin at different lines of a page: otherwise all of them share a few sets of the cache.
void* first_frame(char* stack, unsigned thread) {
  auto** at = reinterpret_cast<void**>(stack + kStackBytes - 64 * (1 + thread % 61));
  *--at = nullptr;   // where run_thread would return to, and what aligns its frame
  *--at = reinterpret_cast<void*>(run_thread);
  for (unsigned i = 0; i < kRegisters; ++i) *--at = nullptr;
  return at;
}

bool rests(Thread& thread) {
  if (thread.rests == 0) return false;
  if (thread.turns != nullptr && phase_test(thread.turns, thread.parity)) {
    thread.rests = 0;
    return false;
  }
  --thread.rests;
  return true;
}

// Lets the lanes of a warp run that can, and then those that have met, a few times.
void run_warp(Warp& warp, Thread* lanes) {
  unsigned some = warp.runs;
  for (std::uint64_t bursts = 1 + next_random() % kMostBursts; some != 0 && bursts > 0; --bursts) {
    warp.again = 0;
    for (; some != 0; some &= some - 1) {
      Thread& thread = lanes[__builtin_ctz(some)];
      if (rests(thread)) continue;
      current = &thread;
      emulation_change_stack(&scheduler, thread.stack_pointer);
    }
    some = warp.again & warp.runs;
  }
}

// False if all threads wait for each other.
bool run_block(Block& block, Thread* threads) {
  bool some = false;
  for (std::size_t w = 0; w < block.warps.size(); ++w) {
    if (block.warps[w].runs == 0) continue;
    some = true;
    run_warp(block.warps[w], threads + w * kLanes);
  }
  return some;
}

void run(unsigned grid, unsigned threads, std::size_t shared, const std::function<void()>& kernel) {
  static thread_local std::vector<char*> stacks;
  if (threads % kLanes != 0) std::abort();
  kernel_of_launch = &kernel;
  std::vector<Block> blocks(grid);
  std::vector<Thread> all(std::size_t{grid} * threads);
  while (stacks.size() < all.size()) stacks.push_back(new_stack());
  for (unsigned b = 0; b < grid; ++b) {
    Block& block = blocks[b];
    block.index = b;
    block.threads = threads;
    block.warps.resize(threads / kLanes);
    block.launched_shared.assign(shared, kPoison);
    for (unsigned t = 0; t < threads; ++t) {
      const std::size_t i = std::size_t{b} * threads + t;
      all[i].block = &block;
      all[i].in_block.x = t;
      all[i].in_grid.x = b;
      all[i].blocks.x = grid;
      all[i].threads.x = threads;
      all[i].stack_pointer = first_frame(stacks[i], t);
    }
  }
  // A block begins when there is room, in any order; it keeps its room until all of its threads are done.
  const unsigned room = room_for_blocks(grid);
  std::vector<unsigned> waiting(grid), running;
  for (unsigned b = 0; b < grid; ++b) std::swap(waiting[b] = b, waiting[next_random() % (b + 1)]);
  for (bool all_wait = false;;) {
    for (; running.size() < room && !waiting.empty(); waiting.pop_back()) running.push_back(waiting.back());
    if (running.empty()) break;
    const std::size_t first = next_random() % running.size();
    for (std::size_t i = 0; i < running.size(); ++i) {
      const unsigned b = running[(first + i) % running.size()];
      if (!all_wait && blocks[b].idle > kPatience && next_random() % kMostPasses != 0) continue;
      ++blocks[b].idle;
      if (!run_block(blocks[b], &all[std::size_t{b} * threads])) std::abort();
      for (std::size_t n = next_random() % (copies.size() + 2); n > 0; --n) advance_copies();
    }
    const auto is_done = [&](unsigned b) { return blocks[b].ended == threads; };
    running.erase(std::remove_if(running.begin(), running.end(), is_done), running.end());
    const auto waits = [&](unsigned b) { return blocks[b].idle > kPatience; };
    all_wait = copies.empty() && !running.empty() && std::all_of(running.begin(), running.end(), waits);
    if (all_wait)
      std::this_thread::sleep_for(kNap);   // other ranks have the core
    else
      sched_yield();
  }
  current = nullptr;
}

bool come_to(Barrier& barrier, unsigned threads, bool good) {
  barrier.all = barrier.all && good;
  if (++barrier.arrived < threads) return false;
  barrier.arrived = 0;
  barrier.result = std::exchange(barrier.all, true);
  for (const unsigned thread : barrier.waiting) current->block->warps[thread / kLanes].runs |= 1u << thread % kLanes;
  barrier.waiting.clear();
  return true;
}

}  // namespace

void yield() {
  current->rests = static_cast<unsigned>(next_random() % kMostRests);
  current->turns = nullptr;
  leave();
}

void yield_to_turns(const std::uint64_t* turns, unsigned parity) {
  current->rests = kMostTurnRests;
  current->turns = turns;
  current->parity = parity;
  leave();
}

void maybe_yield() {
  if (next_random() % 8 != 0) return;
  current->warp().again |= 1u << current->lane();
  leave();
}

void come_to_change() {
  current->block->idle = 0;
  maybe_yield();
}

void warp_sync() {
  Warp& warp = here().warp();
  const unsigned lane = 1u << here().lane();
  warp.arrived |= lane;
  if (warp.arrived == ~0u) {
    warp.runs |= ~lane;
    warp.again |= ~lane;
    warp.arrived = 0;
    ++warp.turn;
    maybe_yield();
    return;
  }
  warp.runs &= ~lane;
  leave();
}

void barrier_arrive(unsigned barrier, unsigned threads, bool good) { come_to(here().block->barriers[barrier], threads, good); }

bool barrier_sync(unsigned number, unsigned threads, bool good) {
  Barrier& barrier = here().block->barriers[number];
  if (!come_to(barrier, threads, good)) {
    barrier.waiting.push_back(here().in_block.x);
    here().warp().runs &= ~(1u << here().lane());
    leave();
  }
  return barrier.result;
}

void copy(Copy c) {
  for (const std::uintptr_t at : {reinterpret_cast<std::uintptr_t>(c.to), reinterpret_cast<std::uintptr_t>(c.from),
                                  std::uintptr_t{c.bytes}})
    if (at % 16 != 0) std::abort();   // as a GPU would
  if (c.bytes == 0) std::abort();
  if (c.thread != nullptr) c.group = c.thread->groups;
  // Some take far longer than the others.
  if (next_random() % 16 == 0) c.rests = next_random() % 256;
  copies.push_back(std::move(c));
  come_to_change();
}

void await_groups(unsigned but, bool stored) {
  Thread* const thread = &here();
  const auto waits_for = [&](const Copy& c) {
    return c.thread == thread && c.group + but < thread->groups && (stored || c.read.empty());
  };
  while (std::any_of(copies.begin(), copies.end(), waits_for)) yield();
}

void mbarrier_init(std::uint64_t* word, unsigned arrivals) {
  const Turns turns{0, static_cast<std::uint16_t>(arrivals), static_cast<std::int16_t>(arrivals), 0};
  std::memcpy(word, &turns, sizeof turns);
}
void mbarrier_arrive(std::uint64_t* word, unsigned bytes) { change(word, 1, static_cast<int>(bytes / 16)); }
bool phase_test(const std::uint64_t* word, unsigned parity) {
  Turns turns;
  std::memcpy(&turns, word, sizeof turns);
  return turns.turn % 2 != parity;
}

void launch(dim3 grid, dim3 block, std::size_t shared, Stream& stream, std::function<void()> kernel) {
  stream.push([=] { run(grid.x, block.x, shared, kernel); });
}

}  // namespace emulation
