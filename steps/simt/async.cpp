// Beginning of a block, and what there is to say about threads that wait for what is asynchronous.
#include "simt/async.h"

namespace simt {

void AsyncState::begin_block(int threads_of_block) {
  threads = threads_of_block;
  copies.clear();
  for (NamedBarrier& barrier : named)
    if (barrier.generation > 0 || barrier.arrived > 0) barrier = {};
}

std::string describe_wait(const AsyncState& async, const Fiber& fiber) {
  for (int id = 0; id < kNamedBarriers; ++id) {
    const NamedBarrier& barrier = async.named[id];
    if (fiber.wait_word == &barrier.generation)
      return " " + std::to_string(id) + " (" + std::to_string(barrier.arrived) + " of " +
             std::to_string(barrier.expected) + " threads have come)";
  }
  return "";
}

}  // namespace simt
