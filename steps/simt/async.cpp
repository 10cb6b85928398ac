// Beginning of a block, and what there is to say about threads that wait for what is asynchronous.
#include "simt/async.h"

namespace simt {

void AsyncState::begin_block(int threads_of_block) {
  threads = threads_of_block;
  copies.clear();
  stores.clear();
  mbarriers.clear();
  for (NamedBarrier& barrier : named)
    if (barrier.generation > 0 || barrier.arrived > 0) barrier = {};
  for (Warpgroup& group : warpgroups)
    if (group.used) group = {};
}

CopyGroups<ElementCopy>& AsyncState::copies_of(int thread) {
  if (copies.empty()) copies.resize(size_t(threads));
  return copies[size_t(thread)];
}

CopyGroups<BulkCopy>& AsyncState::stores_of(int thread) {
  if (stores.empty()) stores.resize(size_t(threads));
  return stores[size_t(thread)];
}

std::string describe_wait(const BlockRunner& block, const Fiber& fiber) {
  for (int id = 0; id < kNamedBarriers; ++id) {
    const NamedBarrier& barrier = block.async->named[size_t(id)];
    if (fiber.wait_word == &barrier.generation)
      return " " + std::to_string(id) + " (" + std::to_string(barrier.arrived) + " of " +
             std::to_string(barrier.expected) + " threads have come)";
  }
  for (const auto& [barrier, state] : block.async->mbarriers) {
    if (fiber.wait_word != &state.parity && !block.polls_at(fiber, barrier)) continue;
    return " for phase " + std::to_string(state.phase) + " (" + std::to_string(state.pending) + " of " +
           std::to_string(state.expected) + " arrivals and " + std::to_string(state.bytes) + " bytes are missing)";
  }
  return fiber.polling ? " of a flag that no earlier block has set" : "";
}

}  // namespace simt
