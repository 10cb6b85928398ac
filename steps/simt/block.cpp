// Runs the fibers of a block, warp by warp, until all have returned or none can go on.
#include "simt/block.h"

#include <algorithm>
#include <boost/context/detail/fcontext.hpp>
#include <utility>

#include "simt/async.h"
#include "simt/flags.h"
#include "simt/observer.h"
#include "simt/symbols.h"

// Kernels see these as constants. Here they are stored to, as other names for the same symbols.
__thread simt::uint3 current_thread asm("_ZN4simt9threadIdxE");
__thread simt::uint3 current_block asm("_ZN4simt8blockIdxE");
__thread simt::uint3 current_block_size asm("_ZN4simt8blockDimE");
__thread simt::uint3 current_grid_size asm("_ZN4simt7gridDimE");

namespace simt {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

constinit thread_local BlockRunner* runner = nullptr;

namespace {

// So often may a thread get the same answer before it counts as waiting for another one.
constexpr unsigned kPatience = 64;
// So many rounds in which none has got further make sure that those who ask have asked once more.
constexpr int kIdleRounds = 3;

// Tops of the stacks are staggered: at equal offsets in their pages they would all share a few cache sets.
unsigned char* stack_top(unsigned char* stacks, int id) { return stacks + (id + 1) * kStackBytes - id % 15 * 256 - 64; }

}  // namespace

BlockRunner::BlockRunner()
    : shared(static_cast<unsigned char*>(reserve_zeros(kSharedArenaBytes))),
      stacks(static_cast<unsigned char*>(reserve_zeros(kMaxThreads * kStackBytes))),
      async(std::make_unique<AsyncState>()) {}

BlockRunner::~BlockRunner() {
  release_zeros(shared, kSharedArenaBytes);
  release_zeros(stacks, kMaxThreads * kStackBytes);
}

void BlockRunner::begin(const Launch& launch) {
  runner = this;
  statics_ = thread_storage();
  launch_ = &launch;
  threads = int(launch.block.x * launch.block.y * launch.block.z);
  current_block_size = {launch.block.x, launch.block.y, launch.block.z};
  current_grid_size = {launch.grid.x, launch.grid.y, launch.grid.z};
  observed = launch.observed;
  counts = {};
  if (!observed) return;
  if (!observer) observer = std::make_unique<Observer>(*this);
  observer->begin_launch(launch);
}

bool is_index(uintptr_t address) {
  for (const uint3* index : {&current_thread, &current_block, &current_block_size, &current_grid_size})
    if (address - uintptr_t(index) < sizeof *index) return true;
  return false;
}

// ---- Fibers

// What a fiber runs: the kernel, for one thread after the other.
struct FiberEntry {
  static void run(transfer_t from) {
    runner->scheduler_ = from.fctx;
    for (;;) {
      observing = observer();
      call_kernel();
      runner->running->done = true;
      runner->yield();  // to be given the same thread of another block, or never again
    }
  }
  // No exception leaves a fiber: there is nobody below to catch it.
  static void call_kernel() {
    const Launch& launch = *runner->launch_;
    std::string what;
    try {
      return launch.body(launch.arguments);
    } catch (const std::exception& error) {
      what = error.what();
    } catch (...) {
      what = "of an unknown type";
    }
    runner->fail(Kind::exception, nullptr, {{what}});
  }
};

void BlockRunner::yield() {
  if (observed) observer->settle();
  Observer* const mine = observing;
  scheduler_ = jump_fcontext(scheduler_, nullptr).fctx;
  observing = mine;
}

void BlockRunner::resume(Fiber& fiber) {
  current_thread = fiber.thread;
  running = &fiber;
  if (observed) observer->resume(fiber.id);
  fiber.context = jump_fcontext(fiber.context, nullptr).fctx;
  observing = nullptr;
  running = nullptr;
}

void BlockRunner::wait_while(const unsigned* word, unsigned value, const char* what, const void* code) {
  Fiber& fiber = *running;
  fiber.wait_word = word;
  fiber.wait_value = value;
  fiber.wait_what = what;
  fiber.wait_code = code;
  while (*word == value) yield();
  fiber.wait_word = nullptr;
  fiber.polls = 0;
}

bool BlockRunner::polled(const void* address, uint64_t answer, const char* what, const void* code) {
  Fiber& fiber = *running;
  auto& [latest, before] = answers[size_t(fiber.id)];
  Answer* known = latest.address == address ? &latest : before.address == address ? &before : nullptr;
  if (!known || known->value != answer) fiber.polls = 0;
  if (known) {
    known->value = answer;
  } else {
    before = std::exchange(latest, Answer{address, answer});
  }
  if (++fiber.polls < kPatience) return false;
  fiber.wait_what = what;
  fiber.wait_code = code;
  fiber.polling = true;
  yield();
  fiber.polling = false;
  return true;
}

bool BlockRunner::polls_at(const Fiber& fiber, const void* address) const {
  const auto& [latest, before] = answers[size_t(fiber.id)];
  return fiber.polling && (latest.address == address || before.address == address);
}

bool BlockRunner::is_polling() const {
  return std::any_of(fibers.begin(), fibers.begin() + threads, [](const Fiber& f) { return !f.done && f.polling; });
}

// Gives each fiber its thread of the next block. After a block that ended well, each is at the end of its loop above;
// otherwise some are left in the middle of a kernel, and all begin anew.
void BlockRunner::reset_fibers() {
  if (fibers.empty() || aborted_) fibers.assign(kMaxThreads, Fiber{});
  aborted_ = false;
  answers.assign(size_t(threads), {});
  const dim3 size = launch_->block;
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.id = i;
    fiber.done = false;
    fiber.registers = registers_at_launch();
    fiber.wait_word = nullptr;
    fiber.polling = false;
    fiber.polls = 0;
    fiber.thread = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    if (!fiber.context) fiber.context = make_fcontext(stack_top(stacks, i), kStackBytes - 8192, FiberEntry::run);
  }
}

