// What the observer makes of what is asynchronous: copies, products, the barriers and fences that go with them, and
// flags between blocks.
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

void Observer::init_mbarrier(MbarrierState& barrier) {
  barrier.agent = order_.add_agent();
  barrier.initialised = Moment(order_.stamp(me_));
  check_moments();
}

void Observer::use_mbarrier(const Mbarrier* barrier, bool arrives, const void* code) {
  const Site& site = *site_of(uintptr_t(barrier), sizeof *barrier, arrives, code);
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
  const auto stamp = [&](Cell* cells, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      cells[i].write.store(moment, std::memory_order_relaxed);
      cells[i].read.store(0, std::memory_order_relaxed);
    }
  };
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
  const Cell* words = region.words(piece);
  for (unsigned i = 0; i < 4; ++i)
    if (!check_writer(site, piece + 4 * i, words[i].write.load(std::memory_order_relaxed), readers)) return;
  if (!region.has_byte_cells()) return;
  const Cell* bytes = region.byte_cells(piece);
  for (unsigned i = 0; i < 16; ++i)
    if (!check_writer(site, piece + i, bytes[i].write.load(std::memory_order_relaxed), readers)) return;
}

// A read that began when `issued` was taken ends now: nobody may have written there in the meantime.
void Observer::check_untouched(const Site& site, uintptr_t piece, const View& issued, uint64_t& checked) {
  const auto check = [&](const Cell* cells, unsigned count, unsigned size) {
    for (unsigned i = 0; i < count; ++i) {
      const uint64_t write = cells[i].write.load(std::memory_order_relaxed);
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

// ---- TMA and bulk copies

namespace {

unsigned sectors_of(const unsigned char* begin, unsigned bytes) {
  return unsigned((uintptr_t(begin) + bytes - 1) / 32 - uintptr_t(begin) / 32 + 1);
}

// Calls visit(piece) for the 16-byte pieces of shared memory that go with memory inside the tensor.
template <class Visit>
void for_each_piece(const BulkCopy& copy, Visit visit) {
  copy.for_each_row([&](const unsigned char* row, unsigned first, const unsigned char* global, unsigned count) {
    const unsigned exchange = copy.global ? 0 : uintptr_t(row) >> 7 & 7;
    for (unsigned piece = first / 16; global && piece * 16 < first + count; ++piece)
      visit(uintptr_t(row) + (piece ^ exchange) * 16);
  });
}

}  // namespace

void Observer::start_load(const BulkCopy& copy, MbarrierState& barrier) {
  Site& site = *site_of(uintptr_t(copy.shared), copy.bytes, true, copy.code);
  Region& region = *site.region;
  const uint8_t* written = region.written(uintptr_t(copy.shared));
  if (const void* busy = region.has_copies ? std::memchr(written, kInFlight, copy.bytes) : nullptr)
    unfinished(site, uintptr_t(copy.shared) + size_t(static_cast<const uint8_t*>(busy) - written));
  check_range<true>(site, uintptr_t(copy.shared), copy.bytes, false);
  region.mark(uintptr_t(copy.shared), copy.bytes, kInFlight);
  count_bulk(site, copy.bytes, (copy.bytes + 127) / 128);

  uint64_t bytes = 0, touched = 0;
  Site* from = nullptr;
  copy.for_each_row([&](const unsigned char*, unsigned, const unsigned char* global, unsigned count) {
    if (!global) return;
    from = site_of(uintptr_t(global), count, false, copy.code);
    if (is_readable(*from, uintptr_t(global), count)) check_range<false>(*from, uintptr_t(global), count, false);
    bytes += count;
    touched += sectors_of(global, count);
  });
  if (from) count_bulk(*from, bytes, touched);

  if (std::exchange(barrier.fence_checked, true)) return;
  const auto fenced = [&](const Fences& fences) {
    return !fences.clocks.empty() && fences.clocks.back() >= barrier.initialised.clock();
  };
  const unsigned initialiser = barrier.initialised.thread();
  if (!fenced(mbarrier_fences_[initialiser]) && !fenced(proxy_fences_[initialiser]))
    add_note(
        {Kind::missing_fence,
         copy.code,
         block_.who(),
         {{"reports to an mbarrier without a fence_mbarrier_init after its initialisation at ", barrier.init_code}}});
}

void Observer::finish_load(const BulkCopy& copy, const MbarrierState& barrier) {
  Region& region = *shared_region_at(uintptr_t(copy.shared));
  region.mark(uintptr_t(copy.shared), copy.bytes, kWritten);
  const uint64_t moment = order_.agent_stamp(barrier.agent, barrier.phase + 1);
  const Site& site = find_or_add_site(copy.code, true, true, copy.bytes);
  stamp_writes(region, uintptr_t(copy.shared), copy.bytes, moment | site.number << Moment::kSiteShift);
}

void Observer::start_store(BulkCopy& copy) {
  Site& from = *site_of(uintptr_t(copy.shared), copy.bytes, false, copy.code);
  AsyncReaders readers{{me_}, 1};
  uint64_t read = 0, written = 0, touched = 0;
  for_each_piece(copy, [&](uintptr_t piece) {
    check_async_read(from, piece, readers);
    read += 16;
  });
  count_bulk(from, read, (read + 127) / 128);
  Site* to = nullptr;
  copy.for_each_row([&](const unsigned char*, unsigned, const unsigned char* global, unsigned count) {
    if (!global) return;
    to = site_of(uintptr_t(global), count, true, copy.code);
    written += count;
    touched += sectors_of(global, count);
  });
  if (to) count_bulk(*to, written, touched);
  copy.issued = order_.take_view(me_);
  check_moments();
}

void Observer::finish_store_reads(const BulkCopy& copy) {
  const Site& site = *site_of(uintptr_t(copy.shared), copy.bytes, false, copy.code);
  uint64_t checked = 0;
  for_each_piece(copy, [&](uintptr_t piece) {
    check_untouched(site, piece, copy.issued, checked);
    check_range<false>(site, piece, 16, false);
  });
}

void Observer::finish_store_writes(const BulkCopy& copy) {
  const bool adds = copy.kind == BulkCopy::add;
  copy.for_each_row([&](const unsigned char*, unsigned, const unsigned char* global, unsigned count) {
    if (!global) return;
    const Site& site = *site_of(uintptr_t(global), count, true, copy.code);
    if (adds) is_readable(site, uintptr_t(global), count);
    check_range<true>(site, uintptr_t(global), count, adds);
    site.region->mark(uintptr_t(global), count, kWritten);
  });
}

// ---- Products of a warpgroup

void Observer::start_product_reads(const uint32_t* offsets, size_t count, int first_thread, const void* code) {
  if (count == 0) return;
  Site& site = find_or_add_site(code, true, false, 16);
  site.region = &dynamic_;
  AsyncReaders readers{{first_thread, first_thread + 32, first_thread + 64, first_thread + 96}, 4};
  for (size_t i = 0; i < count; ++i) check_async_read(site, dynamic_.begin + offsets[i], readers);
  count_bulk(site, count * 16, count / 8);
}

void Observer::begin_product_wait(Warpgroup& group) {
  if (group.agent < 0) group.agent = order_.add_agent();
  ++group.finished;
  if (product_reads_.empty()) product_reads_.resize(kMaxSharedBytes / 16);
}

void Observer::finish_product_reads(const uint32_t* offsets, size_t count, const View& issued, int group_number,
                                    const Warpgroup& group, const void* code) {
  Site& site = find_or_add_site(code, true, false, 16);
  site.region = &dynamic_;
  const uint64_t moment = order_.agent_stamp(group.agent, group.finished) | site.number << Moment::kSiteShift;
  uint64_t checked = 0;
  for (size_t i = 0; i < count; ++i) {
    check_untouched(site, dynamic_.begin + offsets[i], issued, checked);
    product_reads_[offsets[i] / 16][size_t(group_number)] = moment;
  }
  product_groups_ = std::max(product_groups_, group_number + 1);
}

void Observer::end_product_wait(const Warpgroup& group, int first_thread) {
  auto clock = std::make_shared<Clock>(size_t(block_.threads), 0);
  order_.learn_agent(*clock, group.agent, group.finished);
  for (int i = 0; i < kWarpgroupSize; ++i) order_.acquire(first_thread + i, clock);
  check_moments();
}

// Does a write of the running thread come without order after a product's read?
void Observer::check_product_reads(const Site& site, uintptr_t address, size_t bytes) {
  const size_t first = (address - dynamic_.begin) / 16, last = (address - dynamic_.begin + bytes - 1) / 16;
  for (size_t piece = first; piece <= last; ++piece)
    for (int group = 0; group < product_groups_; ++group) {
      uint64_t& read = product_reads_[piece][size_t(group)];
      const Moment moment(read);
      if (moment.block() != order_.block()) continue;
      if (!order_.ordered(moment, me_))
        race(site, std::max(address, dynamic_.begin + piece * 16), moment, false, false);
      read = 0;
    }
}

// ---- Flags

// Whether the running thread knows of it.
bool Observer::knows(const Acquired& acquired) const {
  return order_.ordered(Moment(Moment::stamp(order_.block(), acquired.clock, uint64_t(acquired.thread))), me_);
}

bool Observer::flags_cover(Moment earlier) const {
  return std::any_of(acquired_.rbegin(), acquired_.rend(),
                     [&](const Acquired& acquired) { return knows(acquired) && acquired.blocks->covers(earlier); });
}

void Observer::acquire_flag(const SharedKnowledge& told) {
  if (!told) return;
  for (const Acquired& known : acquired_)
    if (known.blocks == told && known.thread == me_) return;
  acquired_.push_back({me_, order_.clock(me_), told});
}

SharedKnowledge Observer::knowledge(const SharedKnowledge& before) {
  auto blocks = std::make_shared<KnownBlocks>();
  if (before) blocks->add(*before);
  for (const Acquired& acquired : acquired_)
    if (knows(acquired)) blocks->add(*acquired.blocks);
  blocks->add(std::make_shared<const View>(order_.take_view(me_)));
  check_moments();
  return blocks;
}

void Observer::write_flag(uintptr_t address, const void* code) {
  if (Region* region = device_region_at(address))
    region->mark(address, std::min<size_t>(4, region->begin + region->bytes - address), kWritten);
  access<4, true>(address, code, /*atomic=*/true);
}

}  // namespace simt
