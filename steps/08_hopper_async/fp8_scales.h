// What quantising to e4m3 has in common for Q, K and V, for fp8.cu: the scales, powers of two, and where they come
// from.
//
// Page: docs/08_hopper_async.md, "Eight bits".
#pragma once
#include <cmath>

#include "harness/wgmma.h"

namespace {
using namespace flash;

// The scales of a tile of K and V, powers of two, as bf16; the attention reads both at once.
struct alignas(4) TileScales {
  uint16_t v, k;
};
__device__ inline uint16_t bf16_bits(float power_of_two) { return uint16_t(__float_as_uint(power_of_two) >> 16); }

// What quantising leaves for the attention. Scales: what e4m3 is to be multiplied by.
struct Quantised {
  uint8_t *Q, *K;  // [heads][rows][D]
  uint8_t* V;      // [heads][D][pitch], the keys in the order of first_key_of_word()
  float* q_scale;  // [heads][tiles of Bc rows]
  TileScales* kv_scales;
  float* largest;  // numbers in Q, K and V, for tensor scales; then each head's largest scale of V
};

// TMA wants rows of multiples of 16 bytes.
__host__ __device__ inline int pitch_of(int keys) { return ceil_div(keys, 16) * 16; }

// The smallest power of two that brings numbers up to `largest` into the range of e4m3, ±448. Multiplying by it is
// exact, and e4m3, a floating-point format, has as many digits after it as with any other scale.
__device__ inline float scale_for(float largest) {
  const unsigned up = (__float_as_uint(largest / 448.0f) + 0x7fffff) & 0x7f800000;
  return __uint_as_float(max(up, 0x00800000u));  // 2^-126 for zeros
}

// For numbers that are at least 0, whose bits are ordered as they are.
__device__ inline void raise_to(float* largest, float x) {
  atomicMax(reinterpret_cast<int*>(largest), __float_as_int(x));
}

// Eight neighbours of a row, as they lie in memory.
template <class T>
struct Eight {
  uint32_t word[2 * sizeof(T)];
};
template <class T>
__device__ __forceinline__ Eight<T> load_eight(const T* from, bool inside) {
  Eight<T> eight;
#pragma unroll
  for (int i = 0; i < int(sizeof(T)) / 2; i++) {
    const uint4 four = inside ? reinterpret_cast<const uint4*>(from)[i] : make_uint4(0, 0, 0, 0);
    eight.word[4 * i] = four.x, eight.word[4 * i + 1] = four.y;
    eight.word[4 * i + 2] = four.z, eight.word[4 * i + 3] = four.w;
  }
  return eight;
}
template <class T>
__device__ __forceinline__ float number(const Eight<T>& eight, int i) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(eight.word[i]);
  return __uint_as_float(i % 2 ? eight.word[i / 2] & 0xffff0000u : eight.word[i / 2] << 16);
}

// The bits of the largest magnitude among eight, as a float. The bits of magnitudes are ordered as they are, ∞ and NaN
// come after all numbers.
template <class T>
__device__ __forceinline__ uint32_t largest_bits(const Eight<T>& eight) {
  uint32_t bits = 0;
#pragma unroll
  for (const uint32_t word : eight.word)
    bits = sizeof(T) == 4 ? max(bits, word & 0x7fffffff) : max(bits, max(word & 0x7fff0000, word << 16 & 0x7fff0000));
  return bits;
}

// The largest of all threads' x. `part` is 32 floats of shared memory that nobody else has used since the last but one
// barrier.
__device__ __forceinline__ float block_max(float x, float* part) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  for (int warp = 0; warp < int(blockDim.x) / 32; warp++) x = fmaxf(x, part[warp]);
  return x;
}

// Where scales come from: each tile's own numbers; or those of the whole tensor, which a launch before has measured.
enum class Scales { of_tiles, measure, of_tensor };

// What a thread multiplies its numbers by, the largest of them being `most`. e4m3 has NaN, but no ∞: who has one brings
// NaN in its place, and whoever meets that looks at the given numbers.
__device__ inline float factor_for(float scale, float most) { return most < INFINITY ? 1.0f / scale : NAN; }

}  // namespace
