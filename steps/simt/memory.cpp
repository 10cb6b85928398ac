// Device memory, and the shadow that the observer keeps of it.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>

#include "harness/error.h"
#include "harness/interrupt.h"
#include "simt/executor.h"
#include "simt/shadow.h"

namespace simt {

void* reserve_zeros(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

void release_zeros(void* memory, size_t bytes) { munmap(memory, bytes); }

// Calls work(begin, size) for pieces of so many bytes, between which Ctrl-C is answered.
template <class F>
static void in_pieces(size_t bytes, F work) {
  constexpr size_t kPiece = 32 << 20;
  for (size_t at = 0; at < bytes; at += kPiece) {
    flash::throw_if_interrupted();
    work(at, std::min(kPiece, bytes - at));
  }
}

// ---- The shadow

Region::Region(Space space, uintptr_t begin, size_t bytes, std::string name)
    : space(space),
      begin(begin),
      bytes(bytes),
      name(std::move(name)),
      base_(begin & ~uintptr_t(3)),
      capacity_(bytes + 16),
      written_(static_cast<uint8_t*>(reserve_zeros(capacity_))) {}

Region::~Region() {
  release_zeros(written_, capacity_);
  if (words_) release_zeros(words_, capacity_ / 4 * Cells::kBytes);
  if (has_byte_cells()) release_zeros(bytes_, capacity_ * Cells::kBytes);
}

void Region::observe() {
  if (!words_) words_ = static_cast<Moments>(reserve_zeros(capacity_ / 4 * Cells::kBytes));
}

void Region::observe_bytes() {
  static std::mutex one_at_a_time;  // two workers may want them
  std::lock_guard lock(one_at_a_time);
  if (!has_byte_cells()) bytes_ = static_cast<Moments>(reserve_zeros(capacity_ * Cells::kBytes));
}

void Region::forget_accesses() {
  // The system puts zeros in the place of pages given back.
  if (words_) madvise(words_, capacity_ / 4 * Cells::kBytes, MADV_DONTNEED);
  if (has_byte_cells()) madvise(bytes_, capacity_ * Cells::kBytes, MADV_DONTNEED);
}

void Region::mark(uintptr_t address, size_t size, Written state) {
  std::memset(written(address), state, size);
  has_copies |= state == kInFlight;
  if (state != kWritten) all_written_ = false;
}

void Region::look_whether_all_written() {
  if (all_written_) return;
  all_written_ = true;
  in_pieces(bytes, [&](size_t at, size_t size) {
    const auto is_written = [](uint8_t state) { return state == kWritten; };
    all_written_ = all_written_ && std::all_of(written_ + at, written_ + at + size, is_written);
  });
}

// ---- Arrays in device memory

namespace {

constexpr size_t kAlignment = 1024;
constexpr unsigned char kGuardPattern = 0xa5;

// By the address after the last byte.
std::map<uintptr_t, std::unique_ptr<Region>> arrays;

Region& array_of(const void* memory, size_t bytes, const char* what) {
  Region* array = device_region_at(uintptr_t(memory));
  // An array of no bytes contains no address.
  if (!array)
    if (const auto it = arrays.find(uintptr_t(memory)); it != arrays.end()) array = it->second.get();
  if (!array || uintptr_t(memory) + bytes > array->begin + array->bytes)
    throw std::out_of_range(std::string(what) + ": not inside one array of device memory");
  return *array;
}

unsigned char* front_guard(const Region& array) { return reinterpret_cast<unsigned char*>(array.begin) - kGuardBytes; }

// Behind the array the guard fills up to a multiple of the alignment.
size_t back_guard_bytes(size_t bytes) { return kGuardBytes + (kAlignment - bytes % kAlignment) % kAlignment; }

bool holds_pattern(const unsigned char* guard, size_t bytes) {
  return guard[0] == kGuardPattern && std::memcmp(guard, guard + 1, bytes - 1) == 0;
}

}  // namespace

Region* device_region_at(uintptr_t address) {
  const auto it = arrays.upper_bound(address);
  return it != arrays.end() && it->second->contains(address, 1) ? it->second.get() : nullptr;
}

Region* device_region_near(uintptr_t address) {
  const auto next = arrays.lower_bound(address);
  if (next != arrays.end() && address + kGuardBytes >= next->second->begin) return next->second.get();
  if (next == arrays.begin()) return nullptr;
  const auto before = std::prev(next);
  return address < before->first + kGuardBytes ? before->second.get() : nullptr;
}

void for_each_device_region(void (*visit)(Region&)) {
  for (auto& [end, array] : arrays) visit(*array);
}

// The cells for words, and as much again in case that single bytes are accessed.
static double observing_bytes(double bytes) { return bytes + bytes / 4 * Cells::kBytes; }

double memory_of_array(double bytes, bool observed) {
  return 2 * kGuardBytes + 2 * kAlignment + 2 * bytes + (observed ? observing_bytes(bytes) : 0);
}

void* allocate(size_t bytes) {
  const size_t all = kGuardBytes + bytes + back_guard_bytes(bytes);
  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };
  std::unique_ptr<unsigned char, Free> owner(static_cast<unsigned char*>(std::aligned_alloc(kAlignment, all)));
  if (!owner) throw std::bad_alloc();
  unsigned char *memory = owner.get(), *begin = memory + kGuardBytes;
  std::memset(memory, kGuardPattern, kGuardBytes);
  in_pieces(bytes, [&](size_t at, size_t size) { std::memset(begin + at, 0xff, size); });
  std::memset(begin + bytes, kGuardPattern, back_guard_bytes(bytes));
  auto array = std::make_unique<Region>(Space::global, uintptr_t(begin), bytes, "");
  arrays[uintptr_t(begin) + bytes] = std::move(array);
  owner.release();
  return begin;
}

void free(void* memory) noexcept {
  for (auto it = arrays.lower_bound(uintptr_t(memory)); it != arrays.end(); ++it) {
    if (it->second->begin != uintptr_t(memory)) continue;
    std::free(front_guard(*it->second));
    arrays.erase(it);
    return;
  }
}

void write(void* to, const void* from, size_t bytes) {
  Region& array = array_of(to, bytes, "write");
  if (bytes == 0) return;
  in_pieces(bytes, [&](size_t at, size_t size) {
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, size);
    array.mark(uintptr_t(to) + at, size, kWritten);
  });
}

