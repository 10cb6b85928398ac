// What the observer makes of what is asynchronous: the barriers and fences that go with it, reads past the threads' own
// view of memory, and cp.async.
#include <algorithm>
#include <cstring>

#include "simt/async.h"
#include "simt/observer.h"

namespace simt {

// ---- Barriers

void Observer::release(Gathered& gathered) {
  order_.release(me_, gathered);
  check_moments();
}

void Observer::acquire(const SharedClock& published) {
  if (published) order_.acquire(me_, published);
}

void Observer::init_mbarrier(const Mbarrier* barrier, MbarrierState& state, const void* code) {
  access<8, true>(uintptr_t(barrier), code, false);
  const uint64_t site = site_of(uintptr_t(barrier), sizeof *barrier, true, code)->number;
  state.agent = order_.add_agent();
  state.initialised = Moment(order_.stamp(me_) | site << Moment::kSiteShift);
  check_moments();
}

// Those who use it come after the one who has initialised it, and not only by luck.
void Observer::use_mbarrier(const Mbarrier* barrier, const MbarrierState& state, bool arrives, const void* code) {
  const Site& site = *site_of(uintptr_t(barrier), sizeof *barrier, arrives, code);
  if (conflicts(state.initialised)) race(site, uintptr_t(barrier), state.initialised, true, true);
  arrives ? check_range<true>(site, uintptr_t(barrier), sizeof *barrier, /*atomic=*/true)
          : check_range<false>(site, uintptr_t(barrier), sizeof *barrier, /*atomic=*/true);
}

void Observer::end_phase(MbarrierState& barrier) {
  order_.learn_agent(barrier.gathered.clock, barrier.agent, barrier.phase + 1);
  barrier.published = order_.publish(barrier.gathered);
}

// ---- Fences

void Observer::fence_mbarriers() {
  Fences& fences = mbarrier_fences_[size_t(me_)];
  fences.clocks.push_back(order_.clock(me_));
  fences.view = order_.take_view(me_);
  check_moments();
}

void Observer::fence_proxy() {
  Fences& fences = proxy_fences_[size_t(me_)];
  fences.clocks.push_back(order_.clock(me_));
  fences.view = order_.take_view(me_);
  check_moments();
}

// Whether a fence stands between a thread's write and what `reader` starts now: one of the writer's that the reader
// knows of, or one of the reader's own.
bool Observer::is_fenced(Moment write, int reader) const {
  if (write.is_agent()) return true;
  const std::vector<unsigned>& clocks = proxy_fences_[write.thread()].clocks;
  const auto fence = std::lower_bound(clocks.begin(), clocks.end(), write.clock());
  if (fence != clocks.end() && order_.ordered(Moment(Moment::stamp(order_.block(), *fence, write.thread())), reader))
    return true;
  const Fences& own = proxy_fences_[size_t(reader)];
  return !own.clocks.empty() && own.view.covers(write);
}

// ---- Memory

Region* Observer::shared_region_at(uintptr_t address) {
  return dynamic_.contains(address, 1) ? &dynamic_ : static_region_at(address);
}

// As if these bytes had just been written at this moment.
void Observer::stamp_writes(Region& region, uintptr_t address, size_t bytes, uint64_t moment) {
  const auto stamp = [&](Cells cells, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      cells.writes[i].store(moment, std::memory_order_relaxed);
      cells.reads[i].store(0, std::memory_order_relaxed);
    }
  };
  region.set_has_writes(true);
  stamp(region.words(address), bytes / 4);
  if (region.has_byte_cells()) stamp(region.byte_cells(address), bytes);
}

// Whether all these bytes are written; notes it if they are not.
bool Observer::is_readable(const Site& site, uintptr_t address, size_t bytes) {
  const uint8_t* written = site.region->written(address);
  const uint8_t* end = written + bytes;
  const uint8_t* odd = std::find_if(written, end, [](uint8_t state) { return state != kWritten; });
  if (odd == end) return true;
  if (*odd == kInFlight) {
    unfinished(site, address + size_t(odd - written));
  } else if (site.region->checks_writing) {
    uninitialised(site, address + size_t(odd - written));
  } else {
    return true;
  }
  return false;
}

void Observer::count_bulk(Site& site, uint64_t bytes, uint64_t transactions) {
  Traffic& traffic = site.traffic.traffic;
  (site.traffic.write ? traffic.write_bytes : traffic.read_bytes) += bytes;
  traffic.requests += 1;
  traffic.transactions += transactions;
  traffic.ideal_transactions += (bytes + (site.traffic.shared ? 127 : 31)) / (site.traffic.shared ? 128 : 32);
}

// ---- Asynchronous reads

// Whether the write comes before a read by these threads, made visible to it by a fence; notes it if not.
bool Observer::check_writer(const Site& site, uintptr_t address, uint64_t write, AsyncReaders& readers) {
  const Moment moment(write);
  if (write == readers.checked || moment.block() != order_.block()) return true;
  bool fenced = false;
  for (int i = 0; i < readers.count; ++i) {
    if (!order_.ordered(moment, readers.threads[size_t(i)])) {
      race(site, address, moment, true, false);
      return false;
    }
    fenced |= is_fenced(moment, readers.threads[size_t(i)]);
  }
  if (!fenced) {
    unfenced(site, address, moment);
    return false;
  }
  readers.checked = write;
  return true;
}

void Observer::check_async_read(const Site& site, uintptr_t piece, AsyncReaders& readers) {
  if (!is_readable(site, piece, 16)) return;
  Region& region = *site.region;
  const Cells words = region.words(piece);
  for (unsigned i = 0; i < 4; ++i)
    if (!check_writer(site, piece + 4 * i, words.writes[i].load(std::memory_order_relaxed), readers)) return;
  if (!region.has_byte_cells()) return;
  const Cells bytes = region.byte_cells(piece);
  for (unsigned i = 0; i < 16; ++i)
    if (!check_writer(site, piece + i, bytes.writes[i].load(std::memory_order_relaxed), readers)) return;
}

// A read that began when `issued` was taken ends now: nobody may have written there in the meantime.
void Observer::check_untouched(const Site& site, uintptr_t piece, const View& issued, uint64_t& checked) {
  const auto check = [&](Cells cells, unsigned count, unsigned size) {
    for (unsigned i = 0; i < count; ++i) {
      const uint64_t write = cells.writes[i].load(std::memory_order_relaxed);
      if (write == checked || Moment(write).block() != issued.block) continue;
      if (!issued.covers(Moment(write))) return overtaken(site, piece + i * size, Moment(write));
      checked = write;
    }
  };
  Region& region = *site.region;
  check(region.words(piece), 4, 4);
  if (region.has_byte_cells()) check(region.byte_cells(piece), 16, 1);
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
