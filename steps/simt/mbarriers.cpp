// mbarriers: arrivals and bytes are counted, and a phase is over when none is missing.
#include "simt/async.h"
#include "simt/findings.h"
#include "simt/observer.h"

namespace simt {
namespace {

constexpr const char* kWait = "mbarrier_wait";

}  // namespace

MbarrierState& state_of(const Mbarrier* barrier, const void* code) {
  auto& mbarriers = runner->async->mbarriers;
  const auto known = mbarriers.find(barrier);
  if (known == mbarriers.end()) runner->fail(Kind::uninitialised, code, {{"an mbarrier that nobody has initialised"}});
  return known->second;
}

void check_phase(MbarrierState& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  if (observer()) observer()->end_phase(barrier);
  barrier.pending = barrier.expected;
  ++barrier.phase;
  barrier.parity = barrier.phase & 1;
}

void init_mbarrier(Mbarrier* barrier, unsigned arrivals) {
  const ObservationPause pause;
  BlockRunner& block = *runner;
  const void* code = SIMT_CALLER;
  if (uintptr_t(barrier) % 8 != 0 || !block.is_shared(barrier, sizeof *barrier))
    block.fail(Kind::out_of_bounds, code, {{"an mbarrier that is not at 8 bytes of shared memory"}});
  if (arrivals == 0 || arrivals >= 1u << 20)
    block.fail(Kind::barrier_misuse, code, {{"an mbarrier of " + std::to_string(arrivals) + " arrivals"}});
  MbarrierState& state = block.async->mbarriers[barrier];
  if (!state.loads.empty())
    block.fail(Kind::barrier_misuse, code, {{"initialises an mbarrier that loads under way still report to"}});
  state = {};
  state.expected = state.pending = arrivals;
  state.init_code = code;
  if (observer()) observer()->init_mbarrier(barrier, state, code);
}

void arrive_at_mbarrier(Mbarrier* barrier, unsigned expected_bytes) {
  const ObservationPause pause;
  BlockRunner& block = *runner;
  const void* code = SIMT_CALLER;
  MbarrierState& state = state_of(barrier, code);
  if (observer()) observer()->use_mbarrier(barrier, state, /*arrives=*/true, code);
  if (state.pending == 0)
    block.fail(
        Kind::barrier_misuse, code,
        {{"one arrival too many at an mbarrier made for " + std::to_string(state.expected) + " at ", state.init_code}});
  if (observer()) observer()->release(state.gathered);
  --state.pending;
  state.bytes += expected_bytes;
  check_phase(state);
}

void wait_for_mbarrier(Mbarrier* barrier, unsigned parity) {
  const ObservationPause pause;
  const void* code = SIMT_CALLER;
  MbarrierState& state = state_of(barrier, code);
  if (observer()) observer()->use_mbarrier(barrier, state, /*arrives=*/false, code);
  ++runner->counts.mbarrier_waits;
  if (state.parity == parity) runner->wait_while(&state.parity, parity, kWait, code);
  if (observer()) observer()->acquire(state.published);
}

bool test_mbarrier(Mbarrier* barrier, unsigned parity) {
  const ObservationPause pause;
  const void* code = SIMT_CALLER;
  MbarrierState& state = state_of(barrier, code);
  if (observer()) observer()->use_mbarrier(barrier, state, /*arrives=*/false, code);
  if (state.parity == parity) runner->polled(barrier, state.phase, "mbarrier_test", code);
  const bool over = state.parity != parity;
  if (over && observer()) observer()->acquire(state.published);
  return over;
}

void fence_mbarriers() {
  const ObservationPause pause;
  if (observer()) observer()->fence_mbarriers();
}
void fence_async_proxy() {
  const ObservationPause pause;
  if (observer()) observer()->fence_proxy();
}

// ---- What is under way when no thread can go on, and when all have returned

bool AsyncState::land_awaited_loads(BlockRunner& block) {
  for (int i = 0; i < threads; ++i) {
    const Fiber& fiber = block.fibers[i];
    if (fiber.done) continue;
    for (auto& [barrier, state] : mbarriers) {
      if (state.loads.empty() || (fiber.wait_word != &state.parity && !block.polls_at(fiber, barrier))) continue;
      for (const BulkCopy& load : std::exchange(state.loads, {})) {
        load.land();
        if (observer()) observer()->finish_load(load, state);
        state.bytes -= load.bytes;
      }
      check_phase(state);
      return true;
    }
  }
  return false;
}

void AsyncState::end_block(BlockRunner& block) {
  for (auto& [barrier, state] : mbarriers)
    for (const BulkCopy& load : state.loads)
      add_note({Kind::unfinished_copy,
                load.code,
                block.who(),
                {{"the block has ended, and nobody has waited for this load into its shared memory"}}});
  for (int thread = 0; thread < int(stores.size()); ++thread) {
    const auto finish = [&](BulkCopy& store) {
      block.running = &block.fibers[thread];
      if (observer()) observer()->act_as(thread);
      if (store.data.empty())
        add_note({Kind::unfinished_copy,
                  store.code,
                  block.who(),
                  {{"the thread has ended without a wait for this store to have read its shared memory"}}});
      store.read();
      store.write();
      block.running = nullptr;
    };
    stores[size_t(thread)].commit();
    stores[size_t(thread)].wait(0, finish);
  }
}

}  // namespace simt
