// Which of a block's threads have seen what of each other: the order that barriers make, whatever the order in which
// the executor ran things. Vector clocks, cut down to what barriers of blocks and warps need.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "simt/shadow.h"

namespace simt {

// Of each thread, then of each agent of a block: the moment up to which it is known. What lies past the end is not
// known.
using Clock = std::vector<unsigned>;
using SharedClock = std::shared_ptr<const Clock>;

// What a thread knows at one moment. It can be asked later, also by other OS threads.
struct View {
  unsigned block = 0;
  int threads = 0;
  int thread = 0;
  unsigned clock = 0;      // its own
  unsigned base = 0;       // what all threads of the block know of all
  unsigned warp_base = 0;  // what the lanes of its warp know of each other
  SharedClock known;       // beyond that
  SharedClock agents;      // what all know of agents

  // Whether this moment of the block comes before the view was taken.
  bool covers(Moment earlier) const;
};

// What a thread knows now if that is simple, as it mostly is: nothing but what barriers of its whole block and its
// whole warp have told it.
struct Knowledge {
  bool is_simple;
  uint64_t own;                // a moment of its own
  uint64_t of_block, of_warp;  // moments of the block's threads, or its warp's, from these on it does not know

  // Whether it does not know of this moment of a thread.
  [[gnu::always_inline]] bool is_news(uint64_t moment) const {
    if (moment >> Moment::kBlockShift != own >> Moment::kBlockShift) return true;
    const uint64_t thread = (moment ^ own) >> Moment::kThreadShift & ((1u << Moment::kThreadBits) - 1);
    return moment >= (thread < 32 ? of_warp : of_block) && thread != 0;
  }
};

// What those who arrive at a barrier leave there for those who wait.
struct Gathered {
  Clock clock;
  unsigned base = 0;
  // What was merged last. Threads that come one after the other often bring the same.
  SharedClock last;
  int last_warp = -1;
  unsigned last_warp_base = 0;
};

class HappensBefore {
 public:
  // A block begins. `number` tells it from all others.
  void begin_block(uint64_t number, int threads);

  // These threads have met: what each of them did before comes before what any of them will do.
  void join(const std::vector<int>& members);

  // A thread leaves at a barrier what it knows. What it does from now on is not part of that.
  void release(int thread, Gathered& gathered);
  // Closes a barrier's phase: what was gathered, for acquire(). `gathered` is empty then.
  SharedClock publish(Gathered& gathered) const;
  void acquire(int thread, const SharedClock& published);

  // What a thread knows now. What it does from now on is not part of that.
  View take_view(int thread);

  // A new agent's number. Its moments are counted by whoever makes it.
  int add_agent() {
    exhausted_ |= agents_ == (1 << Moment::kThreadBits) - 1;
    return agents_++;
  }
  // Enters into `clock` that the agent is known up to this moment.
  void learn_agent(Clock& clock, int agent, unsigned moment) const;
  uint64_t agent_stamp(int agent, unsigned moment) const {
    return Moment::agent_stamp(block_, moment, uint64_t(agent));
  }

  // The present moment of a thread, without place in the code.
  uint64_t stamp(int thread) const { return stamp_[thread]; }
  unsigned clock(int thread) const { return clock_[thread]; }
  // Moments of this block's threads below this one come before all that any of its threads will do.
  uint64_t floor() const { return floor_; }

  unsigned block() const { return unsigned(block_); }

  // Whether an earlier moment of this block comes before what `thread` does now.
  bool ordered(Moment earlier, int thread) const {
    const unsigned other = earlier.thread(), clock = earlier.clock();
    if (earlier.is_agent()) return agent_known(int(other), thread) >= clock;
    if (int(other) == thread || clock <= base_) return true;
    if (other / 32 == unsigned(thread) / 32 && clock <= warp_base_[other / 32]) return true;
    return known_[thread] && (*known_[thread])[other] >= clock;
  }

  Knowledge knowledge(int thread) const {
    const unsigned of_warp = std::max(base_, warp_base_[size_t(thread) / 32]);
    return {known_[thread] == nullptr, stamp_[thread], floor_, Moment::stamp(block_, of_warp + 1, 0)};
  }

  // Whether there are no more numbers for moments.
  bool exhausted() const { return exhausted_; }

 private:
  void set_clock(int thread, unsigned clock);
  void tick(int thread) { set_clock(thread, clock_[thread] + 1); }
  unsigned agent_known(int agent, int thread) const;
  void join_block();
  bool join_whole_warp(const std::vector<int>& members);
  void join_some(const std::vector<int>& members);

  uint64_t block_ = 0;
  uint64_t floor_ = 0;
  unsigned base_ = 0;                // up to here all know all
  std::vector<unsigned> warp_base_;  // by warp: up to here its lanes know each other
  std::vector<unsigned> clock_;      // by thread: now
  std::vector<uint64_t> stamp_;      // by thread: the same, packed
  // By thread: what it knows beyond that, if anything. Those who have met share one.
  std::vector<SharedClock> known_;
  bool any_known_ = false;
  bool exhausted_ = false;
  int agents_ = 0;
  SharedClock all_agents_;  // what all threads know of agents, in a Clock of all; null: nothing

  // The last merge of acquire(): threads that come with the same knowledge share its result.
  struct {
    SharedClock mine, theirs, both;
  } last_merge_;
};

}  // namespace simt
