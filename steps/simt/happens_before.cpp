// Vector clocks. A join of the whole block is one number, a join of a whole warp is one a warp; only what parts of a
// block tell each other needs a clock for each thread.
#include "simt/happens_before.h"

#include <algorithm>

namespace simt {
namespace {

constexpr int kWarpSize = 32;
constexpr unsigned kLastClock = (1u << Moment::kClockBits) - 2;

unsigned entry(const SharedClock& clock, size_t index) { return clock && index < clock->size() ? (*clock)[index] : 0; }

void merge(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

}  // namespace

bool View::covers(Moment earlier) const {
  const int other = int(earlier.thread());
  const unsigned moment = earlier.clock();
  if (earlier.is_agent()) {
    const size_t index = size_t(threads + other);
    return std::max(entry(known, index), entry(agents, index)) >= moment;
  }
  if (other == thread) return moment <= clock;
  if (moment <= base || (other / kWarpSize == thread / kWarpSize && moment <= warp_base)) return true;
  return entry(known, size_t(other)) >= moment;
}

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
  agents_ = 0;
  all_agents_ = nullptr;
  last_merge_ = {};
}

void HappensBefore::set_clock(int thread, unsigned clock) {
  clock_[thread] = clock;
  stamp_[thread] = Moment::stamp(block_, clock, uint64_t(thread));
  if (clock >= kLastClock) exhausted_ = true;
}

unsigned HappensBefore::agent_known(int agent, int thread) const {
  const size_t index = clock_.size() + size_t(agent);
  return std::max(entry(known_[thread], index), entry(all_agents_, index));
}

void HappensBefore::learn_agent(Clock& clock, int agent, unsigned moment) const {
  const size_t index = clock_.size() + size_t(agent);
  if (clock.size() <= index) clock.resize(index + 1, 0);
  clock[index] = std::max(clock[index], moment);
}

// ---- Meetings

void HappensBefore::join(const std::vector<int>& members) {
  if (members.size() == clock_.size()) {
    join_block();
  } else if (!join_whole_warp(members)) {
    join_some(members);
  }
}

void HappensBefore::join_block() {
  base_ = *std::max_element(clock_.begin(), clock_.end());
  floor_ = Moment::stamp(block_, base_ + 1, 0);
  for (int i = 0; i < int(clock_.size()); ++i) set_clock(i, base_ + 1);
  if (!any_known_) return;
  if (agents_ > 0) {  // from now on all know of agents what any one knew
    auto all = std::make_shared<Clock>(all_agents_ ? *all_agents_ : Clock());
    const Clock* last = nullptr;
    for (const SharedClock& known : known_) {
      if (!known || known.get() == last) continue;
      last = known.get();
      merge(*all, *last);
    }
    all_agents_ = all;
  }
  std::fill(known_.begin(), known_.end(), nullptr);
  any_known_ = false;
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
  Gathered gathered;
  for (int member : members) release(member, gathered);
  const SharedClock joint = publish(gathered);
  for (int member : members) known_[member] = joint;
  any_known_ = true;
}

// ---- Barriers at which some arrive and others wait

void HappensBefore::release(int thread, Gathered& gathered) {
  Clock& clock = gathered.clock;
  if (clock.size() < clock_.size()) clock.resize(clock_.size(), 0);
  gathered.base = std::max(gathered.base, base_);
  const int warp = thread / kWarpSize;
  const unsigned warp_base = warp_base_[warp];
  if (warp_base > base_ && (warp != gathered.last_warp || warp_base != gathered.last_warp_base)) {
    const int end = std::min(int(clock_.size()), (warp + 1) * kWarpSize);
    for (int lane = warp * kWarpSize; lane < end; ++lane) clock[lane] = std::max(clock[lane], warp_base);
    gathered.last_warp = warp;
    gathered.last_warp_base = warp_base;
  }
  if (known_[thread] && known_[thread] != gathered.last) {
    gathered.last = known_[thread];
    merge(clock, *known_[thread]);
  }
  clock[thread] = clock_[thread];
  tick(thread);
}

SharedClock HappensBefore::publish(Gathered& gathered) const {
  auto published = std::make_shared<Clock>(std::move(gathered.clock));
  for (size_t i = 0; i < std::min(clock_.size(), published->size()); ++i)
    (*published)[i] = std::max((*published)[i], gathered.base);
  gathered = {};
  return published;
}

void HappensBefore::acquire(int thread, const SharedClock& published) {
  SharedClock& known = known_[thread];
  any_known_ = true;
  if (!known || known == published) {
    // A thread's knowledge must reach over all threads.
    known = published;
    return;
  }
  if (last_merge_.mine != known || last_merge_.theirs != published) {
    auto both = std::make_shared<Clock>(*known);
    merge(*both, *published);
    last_merge_ = {known, published, both};
  }
  known = last_merge_.both;
}

View HappensBefore::take_view(int thread) {
  View view{unsigned(block_), int(clock_.size()), thread, clock_[thread], base_, warp_base_[thread / kWarpSize],
            known_[thread],   all_agents_};
  tick(thread);
  return view;
}

}  // namespace simt
