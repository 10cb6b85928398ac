// Which of a block's threads have seen what of each other: the order that barriers make, whatever the order in which
// the executor ran things. Vector clocks, cut down to what barriers of blocks and warps need.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "simt/shadow.h"

namespace simt {

class HappensBefore {
 public:
  // A block begins. `number` tells it from all others.
  void begin_block(uint64_t number, int threads);

  // These threads have met: what each of them did before comes before what any of them will do.
  void join(const std::vector<int>& members);

  // The present moment of a thread, without place in the code.
  uint64_t stamp(int thread) const { return stamp_[thread]; }
  // Moments of this block below this one come before all that any of its threads will do.
  uint64_t floor() const { return floor_; }

  unsigned block() const { return unsigned(block_); }

  // Whether an earlier moment of this block comes before what `thread` does now.
  bool ordered(Moment earlier, int thread) const {
    const unsigned other = earlier.thread(), clock = earlier.clock();
    if (int(other) == thread || clock <= base_) return true;
    if (other / 32 == unsigned(thread) / 32 && clock <= warp_base_[other / 32]) return true;
    return known_[thread] && (*known_[thread])[other] >= clock;
  }

  // Whether there are no more numbers for moments.
  bool exhausted() const { return exhausted_; }

 private:
  using Clock = std::vector<unsigned>;  // of each thread, the moment up to which it is known

  void set_clock(int thread, unsigned clock);
  bool join_whole_warp(const std::vector<int>& members);
  void join_some(const std::vector<int>& members);

  uint64_t block_ = 0;
  uint64_t floor_ = 0;
  unsigned base_ = 0;                // up to here all know all
  std::vector<unsigned> warp_base_;  // by warp: up to here its lanes know each other
  std::vector<unsigned> clock_;      // by thread: now
  std::vector<uint64_t> stamp_;      // by thread: the same, packed
  // By thread: what it knows beyond that, if anything. Those who have met share one.
  std::vector<std::shared_ptr<const Clock>> known_;
  bool any_known_ = false;
  bool exhausted_ = false;
};

}  // namespace simt
