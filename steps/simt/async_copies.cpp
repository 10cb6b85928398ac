// cp.async: copies that each thread starts for itself. They land at the wait for them.
#include <cstring>

#include "simt/async.h"
#include "simt/observer.h"

namespace simt {
namespace {

void land(const ElementCopy& copy) {
  if (observer()) observer()->land_own_copy(uintptr_t(copy.to), 16, copy.code);
  if (copy.from) {
    std::memcpy(copy.to, copy.from, 16);
  } else {
    std::memset(copy.to, 0, 16);
  }
}

}  // namespace

void start_copy(void* shared, const void* global, bool inside) {
  const ObservationPause pause;
  BlockRunner& block = *runner;
  const void* code = SIMT_CALLER;
  if (uintptr_t(shared) % 16 != 0 || (inside && uintptr_t(global) % 16 != 0))
    block.fail(Kind::misaligned, code, {{"cp_async_16 between addresses that are not both multiples of 16 bytes"}});
  if (observer()) {
    if (inside) observer()->access<16, false>(uintptr_t(global), code, false);
    observer()->access<16, true>(uintptr_t(shared), code, false);
    observer()->mark_in_flight(uintptr_t(shared), 16);
  }
  if (!block.is_shared(shared, 16))
    block.fail(Kind::out_of_bounds, code, {{"cp_async_16 to an address that is not in the block's shared memory"}});
  ++block.counts.async_copies;
  block.async->copies_of(block.running->id)
      .start({static_cast<unsigned char*>(shared), inside ? static_cast<const unsigned char*>(global) : nullptr, code});
}

void commit_copies() {
  const ObservationPause pause;
  runner->async->copies_of(runner->running->id).commit();
}

void wait_for_copies(int pending) {
  const ObservationPause pause;
  runner->async->copies_of(runner->running->id).wait(size_t(pending), land);
}

}  // namespace simt
