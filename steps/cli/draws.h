// Random numbers for the checks: the same on every machine and in every build.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "reference_cpu/dropout.h"

namespace flash::cli {

// A stream of random words: Philox4x32-10 with the seed for a key and the counter counted up. Streams of one seed are
// told apart by two numbers of the caller's.
class Draws {
 public:
  Draws(uint64_t seed, uint32_t stream, uint32_t part)
      : key_{uint32_t(seed), uint32_t(seed >> 32)}, stream_(stream), part_(part) {}

  uint32_t word() {
    if (next_ % 4 == 0) four_ = reference::philox4x32_10({uint32_t(next_ / 4), stream_, part_, kTag}, key_);
    return four_[next_++ % 4];
  }
  uint64_t long_word() {
    const uint64_t high = word();  // an expression of both would leave their order to the compiler
    return high << 32 | word();
  }
  // 0, …, count − 1.
  int below(int count) { return int(uint64_t(word()) * uint64_t(count) >> 32); }
  // True in `percent` of a hundred cases.
  bool chance(int percent) { return below(100) < percent; }

 private:
  static constexpr uint32_t kTag = 0x666c6173;  // no counter of the dropout mask: its offset is 0 here

  std::array<uint32_t, 2> key_;
  uint32_t stream_, part_;
  uint64_t next_ = 0;
  std::array<uint32_t, 4> four_{};
};

}  // namespace flash::cli
