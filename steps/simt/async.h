// What a block has under way beside its threads, and the barriers that are not meetings.
//
// A GPU finishes what is asynchronous some time before the wait for it. Here it happens as late as a program allows,
// at the wait itself, so that a program that does not wait sees that nothing has happened.
#pragma once
#include <array>
#include <deque>
#include <utility>
#include <vector>

#include "simt/block.h"
#include "simt/happens_before.h"

namespace simt {

// The copies that one thread has started, in groups: it waits for all groups but the newest.
template <class Copy>
class CopyGroups {
 public:
  void start(Copy copy) { open_.push_back(std::move(copy)); }
  void commit() { groups_.push_back(std::exchange(open_, {})); }
  // Calls `finish` for each copy of all groups but the newest `pending`.
  template <class Finish>
  void wait(size_t pending, Finish finish) {
    for (; groups_.size() > pending; groups_.pop_front())
      for (Copy& copy : groups_.front()) finish(copy);
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

struct AsyncState {
  void begin_block(int threads);

  std::vector<CopyGroups<ElementCopy>> copies;  // by thread, once one has started a copy
  std::array<NamedBarrier, kNamedBarriers> named;

  int threads = 0;
  CopyGroups<ElementCopy>& copies_of(int thread) {
    if (copies.empty()) copies.resize(threads);
    return copies[thread];
  }
};

// What a waiting thread waits for, if that is one of these barriers: how far it has come.
std::string describe_wait(const AsyncState& async, const Fiber& fiber);

}  // namespace simt
