// Barriers with a number, for a part of the block: who has come is counted, and some do not wait.
#include "simt/async.h"
#include "simt/observer.h"

namespace simt {
namespace {

constexpr const char* kWhat = "named barrier";

NamedBarrier& arrive(int id, int threads, bool waits, const void* code) {
  BlockRunner& block = *runner;
  const auto what = [&] { return std::string(kWhat) + " " + std::to_string(id); };
  if (id < 1 || id >= kNamedBarriers || threads <= 0 || threads % kWarpSize != 0 || threads > kMaxThreads)
    block.fail(
        Kind::barrier_misuse, code,
        {{what() + " of " + std::to_string(threads) + " threads; numbers are 1 to 15, threads a multiple of 32"}});
  NamedBarrier& barrier = block.async->named[size_t(id)];
  if (barrier.arrived == 0) {
    barrier.expected = threads;
    barrier.code = code;
    barrier.first = block.running->id;
    barrier.waiting.clear();
  } else if (barrier.expected != threads) {
    block.fail(Kind::barrier_misuse, code,
               {{what() + " of " + std::to_string(threads) + " threads, which " + block.describe_thread(barrier.first) +
                     " takes for one of " + std::to_string(barrier.expected) + " at ",
                 barrier.code}});
  }
  if (observer()) observer()->release(barrier.gathered);
  if (waits) barrier.waiting.push_back(block.running->id);
  if (++barrier.arrived < threads) return barrier;
  if (block.observed) {
    barrier.published = block.observer->publish(barrier.gathered);
    block.observer->complete_requests(barrier.waiting);
  }
  ++block.counts.named_barriers;
  block.counts.barrier_warps += uint64_t(threads) / kWarpSize;
  barrier.arrived = 0;
  ++barrier.generation;
  return barrier;
}

}  // namespace

void sync_named_barrier(int id, int threads) {
  const ObservationPause pause;
  const void* code = SIMT_CALLER;
  const unsigned before = runner->async->named[size_t(id) % kNamedBarriers].generation;
  NamedBarrier& barrier = arrive(id, threads, true, code);
  if (barrier.generation == before) runner->wait_while(&barrier.generation, before, kWhat, code);
  if (observer()) observer()->acquire(barrier.published);
}

void arrive_at_named_barrier(int id, int threads) {
  const ObservationPause pause;
  arrive(id, threads, false, SIMT_CALLER);
}

}  // namespace simt
