// One block at a time on one OS thread: its fibers, and how threads wait for each other.
//
// Every CUDA thread is a fiber: a stack of its own, and a switch that costs a few nanoseconds. Fibers are not
// preempted: one runs until it waits for others, so the order of events is always the same. A GPU promises no order;
// hence Options::order to try another, and the observer, which judges by what is ordered, not by what happened.
//
// Not modelled: that lanes of a warp run in step. They may be anywhere between two meetings, as on GPUs since Volta.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "simt/cuda.h"
#include "simt/findings.h"
#include "simt/symbols.h"

// In a function that kernels call and that is never inlined: where in the kernel.
#define SIMT_CALLER __builtin_extract_return_addr(__builtin_return_address(0))

namespace simt {

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kMaxSharedBytes = 227 << 10;
constexpr size_t kStackBytes = 128 << 10;  // what a thread's local arrays and calls may take
// Past the end of what a block asked for lies more, so that an overrun has somewhere to go.
constexpr size_t kSharedArenaBytes = kMaxSharedBytes + (64 << 10);

struct Fiber {
  void* context = nullptr;  // where to go on; null: not started
  int id = 0;
  uint3 thread{};
  bool done = false;
  int registers = 0;
  // Asks for the same things again and again: it can run, but that brings nothing unless another one does something.
  bool polling = false;
  unsigned polls = 0;  // how often it has had the same answers
  // Waits as long as the word has this value. One way of waiting is enough for everything: a meeting waits for its
  // generation to change.
  const unsigned* wait_word = nullptr;
  unsigned wait_value = 0;
  const char* wait_what = "";
  const void* wait_code = nullptr;
  bool ready() const { return !done && (!wait_word || *wait_word != wait_value); }
};

// What a thread has asked last that others may change: two different questions, the latest first.
struct Answer {
  const void* address;
  uint64_t value;
};
using Answers = std::array<Answer, 2>;

// A collective for which threads gather. The last one to arrive acts for all, then all go on.
struct Meeting {
  unsigned generation = 0;
  int arrived = 0;
  int expected = 0;
  const char* what = nullptr;
  const void* code = nullptr;  // where the first to arrive stands
  std::vector<void*> brought;  // by each participant; it points to the fibers' stacks
  std::vector<int> members;    // thread ids
};

struct Warp {
  struct MaskedMeeting {
    unsigned mask;
    std::unique_ptr<Meeting> meeting;
  };
  std::vector<MaskedMeeting> meetings;
};

// What is counted whether or not code is observed.
struct CollectiveCounts {
  uint64_t block_barriers = 0, warp_barriers = 0, named_barriers = 0, barrier_warps = 0, mbarrier_waits = 0;
  uint64_t shuffles = 0, votes = 0, atomics = 0;
  uint64_t async_copies = 0, bulk_copies = 0, matrix_flops = 0;
};

class Observer;
struct AsyncState;

// Runs blocks of a grid one after the other on the calling OS thread. It plays the part of a GPU's multiprocessor.
class BlockRunner {
 public:
  BlockRunner();
  ~BlockRunner();
  BlockRunner(const BlockRunner&) = delete;

  // Makes ready for the blocks of a launch, on the OS thread that is to run them.
  void begin(const Launch& launch);
  // Runs one block to its end, or until something is wrong that it cannot go on from.
  void run_block(uint3 index, uint64_t number);

  // The rest is for what a kernel calls: it runs on the stack of a fiber.

  // Another fiber's turn.
  void yield();
  void wait_while(const unsigned* word, unsigned value, const char* what, const void* code);
  // To be called when a thread has asked for something that others may change: if the answer has been the same many
  // times, the others get a turn. Returns whether they did.
  bool polled(const void* address, uint64_t answer, const char* what, const void* code);
  // Takes part in a meeting of `expected` threads. The last one calls `act`, which may read and write what all brought.
  // Returns whether this was the last.
  using Act = void (*)(Meeting& meeting, unsigned mask);
  bool meet(Meeting& meeting, int expected, int slot, void* mine, Act act, unsigned mask, const char* what,
            const void* code, bool orders_memory);
  // Notes a finding about the running thread and ends the block.
  [[noreturn]] void fail(Kind kind, const void* code, Text text);

  std::string who() const;  // block and thread that runs
  std::string describe_thread(int id) const;
  // Whether so many bytes are shared memory that this block may have.
  bool is_shared(const void* address, size_t bytes) const;
  bool polls_at(const Fiber& fiber, const void* address) const;
  // Whether what the running thread asked last was this.
  bool has_just_asked(const void* address) const { return answers[size_t(running->id)][0].address == address; }
  size_t dynamic_bytes() const { return launch_->smem_bytes; }
  // How many registers each thread of the launch begins with: the most that all can have, in eights.
  int registers_at_launch() const { return std::min(255, 65536 / threads / 8 * 8); }
  int lanes_in(int warp) const;  // of the warp's 32, how many there are in this block

  int threads = 0;
  uint3 block{};
  unsigned char* const shared;  // the dynamic shared memory
  unsigned char* const stacks;
  std::vector<Fiber> fibers;
  std::vector<Answers> answers;  // by thread
  std::vector<Warp> warps;
  Meeting barrier;
  int spare_registers = 0;       // given back by setmaxnreg, and not taken yet
  unsigned registers_given = 0;  // how often some were
  Fiber* running = nullptr;      // null while the executor itself runs
  CollectiveCounts counts;
  std::unique_ptr<AsyncState> async;   // what is under way beside the threads
  std::unique_ptr<Observer> observer;  // made for the first observed launch
  bool observed = false;               // whether the present launch is

 private:
  void resume(Fiber& fiber);
  bool run_warp(int warp, int& left);
  void reset_fibers();
  void note_deadlock();
  bool is_polling() const;

  const Launch* launch_ = nullptr;
  ThreadStorage statics_;      // holds this OS thread's static shared variables
  void* scheduler_ = nullptr;  // context of run_block
  bool aborted_ = false;

  friend struct FiberEntry;
};

// Whether this is part of threadIdx or one of its kin. clang++ reports reads of these, g++ does not.
bool is_index(uintptr_t address);

// The one that runs on this OS thread.
extern constinit thread_local BlockRunner* runner;

}  // namespace simt
