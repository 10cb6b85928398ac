// Dropout without a stored mask: whether a weight is kept is a pure function of the seed and its place in P, so every
// tiling of the work, every device and the backward pass draw the same mask.
//
// Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3.
#pragma once
#include "harness/kernel.h"

namespace flash {
inline namespace FLASH_TARGET {

// Ten rounds of multiply and mix turn a 128-bit counter into four random 32-bit words.
__host__ __device__ inline uint4 philox4x32_10(uint4 counter, uint2 key) {
  for (int round = 0; round < 10; round++) {
    const uint64_t x = uint64_t(0xD2511F53u) * counter.x;
    const uint64_t z = uint64_t(0xCD9E8D57u) * counter.z;
    counter = make_uint4(uint32_t(z >> 32) ^ counter.y ^ key.x, uint32_t(z), uint32_t(x >> 32) ^ counter.w ^ key.y,
                         uint32_t(x));
    key = make_uint2(key.x + 0x9E3779B9u, key.y + 0xBB67AE85u);
  }
  return counter;
}

// What a dropped weight is stored as: −0. It adds nothing, and is told from a kept one too small for a float, +0: a NaN
// in V reaches a query whose weight for it is tiny, and none whose weight for it was dropped.
constexpr float kDropped = -0.0f;
__device__ inline bool is_dropped(float weight) { return __float_as_uint(weight) == 0x80000000u; }

// The dropout of one problem, passed to kernels by value.
struct Dropout {
  uint32_t threshold;  // a weight is dropped when its word is below: p · 2³²
  float kept_scale;    // 1 / (1 − p)
  uint2 key;           // the seed
  uint32_t offset;

  explicit Dropout(const Problem& p)
      : threshold(uint32_t(p.dropout * 4294967296.0)),
        kept_scale(float(1.0 / (1.0 - p.dropout))),
        key(make_uint2(uint32_t(p.seed), uint32_t(p.seed >> 32))),
        offset(p.offset) {}

  // The words of the weights P[head, query, 4·quad .. 4·quad + 3]; `head` is b·Hq + h.
  __host__ __device__ uint4 words(int head, int query, int quad) const {
    return philox4x32_10(make_uint4(uint32_t(quad), uint32_t(query), uint32_t(head), offset), key);
  }

  // Whether P[head, query, key] is kept.
  __host__ __device__ bool keeps(int head, int query, int key_index) const {
    const uint4 four = words(head, query, key_index / 4);
    const int place = key_index % 4;
    const uint32_t word = place == 0 ? four.x : place == 1 ? four.y : place == 2 ? four.z : four.w;
    return word >= threshold;
  }
};

}  // namespace FLASH_TARGET
}  // namespace flash