void read(void* to, const void* from, size_t bytes) {
  array_of(from, bytes, "read");
  in_pieces(bytes, [&](size_t at, size_t size) {
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, size);
  });
}

void poison(void* memory, size_t bytes) {
  Region& array = array_of(memory, bytes, "poison");
  in_pieces(bytes, [&](size_t at, size_t size) {
    std::memset(static_cast<char*>(memory) + at, 0xff, size);
    array.mark(uintptr_t(memory) + at, size, kUnwritten);
  });
  if (bytes == array.bytes) array.checks_writing = true;
}

bool guards_intact(const void* memory) {
  const Region& array = array_of(memory, 0, "guards_intact");
  return holds_pattern(front_guard(array), kGuardBytes) &&
         holds_pattern(reinterpret_cast<const unsigned char*>(array.begin) + array.bytes,
                       back_guard_bytes(array.bytes));
}

// The number after a word of a file that the system keeps; `otherwise` if there is none ("max" is none).
static size_t number_after(const char* path, const std::string& word, size_t otherwise) {
  std::ifstream file(path);
  size_t number;
  if (word.empty()) return file >> number ? number : otherwise;
  for (std::string found; file >> found;)
    if (found == word && file >> number) return number;
  return otherwise;
}

size_t available_bytes() {
  const size_t kilobytes = number_after("/proc/meminfo", "MemAvailable:", SIZE_MAX >> 10);  // unknown: let it fail
  // A container may be granted less than the machine has. Cached files do not count: they go when memory is needed.
  const size_t granted = number_after("/sys/fs/cgroup/memory.max", "", SIZE_MAX);
  const size_t taken = number_after("/sys/fs/cgroup/memory.current", "", 0);
  const size_t cached = std::min(taken, number_after("/sys/fs/cgroup/memory.stat", "inactive_file", 0));
  const size_t left = granted > taken - cached ? granted - (taken - cached) : 0;
  return std::min(kilobytes << 10, left);
}

void observe_device_memory() {
  double sum = 0;
  for (const auto& [end, array] : arrays)
    if (!array->is_observed()) sum += observing_bytes(double(array->bytes));
  const auto bytes = size_t(sum);
  // Most of what programs use is small; the system need not be asked for it.
  if (bytes > (size_t(64) << 20) && bytes > available_bytes())
    throw flash::Error("out of memory: observing device memory takes " + std::to_string(bytes) + " bytes more, " +
                       std::to_string(available_bytes()) + " are free; try a smaller problem");
  for (const auto& [end, array] : arrays) {
    array->observe();
    array->look_whether_all_written();
    array->set_has_writes(false);
  }
}

}  // namespace simt
