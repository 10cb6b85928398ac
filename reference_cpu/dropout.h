// Which attention weights dropout keeps: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// 2011) in plain C++. The kernels have their own; that the two agree is a test of both.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>

#include "harness/problem.h"

namespace flash::reference {

// Ten rounds that turn a 128-bit counter into 128 random bits under a 64-bit key.
inline std::array<uint32_t, 4> philox4x32_10(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product_0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t product_2 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {uint32_t(product_2 >> 32) ^ counter[1] ^ key[0], uint32_t(product_2),
               uint32_t(product_0 >> 32) ^ counter[3] ^ key[1], uint32_t(product_0)};
    key[0] += 0x9E3779B9;  // the golden ratio, and √3 − 1: Weyl sequences
    key[1] += 0xBB67AE85;
  }
  return counter;
}

// The mask of one problem. It depends on where an element is, never on the order in which anyone asks.
class DropoutMask {
 public:
  explicit DropoutMask(const Problem& problem)
      : key_{uint32_t(problem.seed), uint32_t(problem.seed >> 32)},
        offset_(problem.offset),
        dropped_below_(uint64_t(std::floor(problem.dropout * 4294967296.0))) {}

  // Whether key j's weight for query i of query head b·Hq + h is kept. One Philox call draws four neighbouring keys.
  bool keeps(int64_t head, int64_t i, int64_t j) const {
    const std::array<uint32_t, 4> counter = {uint32_t(j / 4), uint32_t(i), uint32_t(head), offset_};
    return philox4x32_10(counter, key_)[j % 4] >= dropped_below_;
  }

 private:
  std::array<uint32_t, 2> key_;
  uint32_t offset_;
  uint64_t dropped_below_;  // of 2³² equally likely words, the first p·2³² mean "dropped"
};

}  // namespace flash::reference
