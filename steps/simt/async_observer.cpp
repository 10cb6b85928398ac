// What the observer knows of accesses that are not a thread's own loads and stores: asynchronous copies and products.
#include "simt/observer.h"

namespace simt {

void Observer::release(Gathered& gathered) {
  order_.release(me_, gathered);
  check_moments();
}

Region* Observer::shared_region_at(uintptr_t address) {
  return dynamic_.contains(address, 1) ? &dynamic_ : static_region_at(address);
}

// As if these bytes had just been written at this moment.
void Observer::stamp_writes(Region& region, uintptr_t address, size_t bytes, uint64_t moment) {
  const auto stamp = [&](Cell* cells, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      cells[i].write.store(moment, std::memory_order_relaxed);
      cells[i].read.store(0, std::memory_order_relaxed);
    }
  };
  stamp(region.words(address), bytes / 4);
  if (region.has_byte_cells()) stamp(region.byte_cells(address), bytes);
}

// ---- Copies of a thread's own

void Observer::mark_in_flight(uintptr_t address, size_t bytes) {
  shared_region_at(address)->mark(address, bytes, kInFlight);
}

void Observer::land_own_copy(uintptr_t address, size_t bytes, const void* code) {
  Region& region = *shared_region_at(address);
  region.mark(address, bytes, kWritten);
  const Site& site = find_or_add_site(code, true, true, 16);
  stamp_writes(region, address, bytes, order_.stamp(me_) | site.number << Moment::kSiteShift);
}

}  // namespace simt
