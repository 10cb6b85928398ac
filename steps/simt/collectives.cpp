// Barriers, shuffles, votes and atomics: what simt/cuda_warp.h declares. All but atomics are meetings.
//
// As CUDA has it, __syncthreads and __syncwarp order the memory accesses of those who meet; shuffles and votes do not.
#include "simt/collectives.h"

#include "simt/flags.h"
#include "simt/observer.h"

namespace simt {
namespace {

// All threads of the block meet.
void meet_in_block(const char* what, void* mine, BlockRunner::Act act, const void* code) {
  BlockRunner& block = *runner;
  Meeting& barrier = block.barrier;
  // Two barriers in the two branches of an if are two barriers, even if a GPU happens to let threads meet there. The
  // same barrier may have several addresses, when the compiler has made copies of the code.
  if (barrier.arrived > 0 && barrier.code != code && barrier.what == what) {
    const std::string here = source_line(code), there = source_line(barrier.code);
    if (here != there && here != "?" && there != "?")
      block.fail(
          Kind::divergence, code,
          {{std::string(what) + " while " + block.describe_thread(barrier.members[0]) + " is in " + what + " at ",
            barrier.code}});
  }
  if (block.meet(barrier, block.threads, barrier.arrived, mine, act, 0, what, code, /*orders_memory=*/true)) {
    ++block.counts.block_barriers;
    block.counts.barrier_warps += uint64_t(block.threads + kWarpSize - 1) / kWarpSize;
  }
}

unsigned lanes_of(const std::vector<int>& members) {
  unsigned lanes = 0;
  for (int member : members) lanes |= 1u << member % kWarpSize;
  return lanes;
}

// Calls `visit` with the number of each lane in the mask.
template <class Visit>
void for_each_lane(unsigned mask, Visit visit) {
  for (; mask; mask &= mask - 1) visit(__builtin_ctz(mask));
}

// What one thread brings to a shuffle or a vote, and takes home.
struct Shuffled {
  uint64_t word;
  int source;
};
struct Vote {
  bool predicate;
  unsigned result;
};

}  // namespace

// Each mask has a meeting of its own. Masks may overlap, as long as no two lanes wait for
// each other in different ones.
bool meet_in_warp(unsigned mask, const char* what, void* mine, BlockRunner::Act act, const void* code,
                  bool orders_memory) {
  BlockRunner& block = *runner;
  const int warp = block.running->id / kWarpSize, lane = block.running->id % kWarpSize;
  const int lanes = block.lanes_in(warp);
  if (lanes < kWarpSize) mask &= (1u << lanes) - 1;  // a last warp that is not full
  char text[100];
  if (!(mask >> lane & 1)) {
    std::snprintf(text, sizeof text, "%s: lane %d is not in its own mask 0x%08x", what, lane, mask);
    block.fail(Kind::mask, code, {{text}});
  }
  Meeting* meeting = nullptr;
  auto& meetings = block.warps[warp].meetings;
  for (auto& [other_mask, other] : meetings) {
    if (other_mask == mask) {
      meeting = other.get();
    } else if ((other_mask >> lane & 1) && other->arrived > 0 && (lanes_of(other->members) & mask)) {
      std::snprintf(text, sizeof text, "%s with mask 0x%08x while lanes wait in %s with mask 0x%08x at ", what, mask,
                    other->what, other_mask);
      block.fail(Kind::mask, code, {{text, other->code}});
    }
  }
  if (!meeting) {
    meetings.push_back({mask, std::make_unique<Meeting>()});
    meeting = meetings.back().meeting.get();
  }
  return block.meet(*meeting, __builtin_popcount(mask), lane, mine, act, mask, what, code, orders_memory);
}

void sync_block() {
  const ObservationPause pause;
  meet_in_block("__syncthreads", nullptr, nullptr, SIMT_CALLER);
}

int sync_block_count(bool predicate) {
  const ObservationPause pause;
  Vote mine{predicate, 0};
  meet_in_block(
      "__syncthreads_count", &mine,
      [](Meeting& meeting, unsigned) {
        unsigned count = 0;
        for (int i = 0; i < meeting.expected; ++i) count += static_cast<Vote*>(meeting.brought[i])->predicate;
        for (int i = 0; i < meeting.expected; ++i) static_cast<Vote*>(meeting.brought[i])->result = count;
      },
      SIMT_CALLER);
  return int(mine.result);
}

void sync_warp(unsigned mask) {
  const ObservationPause pause;
  if (meet_in_warp(mask, "__syncwarp", nullptr, nullptr, SIMT_CALLER, /*orders_memory=*/true))
    ++runner->counts.warp_barriers;
}

uint64_t shuffle(unsigned mask, uint64_t word, int source) {
  const ObservationPause pause;
  BlockRunner& block = *runner;
  const bool takes_part = mask >> lane_id() & 1;  // else the meeting will say so
  if (takes_part && (!(mask >> source & 1) || source >= block.lanes_in(block.running->id / kWarpSize)))
    block.fail(Kind::absent_lane, SIMT_CALLER,
               {{"shuffles from lane " + std::to_string(source) + ", which takes no part"}});
  Shuffled mine{word, source};
  const bool last = meet_in_warp(
      mask, "a shuffle", &mine,
      [](Meeting& meeting, unsigned mask) {
        uint64_t words[kWarpSize];
        for_each_lane(mask, [&](int lane) { words[lane] = static_cast<Shuffled*>(meeting.brought[lane])->word; });
        for_each_lane(mask, [&](int lane) {
          auto* shuffled = static_cast<Shuffled*>(meeting.brought[lane]);
          shuffled->word = words[shuffled->source];
        });
      },
      SIMT_CALLER, /*orders_memory=*/false);
  if (last) ++block.counts.shuffles;
  return mine.word;
}

unsigned ballot(unsigned mask, bool predicate) {
  const ObservationPause pause;
  Vote mine{predicate, 0};
  const bool last = meet_in_warp(
      mask, "a vote", &mine,
      [](Meeting& meeting, unsigned mask) {
        unsigned votes = 0;
        for_each_lane(
            mask, [&](int lane) { votes |= unsigned(static_cast<Vote*>(meeting.brought[lane])->predicate) << lane; });
        for_each_lane(mask, [&](int lane) { static_cast<Vote*>(meeting.brought[lane])->result = votes; });
      },
      SIMT_CALLER, /*orders_memory=*/false);
  if (last) ++runner->counts.votes;
  return mine.result;
}

int lane_id() { return runner->running->id % kWarpSize; }

unsigned char* dynamic_shared_base() { return runner->shared; }

// ---- Atomics

namespace {

// Replaces *address by change(*address) in one step, also as other OS threads see it. Returns the old value.
template <class T, class Change>
T replace(T* address, Change change) {
  T old;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  for (;;) {
    T changed = change(old);
    if (__atomic_compare_exchange(address, &old, &changed, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) return old;
  }
}

// Likewise, and what it means for other threads: that they may find a change, or, for an operation that a thread may
// wait with, that this one has found none.
template <class T, class Change>
T replace_for_others(T* address, Change change, bool may_wait, const void* code) {
  const ObservationPause pause;
  ++runner->counts.atomics;
  if (observer()) observer()->access<sizeof(T), true>(uintptr_t(address), code, /*atomic=*/true);
  T old;
  if (observer() && observer()->uses_flags()) {
    std::lock_guard lock(flags_mutex());
    SharedKnowledge& told = told_by_flag(address);
    old = replace(address, change);
    observer()->acquire_flag(told);
    if (observer()->has_fenced() && change(old) != old) told = observer()->knowledge(told);
  } else {
    old = replace(address, change);
  }
  if constexpr (std::is_integral_v<T>) {
    if (change(old) != old) {
      grid_progress::changed();
    } else if (may_wait) {
      runner->polled(address, uint64_t(old), "an atomic operation", code);
    }
  }
  return old;
}

}  // namespace

template <class T>
T atomic(AtomicOp op, T* address, T value) {
  const auto change = [=](T old) -> T {
    switch (op) {
      case AtomicOp::add:
        return old + value;
      case AtomicOp::min:
        return value < old ? value : old;
      case AtomicOp::max:
        return value > old ? value : old;
      case AtomicOp::exchange:
        break;
      case AtomicOp::bit_and:
        if constexpr (std::is_integral_v<T>) return old & value;
        break;
      case AtomicOp::bit_or:
        if constexpr (std::is_integral_v<T>) return old | value;
        break;
    }
    return value;
  };
  const bool may_wait = op == AtomicOp::exchange || ((op == AtomicOp::add || op == AtomicOp::bit_or) && value == T(0));
  return replace_for_others(address, change, may_wait, SIMT_CALLER);
}

template <class T>
T atomic_compare_and_swap(T* address, T expected, T desired) {
  return replace_for_others(
      address, [=](T old) { return old == expected ? desired : old; }, true, SIMT_CALLER);
}

template int atomic(AtomicOp, int*, int);
template unsigned atomic(AtomicOp, unsigned*, unsigned);
template unsigned long long atomic(AtomicOp, unsigned long long*, unsigned long long);
template float atomic(AtomicOp, float*, float);
template double atomic(AtomicOp, double*, double);
template int atomic_compare_and_swap(int*, int, int);
template unsigned atomic_compare_and_swap(unsigned*, unsigned, unsigned);
template unsigned long long atomic_compare_and_swap(unsigned long long*, unsigned long long, unsigned long long);

}  // namespace simt