// ---- A block

void BlockRunner::run_block(uint3 index, uint64_t number) {
  block = index;
  current_block = index;
  reset_fibers();
  warps.clear();
  warps.resize((threads + kWarpSize - 1) / kWarpSize);
  barrier = {};
  spare_registers = 0;
  async->begin_block(threads);

  // What nobody has written yet reads as NaN.
  std::fill_n(shared, launch_->smem_bytes, 0xff);
  for (const SharedVariable& variable : shared_variables_of(launch_->kernel))
    std::fill(statics_.begin + variable.begin, statics_.begin + variable.end, 0xff);
  if (observed) observer->begin_block(number);

  const int warp_count = int(warps.size());
  int idle = 0;
  for (int left = threads; left > 0;) {
    const uint64_t changes = grid_progress::changes();
    bool progress = false;
    for (int i = 0; i < warp_count; ++i) {
      progress |= run_warp(options().order == Order::forward ? i : warp_count - 1 - i, left);
      if (aborted_) return;
    }
    if (progress) {
      idle = 0;
      continue;
    }
    if (async->land_awaited_loads(*this)) continue;
    if (is_polling() && (++idle < kIdleRounds || grid_progress::wait(changes))) continue;
    if (!enough_found()) note_deadlock();
    aborted_ = true;
    return;
  }
  async->end_block(*this);
}

// Lets a warp run on as long as any of its lanes can. Returns whether one could.
bool BlockRunner::run_warp(int warp, int& left) {
  const int lanes = lanes_in(warp);
  const bool forward = options().order == Order::forward;
  bool progress = false;
  for (bool again = true; again;) {
    again = false;
    for (int i = 0; i < lanes; ++i) {
      Fiber& fiber = fibers[warp * kWarpSize + (forward ? i : lanes - 1 - i)];
      if (!fiber.ready()) continue;
      resume(fiber);
      if (aborted_) return true;
      left -= fiber.done;
      if (!fiber.polling) progress = again = true;
    }
  }
  return progress;
}

// ---- Meetings

bool BlockRunner::meet(Meeting& meeting, int expected, int slot, void* mine, Act act, unsigned mask, const char* what,
                       const void* code, bool orders_memory) {
  if (meeting.arrived == 0) {
    meeting.what = what;
    meeting.code = code;
    meeting.expected = expected;
    meeting.brought.resize(std::max(expected, kWarpSize));
    meeting.members.clear();
  } else if (meeting.what != what || meeting.expected != expected) {
    fail(Kind::divergence, code,
         {{std::string(what) + " while " + describe_thread(meeting.members[0]) + " is in " + meeting.what + " at ",
           meeting.code}});
  }
  meeting.brought[slot] = mine;
  meeting.members.push_back(running->id);
  if (++meeting.arrived < expected) {
    wait_while(&meeting.generation, meeting.generation, what, code);
    return false;
  }
  if (act) act(meeting, mask);
  if (observed) observer->met(meeting.members, orders_memory);
  meeting.arrived = 0;
  ++meeting.generation;
  return true;
}

}  // namespace simt
