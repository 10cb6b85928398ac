// What a block has under way beside its threads, and the barriers that are not meetings.
//
// A GPU finishes what is asynchronous some time before the wait for it. Here it happens as late as a program allows,
// at the wait itself, so that a program that does not wait sees that nothing has happened.
#pragma once
#include <array>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simt/block.h"
#include "simt/bulk_copies.h"
#include "simt/happens_before.h"
#include "simt/hopper.h"
#include "simt/warpgroups.h"

namespace simt {

// The copies that one thread has started, in groups: it waits for all groups but the newest.
template <class Copy>
class CopyGroups {
 public:
  void start(Copy copy) { open_.push_back(std::move(copy)); }
  void commit() { groups_.push_back(std::exchange(open_, {})); }
  // Calls `finish` for each copy of all groups but the newest `pending`. These groups are no more.
  template <class Finish>
  void wait(size_t pending, Finish finish) {
    for (; groups_.size() > pending; groups_.pop_front())
      for (Copy& copy : groups_.front()) finish(copy);
  }
  // Calls `advance` for the same copies. The groups remain.
  template <class Advance>
  void visit(size_t pending, Advance advance) {
    for (size_t i = 0; i + pending < groups_.size(); ++i)
      for (Copy& copy : groups_[i]) advance(copy);
  }

 private:
  std::vector<Copy> open_;  // belongs to no group yet
  std::deque<std::vector<Copy>> groups_;
};

// cp.async of 16 bytes; from null: zeros.
struct ElementCopy {
  unsigned char* to;
  const unsigned char* from;
  const void* code;
};

// One of the barriers with a number, at which some wait and others only arrive.
struct NamedBarrier {
  unsigned generation = 0;
  int arrived = 0, expected = 0;
  const void* code = nullptr;  // where the first to arrive stands
  int first = 0;               // who that is
  std::vector<int> waiting;    // threads
  Gathered gathered;           // under observation: what those know who have arrived
  SharedClock published;
};

constexpr int kNamedBarriers = 16;

struct MbarrierState {
  unsigned parity = 0;  // of the phase under way
  unsigned phase = 0;
  unsigned expected = 0, pending = 0;  // arrivals: of each phase, still missing from this one
  int64_t bytes = 0;                   // still to come in this phase
  std::vector<BulkCopy> loads;         // that will bring them
  const void* init_code = nullptr;
  // Under observation:
  int agent = -1;  // its loads, as one that works beside the threads
  Moment initialised{0};
  bool fence_checked = false;
  Gathered gathered;
  SharedClock published;  // by the last phase that is over
};

struct AsyncState {
  void begin_block(int threads);
  // All threads have returned: what is still under way is finished, and noted.
  void end_block(BlockRunner& block);
  // When no thread can go on: lands the loads of an mbarrier that one waits for. Returns whether there was one.
  bool land_awaited_loads(BlockRunner& block);

  CopyGroups<ElementCopy>& copies_of(int thread);
  CopyGroups<BulkCopy>& stores_of(int thread);

  int threads = 0;
  std::vector<CopyGroups<ElementCopy>> copies;  // by thread, once one has started a copy
  std::vector<CopyGroups<BulkCopy>> stores;     // likewise, those from shared memory
  std::array<NamedBarrier, kNamedBarriers> named;
  std::unordered_map<const Mbarrier*, MbarrierState> mbarriers;
  std::array<Warpgroup, kMaxThreads / kWarpgroupSize> warpgroups;
};

// The state of an mbarrier. Ends the block if nobody has initialised it.
MbarrierState& state_of(const Mbarrier* barrier, const void* code);
// Bytes have come that an mbarrier waits for, or a thread has.
void check_phase(MbarrierState& barrier);

// What a waiting thread waits for, if that is a barrier that counts arrivals: how far it has come.
std::string describe_wait(const BlockRunner& block, const Fiber& fiber);

}  // namespace simt
