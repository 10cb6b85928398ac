// What the observer knows of each word of memory: whether it was written, and by whom it was last written and read.
// Not kept: older accesses than the last. A race with one of those is found only if later accesses race too.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace simt {

// A past access, packed into a word: which block, at which of its thread's moments, which thread, at which place in the
// code. Blocks are numbered over all launches, a thread's moments are counted by the barriers that it has passed, so a
// later moment of a block is a greater number. Zero: no access.
//
// In the place of a thread there may be an agent: something that works beside the threads, such as the copies that
// report to one mbarrier. An agent's moments count as greater than those of all threads.
class Moment {
 public:
  static constexpr int kSiteBits = 12, kThreadBits = 10, kClockBits = 20, kBlockBits = 20;
  static constexpr int kSiteShift = 1, kThreadShift = kSiteShift + kSiteBits, kClockShift = kThreadShift + kThreadBits;
  static constexpr int kAgentShift = kClockShift + kClockBits, kBlockShift = kAgentShift + 1;
  static constexpr uint64_t kFlag =
      1;  // of a write: it was atomic. Of a read: others read too, unordered with this one
  static constexpr uint64_t kAgent = uint64_t(1) << kAgentShift;

  explicit Moment(uint64_t bits) : bits_(bits) {}
  // Without place and flag: what all accesses of a thread between two barriers have in common.
  static uint64_t stamp(uint64_t block, uint64_t clock, uint64_t thread) {
    return block << kBlockShift | clock << kClockShift | thread << kThreadShift;
  }
  static uint64_t agent_stamp(uint64_t block, uint64_t clock, uint64_t agent) {
    return stamp(block, clock, agent) | kAgent;
  }

  unsigned block() const { return unsigned(bits_ >> kBlockShift); }
  unsigned clock() const { return unsigned(bits_ >> kClockShift) & ((1u << kClockBits) - 1); }
  unsigned thread() const { return unsigned(bits_ >> kThreadShift) & ((1u << kThreadBits) - 1); }
  unsigned site() const { return unsigned(bits_ >> kSiteShift) & ((1u << kSiteBits) - 1); }
  bool is_agent() const { return bits_ & kAgent; }  // then thread() is the agent's number
  bool flag() const { return bits_ & kFlag; }

 private:
  uint64_t bits_;
};

// The last write and the last read since then of each of some words, or bytes, in a row. Workers may look at one at the
// same time. The two lie apart: of an array that nobody writes to only one is looked at.
struct Cells {
  static constexpr size_t kBytes = 2 * sizeof(uint64_t);

  std::atomic<uint64_t>* writes;
  std::atomic<uint64_t>* reads;
};

enum class Space { global, shared, constant };

// What is known of a byte: nobody has written it, somebody has, an asynchronous copy that has started will.
enum Written : uint8_t { kUnwritten = 0, kWritten = 1, kInFlight = 2 };

// A piece of memory that kernels may touch: an array in device memory, a shared variable, a block's dynamic shared
// memory. What is known about it takes as much memory as it has, four times that once it is observed, and more when
// single bytes or halves are accessed; all of it costs nothing until it is touched.
class Region {
 public:
  Region(Space space, uintptr_t begin, size_t bytes, std::string name);
  ~Region();
  Region(const Region&) = delete;

  bool contains(uintptr_t address, size_t size) const {
    return address - begin < bytes && size <= bytes - (address - begin);
  }
  // One byte for each: whether it is written.
  uint8_t* written(uintptr_t address) { return written_ + (address - begin); }
  // One cell for each aligned 4 bytes.
  Cells words(uintptr_t address) const { return cells_at(words_, capacity_ / 4, (address - base_) / 4); }
  // One cell for each byte, made when something smaller than a word is accessed for the first time.
  Cells byte_cells(uintptr_t address) const {
    return cells_at(bytes_.load(std::memory_order_relaxed), capacity_, address - base_);
  }
  bool has_byte_cells() const { return bytes_.load(std::memory_order_relaxed) != nullptr; }

  bool is_observed() const { return words_ != nullptr; }
  void observe();          // makes the cells for words
  void observe_bytes();    // makes the cells for bytes
  void forget_accesses();  // as if nobody had accessed it
  void mark(uintptr_t address, size_t size, Written state);
  // Whether every byte is known to be written: then none need be looked at. Found out by a look at all of them, which
  // an array is worth once for each launch while no kernel runs.
  bool is_all_written() const { return all_written_; }
  void look_whether_all_written();
  // Whether anything in an array may have been written in this launch: else no write need be looked for.
  bool has_writes() const { return has_writes_.load(std::memory_order_relaxed); }
  void set_has_writes(bool has) {
    if (has_writes() != has) has_writes_.store(has, std::memory_order_relaxed);
  }

  const Space space;
  const uintptr_t begin;
  size_t bytes;
  const std::string name;      // of a shared variable
  bool checks_writing = true;  // false when somebody unobserved may have written here
  bool has_copies = false;     // whether any byte may be in flight

 private:
  using Moments = std::atomic<uint64_t>*;
  static Cells cells_at(Moments all, size_t count, size_t index) { return {all + index, all + count + index}; }

  const uintptr_t base_;   // begin, rounded down to a word
  const size_t capacity_;  // of the shadow, in bytes of memory
  bool all_written_ = false;
  std::atomic<bool> has_writes_ = true;
  uint8_t* written_ = nullptr;
  Moments words_ = nullptr;  // writes, then reads
  std::atomic<Moments> bytes_ = nullptr;
};

// The array in device memory that contains this address; null if there is none. The array nearest to it, if one is
// within a guard zone's distance.
Region* device_region_at(uintptr_t address);
Region* device_region_near(uintptr_t address);

// Makes all arrays in device memory ready for observation. Throws flash::Error if there is not enough memory for that.
void observe_device_memory();

// Calls `visit` for each array in device memory.
void for_each_device_region(void (*visit)(Region&));

// Memory from the system that reads as zero and costs nothing until it is touched.
void* reserve_zeros(size_t bytes);
void release_zeros(void* memory, size_t bytes);

}  // namespace simt
