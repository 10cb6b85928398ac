// What the forward kernels of this chapter share: tiles of 16-bit elements in swizzled shared memory, the operands that
// tensor cores take from them, and a row's reductions. As in the PTX ISA, g = lane / 4 and t = lane % 4.
#pragma once
#include "harness/mask.h"
#include "harness/philox.h"
#include "harness/tensor_cores.h"

namespace {
using namespace flash;

constexpr float kLog2e = 1.44269504f;
constexpr float kLn2 = 0.69314718f;

// Where a tile of rows of D elements keeps chunk `chunk` (8 elements, 16 bytes) of row `row`. In plain order the chunks
// of a column would lie in the same banks, as a row is a multiple of 128 bytes long; so each row permutes its chunks.
template <int D>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * D + (chunk ^ (row & 7)) * 8;
}

// Starts the copy of rows row0 .. row0 + kRows − 1 of a row-major matrix into a tile. Rows from `rows` on become zeros.
template <int kRows, int D, int kThreads, class T>
__device__ __forceinline__ void start_tile(T* tile, const T* matrix, int row0, int rows) {
  constexpr int kChunks = D / 8, kRowsAtOnce = kThreads / kChunks;
  static_assert(kRows % kRowsAtOnce == 0);
  const int row = int(threadIdx.x) / kChunks, chunk = int(threadIdx.x) % kChunks;
  const T* const from = matrix + size_t(row0 + row) * D + chunk * 8;
#pragma unroll
  for (int r = 0; r < kRows; r += kRowsAtOnce)
    cp_async_16(&tile[swizzled<D>(row + r, chunk)], from + r * D, row0 + row + r < rows);
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < INFINITY; }

// Takes the elements of a tile that are NaN or ∞ out, of those that this thread has copied itself and waited for; zeros
// take their place. Whether there were any. A tensor core multiplies all it is given, and 0 · NaN is NaN: where a row
// does not see every key of a tile of V, it must not meet them. add_non_finite() gives them to the rows that do.
template <int kRows, int D, int kThreads, class T>
__device__ __forceinline__ bool take_out_non_finite(T* tile) {
  constexpr uint32_t kExponent = kIsBfloat16<T> ? 0x7f80 : 0x7c00;  // its bits are all set in NaN and ∞ alone
  bool found = false;
  for (int i = threadIdx.x; i < kRows * D / 8; i += kThreads) {
    T* const chunk = &tile[swizzled<D>(i / (D / 8), i % (D / 8))];
    const uint4 x = *reinterpret_cast<const uint4*>(chunk);
    bool here = false;
    for (uint32_t pair : {x.x, x.y, x.z, x.w})
      here |= (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
    if (!here) continue;
    found = true;
    for (int e = 0; e < 8; e++)
      if (!is_finite(float(chunk[e]))) chunk[e] = T(0.0f);
  }
  return found;
}

// Adds what was taken out of a tile of V, from key `V` on, to accumulators of O. counts(half, j): whether the weight of
// key j counts in row g + 8 · half.
template <int D, class T, class Counts>
__device__ __forceinline__ void add_non_finite(float (&o)[D / 8][4], const T* V, int keys, Counts counts) {
  for (int j = 0; j < keys; j++)
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float v = float(V[size_t(j) * D + 8 * n + 2 * (threadIdx.x & 3) + e]);
        if (is_finite(v)) continue;
        if (counts(0, j)) o[n][e] += v;
        if (counts(1, j)) o[n][2 + e] += v;
      }
}

// The lane's row and chunk in the 16 × 16 elements at a tile's corner, in the two orders in which ldmatrix fills
// operands.
template <int D>
__device__ __forceinline__ int corner_by_rows() {  // row = lane % 16
  const int lane = threadIdx.x & 31;
  return swizzled<D>(lane & 15, lane >> 4);
}
template <int D>
__device__ __forceinline__ int corner_by_chunks() {  // chunk = lane / 8 % 2
  const int lane = threadIdx.x & 31;
  return swizzled<D>((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
}

// The same, k times 16 columns to the right. The permutation stays within 64 columns.
__device__ __forceinline__ int right_of(int corner, int k) { return (corner ^ 16 * (k % 4)) + 64 * (k / 4); }

// Operand a: elements [row0 + g, + 8][16k + 2t, + 8] of the tile whose corner_by_rows() is `corner`.
template <int D, class T>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const T* shared, int corner, int row0, int k) {
  ldmatrix_x4(a, shared + right_of(corner, k) + row0 * D);
}

// Operands b of two products with the transposed tile (S = Q Kᵀ): the columns of b are rows row0 .. row0 + 7 and
// row0 + 8 .. row0 + 15 of the tile, its rows the tile's columns 16k .. 16k + 15. Takes corner_by_chunks().
template <int D, class T>
__device__ __forceinline__ void load_b_transposed(uint32_t (&b)[2][2], const T* shared, int corner, int row0, int k) {
  uint32_t r[4];
  ldmatrix_x4(r, shared + right_of(corner, k) + row0 * D);
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Operands b of two products with the tile as it is (O = P V): rows row0 .. row0 + 15, columns 16n .. 16n + 7 and
// 16n + 8 .. 16n + 15. Takes corner_by_rows().
template <int D, class T>
__device__ __forceinline__ void load_b(uint32_t (&b)[2][2], const T* shared, int corner, int row0, int n) {
  uint32_t r[4];
  ldmatrix_x4_trans(r, shared + right_of(corner, n) + row0 * D);
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Of the four lanes that share a row of an accumulator, in each of them.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Sets the dropped ones of an accumulator's weights to zero: rows `query` and query + 8, keys key0 + 2t, + 1. Four keys
// share a draw, and two lanes share four keys: one lane draws for the upper row, the other for the lower, and they
// swap.
__device__ __forceinline__ void drop_weights(float (&p)[4], const Dropout& drop, int head, int query, int key0) {
  const int t = threadIdx.x & 3;
  const bool odd = t & 1;
  const uint4 own = drop.words(head, odd ? query + 8 : query, key0 / 4 + t / 2);
  const uint32_t other_x = __shfl_xor_sync(0xffffffffu, odd ? own.x : own.z, 1);
  const uint32_t other_y = __shfl_xor_sync(0xffffffffu, odd ? own.y : own.w, 1);
  p[0] = (odd ? other_x : own.x) >= drop.threshold ? p[0] : 0.0f;
  p[1] = (odd ? other_y : own.y) >= drop.threshold ? p[1] : 0.0f;
  p[2] = (odd ? own.z : other_x) >= drop.threshold ? p[2] : 0.0f;
  p[3] = (odd ? own.w : other_y) >= drop.threshold ? p[3] : 0.0f;
}

}  // namespace
