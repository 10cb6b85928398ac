// One access to memory, as an observed kernel reports it: the part that is run hundreds of millions of times.
//
// Observed kernel files are compiled with -fsanitize=thread, which puts a call of a __tsan_ function before each access
// to memory that others could see. The program is not linked with the thread sanitizer; these functions are ours.
// -fsanitize=bounds adds calls where an index leaves an array of fixed size.
#include <algorithm>
#include <cstring>

#include "simt/observer.h"

namespace simt {

constinit thread_local Observer* observing = nullptr;

namespace {

// Threads let others run after so many accesses. That keeps the lanes of a warp close together: little is open then.
constexpr unsigned kAccessesPerTurn = 64;

// Whether all of these bytes are written.
template <unsigned kSize>
bool all_written(const uint8_t* written) {
  constexpr uint8_t kAll[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  return std::memcmp(written, kAll, kSize) == 0;
}

// Whether a copy has still to fill any of them.
template <unsigned kSize>
bool any_in_flight(const uint8_t* written) {
  if constexpr (kSize == 16) return any_in_flight<8>(written) || any_in_flight<8>(written + 8);
  uint64_t states = 0;
  std::memcpy(&states, written, std::min(kSize, 8u));
  return states & kInFlight * 0x0101010101010101u;
}

}  // namespace

void Observer::resume(int thread) {
  me_ = thread;
  turn_ = kAccessesPerTurn;
}

SIMT_INLINE void Observer::end_turn() {
  if (--turn_ == 0) [[unlikely]]
    block_.yield();
}

// Checks this access against the last write of a cell. Of two that are atomic, none need come first.
SIMT_INLINE void Observer::check_write(const Access& access, const std::atomic<uint64_t>& last, uintptr_t address) {
  const uint64_t write = last.load(std::memory_order_relaxed);
  const bool both_atomic = access.atomic && (write & Moment::kFlag);
  if (write >= access.floor && !access.is_mine(write) && !both_atomic && conflicts(access, write))
    race(access.site, address, Moment(write), true, access.atomic);
}

// Checks the first of these cells against this access, and notes the access there. After a read by one thread and
// another one by a second, only the second is kept, with a flag: that is enough to find a write by any third thread, or
// by the second one itself if it has met nobody since.
template <bool kWrite>
SIMT_INLINE void Observer::check_cell(const Access& access, Cells cells, uintptr_t address) {
  const uint64_t read = cells.reads->load(std::memory_order_relaxed);
  if (!kWrite && access.is_mine(read)) return;  // nothing can have happened since
  if (kWrite || access.region.has_writes()) check_write(access, *cells.writes, address);
  if constexpr (kWrite) {
    if (read >= access.floor && (access.is_mine(read) ? read & Moment::kFlag : conflicts(access, read)))
      race(access.site, address, Moment(read), false, access.atomic);
    cells.reads->store(0, std::memory_order_relaxed);
    cells.writes->store(access.moment | (access.atomic ? Moment::kFlag : 0), std::memory_order_relaxed);
  } else {
    if (access.atomic) return;  // of those that read atomically none is remembered
    const bool others = read >= access.floor && conflicts(access, read);
    cells.reads->store(access.moment | (others ? Moment::kFlag : 0), std::memory_order_relaxed);
  }
}

template <bool kWrite>
SIMT_INLINE void Observer::check_cells(const Access& access, Cells cells, uintptr_t address, size_t count,
                                       unsigned bytes_each) {
  for (size_t i = 0; i < count; ++i)
    check_cell<kWrite>(access, {cells.writes + i, cells.reads + i}, address + i * bytes_each);
}

// Checks all cells of an access. Words have cells of their own; single bytes and halves have others, which accesses to
// whole words look at only when there are any.
template <unsigned kSize, bool kWrite>
SIMT_INLINE void Observer::check_order(const Access& access, uintptr_t address) {
  Region& region = access.region;
  if (kWrite) region.set_has_writes(true);
  if (kWrite && product_groups_ > 0 && &region == &dynamic_) check_product_reads(access.site, address, kSize);
  if constexpr (kSize >= 4) {
    check_cells<kWrite>(access, region.words(address), address, kSize / 4, 4);
    if (!region.has_byte_cells()) return;
  } else {
    if (!region.has_byte_cells()) region.observe_bytes();
    // Of the word around only accesses to all of it are noted; this one must come after them.
    const Cells word = region.words(address);
    const uint64_t write = word.writes->load(std::memory_order_relaxed);
    const uint64_t read = word.reads->load(std::memory_order_relaxed);
    if (write >= access.floor && conflicts(access, write))
      race(access.site, address, Moment(write), true, access.atomic);
    if (kWrite && read >= access.floor && conflicts(access, read))
      race(access.site, address, Moment(read), false, access.atomic);
  }
  check_cells<kWrite>(access, region.byte_cells(address), address, kSize, 1);
}

// The same for many bytes at once, as far as they fill words.
template <bool kWrite>
void Observer::check_range(const Site& site, uintptr_t address, size_t bytes, bool atomic) {
  const Access access = access_at(site, atomic);
  Region& region = access.region;
  const uintptr_t begin = (address + 3) & ~uintptr_t(3), end = (address + bytes) & ~uintptr_t(3);
  if (kWrite) region.set_has_writes(true);
  if (kWrite && product_groups_ > 0 && &region == &dynamic_) check_product_reads(site, address, bytes);
  if (begin >= end) return;
  check_cells<kWrite>(access, region.words(begin), begin, (end - begin) / 4, 4);
  if (region.has_byte_cells()) check_cells<kWrite>(access, region.byte_cells(begin), begin, end - begin, 1);
}
template void Observer::check_range<false>(const Site&, uintptr_t, size_t, bool);
template void Observer::check_range<true>(const Site&, uintptr_t, size_t, bool);

// The site of an access that is not, or not with this array, the one last seen at this place in the code.
template <unsigned kSize, bool kWrite>
[[gnu::noinline]] Site* Observer::other_site(uintptr_t address, const void* code) {
  Site* site = site_of(address, kSize, kWrite, code);
  if (site) recent_[uintptr_t(code) % kRecentSites] = site;
  return site;
}

// Adds to the warp's requests.
SIMT_INLINE void Observer::count_requests(Site& site, uintptr_t address, uintptr_t stride, unsigned count) {
  const unsigned warp = unsigned(me_) / kWarpSize, lane = unsigned(me_) % kWarpSize;
  RequestStream& stream = site.streams[warp];
  for (;;) {
    const unsigned added = stream.add_expected(lane, uint32_t(address), uint32_t(stride), count);
    if (added == count) return;
    address += added * stride;
    count_unexpected(site, address);
    address += stride;
    count -= added + 1;
  }
}

// Checks that bytes that are read have been written, and notes those that are. Returns false if a copy has still to
// fill them: then there is nothing else to be said about this access.
template <unsigned kSize, bool kWrite>
SIMT_INLINE bool Observer::check_written(const Site& site, uintptr_t address, bool atomic) {
  Region& region = *site.region;
  if (region.is_all_written()) return true;
  uint8_t* written = region.written(address);
  const bool in_flight = region.has_copies && any_in_flight<kSize>(written);
  if (in_flight) {
    unfinished(site, address);
  } else if ((!kWrite || atomic) && !all_written<kSize>(written) && region.checks_writing) {
    uninitialised(site, address);
  }
  if (kWrite) std::memset(written, kWritten, kSize);
  return !in_flight;
}

// The site of an access inside an array; null if it is not to be watched.
template <unsigned kSize, bool kWrite>
SIMT_INLINE Site* Observer::site_for(uintptr_t address, const void* code) {
  if (address - uintptr_t(block_.stacks) < kMaxThreads * kStackBytes) return nullptr;  // a local variable
  Site* site = recent_[uintptr_t(code) % kRecentSites];
  if (site->code != code || !site->region->contains(address, kSize)) [[unlikely]] {
    site = other_site<kSize, kWrite>(address, code);
    if (!site) return nullptr;  // constant memory
  }
  if (address % kSize != 0) [[unlikely]]
    misaligned(*site, address);
  return site;
}

// check_order() for reads of words of an array that nobody has written to in this launch: most reads are such, and
// little is left to do.
template <unsigned kSize>
SIMT_INLINE void Observer::note_reads(const Access& access, uintptr_t address, uintptr_t stride, unsigned count) {
  const uint64_t moment = access.moment, floor = access.floor;
  const Knowledge known = access.known;
  const Region& region = access.region;
  const Cells cells = region.words(region.begin);
  const uintptr_t begin = region.begin & ~uintptr_t(3);
  for (unsigned i = 0; i < count; ++i)
    for (unsigned word = 0; word < kSize / 4; ++word) {
      std::atomic<uint64_t>& cell = cells.reads[(address + i * stride - begin) / 4 + word];
      const uint64_t read = cell.load(std::memory_order_relaxed);
      if (read >> Moment::kThreadShift == moment >> Moment::kThreadShift) continue;
      const bool others = read >= floor && known.is_news(read);
      cell.store(moment | (others ? Moment::kFlag : 0), std::memory_order_relaxed);
    }
  if (!region.has_writes()) return;
  for (unsigned i = 0; i < count; ++i)  // another worker has begun to write
    for (uintptr_t word = address + i * stride; word < address + i * stride + kSize; word += 4)
      check_write(access, cells.writes[(word - begin) / 4], word);
}

// Counts and checks accesses of the running thread at equal distances.
template <unsigned kSize, bool kWrite>
SIMT_INLINE void Observer::look_at(Site& site, uintptr_t address, uintptr_t stride, unsigned count, bool atomic) {
  count_requests(site, address, stride, count);
  const Access access = access_at(site, atomic);
  if constexpr (!kWrite && kSize >= 4) {
    const Region& region = access.region;
    const bool is_only_read = region.is_all_written() && !region.has_writes() && !region.has_byte_cells();
    if (is_only_read && !atomic && is_simple(access)) return note_reads<kSize>(access, address, stride, count);
  }
  for (unsigned i = 0; i < count; ++i, address += stride)
    if (check_written<kSize, kWrite>(site, address, atomic)) check_order<kSize, kWrite>(access, address);
}

template <unsigned kSize, bool kWrite>
void Observer::access(uintptr_t address, const void* code, bool atomic) {
  settle();
  if (Site* site = site_for<kSize, kWrite>(address, code)) look_at<kSize, kWrite>(*site, address, 0, 1, atomic);
}

// ---- Runs

template <unsigned kSize>
SIMT_INLINE void Observer::read(uintptr_t address, const void* code) {
  Site& site = *recent_[uintptr_t(code) % kRecentSites];
  if (site.code == code && site.run.takes(address)) [[likely]] {
    site.run.take();
  } else {
    begin_or_end_run<kSize>(address, code);
  }
}

// Reads do not change what is found out about each other, but a write does: those of the same bytes come first.
template <unsigned kSize>
SIMT_INLINE void Observer::write(uintptr_t address, const void* code) {
  Site* site = site_for<kSize, true>(address, code);
  if (!site) return;
  for (const Site* reads : pending_)
    if (reads->run.count > 0 && reads->run.overlaps(address, kSize, reads->size)) {
      settle_runs();
      break;
    }
  look_at<kSize, true>(*site, address, 0, 1, false);
}

// How many steps further accesses are sure to be inside an array; not more than are made before others get a turn.
static unsigned further_steps(const Region& region, uintptr_t address, uintptr_t stride, unsigned size) {
  if (region.contains(address + stride * kAccessesPerTurn, size)) return kAccessesPerTurn;
  const bool back = intptr_t(stride) < 0;
  return unsigned(back ? (address - region.begin) / (0 - stride)
                       : (region.begin + region.bytes - size - address) / stride);
}

// The first read of a run, the second one, which shows the distance, and one that is not where the run goes on.
template <unsigned kSize>
[[gnu::noinline]] void Observer::begin_or_end_run(uintptr_t address, const void* code) {
  Site* site = site_for<kSize, false>(address, code);
  if (!site) return;
  Run& run = site->run;
  if (run.count == 1) {
    run.stride = address - run.first;
    run.most = 2 + further_steps(*site->region, address, run.stride, kSize);
    run.next = address;
    return run.take();
  }
  settle_run(*site);
  if (!run.is_pending) pending_.push_back(site);
  run.is_pending = true;
  run.first = address;
  run.count = 1;
}

void Observer::settle_runs() {
  for (Site* site : pending_) {
    settle_run(*site);
    site->run.is_pending = false;
  }
  pending_.clear();
}

void Observer::settle_run(Site& site) {
  if (site.run.count == 0) return;
  switch (site.size) {
    case 1:
      settle_run_of<1>(site);
      break;
    case 2:
      settle_run_of<2>(site);
      break;
    case 4:
      settle_run_of<4>(site);
      break;
    case 8:
      settle_run_of<8>(site);
      break;
    default:
      settle_run_of<16>(site);
  }
}

template <unsigned kSize>
void Observer::settle_run_of(Site& site) {
  Run& run = site.run;
  look_at<kSize, false>(site, run.first, run.stride, run.count, false);
  run.count = 0;
  run.next = Run::kUnknown;
}

template void Observer::access<4, true>(uintptr_t, const void*, bool);
template void Observer::access<4, false>(uintptr_t, const void*, bool);
template void Observer::access<8, true>(uintptr_t, const void*, bool);
template void Observer::access<16, true>(uintptr_t, const void*, bool);
template void Observer::access<16, false>(uintptr_t, const void*, bool);

}  // namespace simt

// ---- What instrumented code calls

namespace {

template <unsigned kSize, bool kWrite>
SIMT_INLINE void report_access(const void* address, const void* code) {
  simt::Observer* observer = simt::observing;
  if (!observer) return;
  if constexpr (kWrite) {
    observer->write<kSize>(uintptr_t(address), code);
  } else {
    observer->read<kSize>(uintptr_t(address), code);
  }
  observer->end_turn();
}

template <unsigned kSize>
void report_pieces(const char* begin, size_t bytes, bool write, const void* code) {
  for (size_t i = 0; i < bytes; i += kSize) {
    simt::Observer* observer = simt::observing;
    if (!observer) return;
    const uintptr_t address = uintptr_t(begin + i);
    write ? observer->access<kSize, true>(address, code, false) : observer->access<kSize, false>(address, code, false);
    observer->end_turn();
  }
}

// A copy of a struct whose size is no power of two, taken as one of words, or of bytes.
void report_range(const void* begin, size_t bytes, bool write, const void* code) {
  const auto* from = static_cast<const char*>(begin);
  if ((uintptr_t(begin) | bytes) % 4 == 0) {
    report_pieces<4>(from, bytes, write, code);
  } else {
    report_pieces<1>(from, bytes, write, code);
  }
}

}  // namespace

#define SIMT_DEFINE_HOOKS(size)                                                                         \
  void __tsan_read##size(void* address) { report_access<size, false>(address, SIMT_CALLER); }           \
  void __tsan_write##size(void* address) { report_access<size, true>(address, SIMT_CALLER); }           \
  void __tsan_unaligned_read##size(void* address) { report_access<size, false>(address, SIMT_CALLER); } \
  void __tsan_unaligned_write##size(void* address) { report_access<size, true>(address, SIMT_CALLER); }

extern "C" {
SIMT_DEFINE_HOOKS(1)
SIMT_DEFINE_HOOKS(2)
SIMT_DEFINE_HOOKS(4)
SIMT_DEFINE_HOOKS(8)
SIMT_DEFINE_HOOKS(16)

void __tsan_read_range(void* begin, size_t bytes) { report_range(begin, bytes, false, SIMT_CALLER); }
void __tsan_write_range(void* begin, size_t bytes) { report_range(begin, bytes, true, SIMT_CALLER); }
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  report_range(from, bytes, false, SIMT_CALLER);
  report_range(to, bytes, true, SIMT_CALLER);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  report_range(from, bytes, false, SIMT_CALLER);
  report_range(to, bytes, true, SIMT_CALLER);
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  report_range(to, bytes, true, SIMT_CALLER);
  return std::memset(to, value, bytes);
}

#ifndef FLASHSTEPS_SANITIZE  // else the sanitizer's own, for host code; no kernels are linked then
void __ubsan_handle_out_of_bounds(void* /*description*/, uintptr_t index) {
  simt::Observer* observer = simt::observing;
  if (!observer) return;  // host code in a kernel file
  simt::observing = nullptr;
  observer->block().fail(simt::Kind::bad_index, SIMT_CALLER,
                         {{"index " + std::to_string(long(index)) + " of an array of fixed size"}});
}
#endif

// In host functions of a kernel file: for static variables, and for the reference counts of the standard library.
int8_t __tsan_atomic8_load(const volatile int8_t* address, int) { return __atomic_load_n(address, __ATOMIC_SEQ_CST); }
int32_t __tsan_atomic32_fetch_add(volatile int32_t* address, int32_t value, int) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
