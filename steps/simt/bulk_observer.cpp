// What the observer makes of copies by TMA and products by wgmma.
#include <algorithm>
#include <cstring>

#include "simt/async.h"
#include "simt/findings.h"
#include "simt/observer.h"

namespace simt {

// ---- TMA and bulk copies

namespace {

unsigned sectors_of(const unsigned char* begin, unsigned bytes) {
  return unsigned((uintptr_t(begin) + bytes - 1) / 32 - uintptr_t(begin) / 32 + 1);
}

// Calls visit(piece) for the 16-byte pieces of shared memory that go with memory inside the tensor.
template <class Visit>
void for_each_piece(const BulkCopy& copy, Visit visit) {
  copy.for_each_row([&](const unsigned char* row, unsigned first, const unsigned char* global, unsigned count) {
    for (unsigned piece = first / 16; global && piece * 16 < first + count; ++piece)
      visit(uintptr_t(copy.global ? row + piece * 16 : copy.piece_of_row(row, piece)));
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

}  // namespace simt
