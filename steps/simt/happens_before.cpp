// Vector clocks. A join of the whole block is one number, a join of a whole warp is one a warp; only joins of parts of
// a warp need a clock for each thread.
#include "simt/happens_before.h"

#include <algorithm>

namespace simt {
namespace {
constexpr int kWarpSize = 32;
constexpr unsigned kLastClock = (1u << Moment::kClockBits) - 2;
}  // namespace

void HappensBefore::begin_block(uint64_t number, int threads) {
  block_ = number;
  base_ = 0;
  floor_ = Moment::stamp(block_, 1, 0);
  clock_.assign(threads, 1);
  stamp_.resize(threads);
  for (int i = 0; i < threads; ++i) set_clock(i, 1);
  warp_base_.assign((threads + kWarpSize - 1) / kWarpSize, 0);
  known_.assign(threads, nullptr);
  any_known_ = false;
  exhausted_ = false;
}

void HappensBefore::set_clock(int thread, unsigned clock) {
  clock_[thread] = clock;
  stamp_[thread] = Moment::stamp(block_, clock, uint64_t(thread));
  if (clock >= kLastClock) exhausted_ = true;
}

void HappensBefore::join(const std::vector<int>& members) {
  if (members.size() == clock_.size()) {
    base_ = *std::max_element(clock_.begin(), clock_.end());
    floor_ = Moment::stamp(block_, base_ + 1, 0);
    for (int i = 0; i < int(clock_.size()); ++i) set_clock(i, base_ + 1);
    if (any_known_) std::fill(known_.begin(), known_.end(), nullptr);
    any_known_ = false;
  } else if (!join_whole_warp(members)) {
    join_some(members);
  }
}

// The common case of all lanes of one warp, none of which knows of other threads: a number says it all.
bool HappensBefore::join_whole_warp(const std::vector<int>& members) {
  const int warp = members[0] / kWarpSize;
  const int lanes = std::min(kWarpSize, int(clock_.size()) - warp * kWarpSize);
  if (int(members.size()) != lanes) return false;
  unsigned latest = 0;
  for (int member : members) {
    if (member / kWarpSize != warp || known_[member]) return false;
    latest = std::max(latest, clock_[member]);
  }
  warp_base_[warp] = latest;
  for (int member : members) set_clock(member, latest + 1);
  return true;
}

void HappensBefore::join_some(const std::vector<int>& members) {
  auto joint = std::make_shared<Clock>(clock_.size(), base_);
  const auto learn = [&](int thread, unsigned clock) { (*joint)[thread] = std::max((*joint)[thread], clock); };
  const Clock* last = nullptr;
  int last_warp = -1;
  for (int member : members) {
    const int warp = member / kWarpSize, warp_end = std::min(int(clock_.size()), (warp + 1) * kWarpSize);
    if (warp != last_warp)
      for (int lane = warp * kWarpSize; lane < warp_end; ++lane) learn(lane, warp_base_[warp]);
    last_warp = warp;
    if (known_[member] && known_[member].get() != last) {
      last = known_[member].get();
      for (int i = 0; i < int(last->size()); ++i) learn(i, (*last)[i]);
    }
    learn(member, clock_[member]);
  }
  for (int member : members) {
    known_[member] = joint;
    set_clock(member, clock_[member] + 1);
  }
  any_known_ = true;
}

}  // namespace simt
