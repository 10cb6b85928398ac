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

// Checks one cell against this access, and notes the access there. After a read by one thread and another one by a
// second, only the second is kept, with a flag: that is enough to find a write by any third thread, or by the second
// one itself if it has met nobody since.
template <bool kWrite>
SIMT_INLINE void Observer::check_cell(const Site& site, Cell& cell, uintptr_t address, bool atomic) {
  const uint64_t stamp = order_.stamp(me_);
  // Moments below this one come before this access anyway. In shared memory those of other blocks are meaningless.
  const uint64_t floor = site.traffic.shared ? order_.floor() : launch_floor_;
  const uint64_t write = cell.write.load(std::memory_order_relaxed);
  const uint64_t read = cell.read.load(std::memory_order_relaxed);
  const auto is_mine = [&](uint64_t moment) { return moment >> Moment::kThreadShift == stamp >> Moment::kThreadShift; };

  if constexpr (kWrite) {
    if (write >= floor && !is_mine(write) && !(atomic && (write & Moment::kFlag)) && conflicts(Moment(write)))
      race(site, address, Moment(write), true, atomic);
    if (read >= floor && (is_mine(read) ? read & Moment::kFlag : conflicts(Moment(read))))
      race(site, address, Moment(read), false, atomic);
    cell.read.store(0, std::memory_order_relaxed);
    cell.write.store(stamp | site.number << Moment::kSiteShift | (atomic ? Moment::kFlag : 0),
                     std::memory_order_relaxed);
  } else {
    if (is_mine(read)) return;  // nothing can have happened since
    if (write >= floor && !is_mine(write) && !(atomic && (write & Moment::kFlag)) && conflicts(Moment(write)))
      race(site, address, Moment(write), true, atomic);
    if (atomic) return;  // of those that read atomically none is remembered
    const bool others = read >= floor && conflicts(Moment(read));
    cell.read.store(stamp | site.number << Moment::kSiteShift | (others ? Moment::kFlag : 0),
                    std::memory_order_relaxed);
  }
}

// Checks all cells of an access. Words have cells of their own; single bytes and halves have others, which accesses to
// whole words look at only when there are any.
template <unsigned kSize, bool kWrite>
SIMT_INLINE void Observer::check_order(const Site& site, uintptr_t address, bool atomic) {
  Region& region = *site.region;
  if (kWrite && product_groups_ > 0 && &region == &dynamic_) check_product_reads(site, address, kSize);
  if constexpr (kSize >= 4) {
    Cell* cells = region.words(address);
    for (unsigned i = 0; i < kSize / 4; ++i) check_cell<kWrite>(site, cells[i], address + 4 * i, atomic);
    if (!region.has_byte_cells()) return;
  } else {
    if (!region.has_byte_cells()) region.observe_bytes();
    // Of the word around only accesses to all of it are noted; this one must come after them.
    const Cell& word = *region.words(address);
    const uint64_t floor = site.traffic.shared ? order_.floor() : launch_floor_;
    const uint64_t write = word.write.load(std::memory_order_relaxed), read = word.read.load(std::memory_order_relaxed);
    if (write >= floor && conflicts(Moment(write))) race(site, address, Moment(write), true, atomic);
    if (kWrite && read >= floor && conflicts(Moment(read))) race(site, address, Moment(read), false, atomic);
  }
  Cell* cells = region.byte_cells(address);
  for (unsigned i = 0; i < kSize; ++i) check_cell<kWrite>(site, cells[i], address + i, atomic);
}

// The same for many bytes at once, as far as they fill words.
template <bool kWrite>
void Observer::check_range(const Site& site, uintptr_t address, size_t bytes, bool atomic) {
  Region& region = *site.region;
  const uintptr_t begin = (address + 3) & ~uintptr_t(3), end = (address + bytes) & ~uintptr_t(3);
  if (kWrite && product_groups_ > 0 && &region == &dynamic_) check_product_reads(site, address, bytes);
  for (uintptr_t word = begin; word < end; word += 4) check_cell<kWrite>(site, *region.words(word), word, atomic);
  if (!region.has_byte_cells()) return;
  for (uintptr_t byte = begin; byte < end; ++byte) check_cell<kWrite>(site, *region.byte_cells(byte), byte, atomic);
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

SIMT_INLINE void Observer::count(Site& site, uintptr_t address) {
  const unsigned warp = unsigned(me_) / kWarpSize, lane = unsigned(me_) % kWarpSize;
  if (!site.streams[warp].add_expected(lane, uint32_t(address))) [[unlikely]]
    count_unexpected(site, address);
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

template <unsigned kSize, bool kWrite>
SIMT_INLINE void Observer::access(uintptr_t address, const void* code, bool atomic) {
  if (address - uintptr_t(block_.stacks) < kMaxThreads * kStackBytes) return;  // a local variable
  Site* site = recent_[uintptr_t(code) % kRecentSites];
  if (site->code != code || !site->region->contains(address, kSize)) [[unlikely]] {
    site = other_site<kSize, kWrite>(address, code);
    if (!site) return;  // constant memory
  }
  if (address % kSize != 0) [[unlikely]]
    misaligned(*site, address);
  count(*site, address);
  if (check_written<kSize, kWrite>(*site, address, atomic)) check_order<kSize, kWrite>(*site, address, atomic);
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
  observer->access<kSize, kWrite>(uintptr_t(address), code, false);
  observer->end_turn();
}

// A copy of a struct whose size is no power of two, taken as one of words, or of bytes.
void report_range(const void* begin, size_t bytes, bool write, const void* code) {
  const auto* from = static_cast<const char*>(begin);
  if ((uintptr_t(begin) | bytes) % 4 == 0) {
    for (size_t i = 0; i < bytes; i += 4)
      write ? report_access<4, true>(from + i, code) : report_access<4, false>(from + i, code);
  } else {
    for (size_t i = 0; i < bytes; ++i)
      write ? report_access<1, true>(from + i, code) : report_access<1, false>(from + i, code);
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
