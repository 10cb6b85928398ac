// Tiles of 16-bit elements in shared memory, and the tensor-core products on them, as the backward pass uses them.
//
// A warp's operands and results lie across its lanes in 16×16 blocks (harness/tensor_cores.h). Lane g·4 + t holds, of
// each 16×8 block of a result, elements [g][2t], [g][2t + 1], [g + 8][2t], [g + 8][2t + 1].
#pragma once
#include "harness/philox.h"
#include "harness/tensor_cores.h"

namespace {
using namespace flash;

// Where 8 elements (16 bytes) of a tile lie: piece `piece` of row `row`. Rows are not padded. Instead the pieces of
// each row change places (swizzle), so that the same piece of 8 neighbouring rows falls in different banks.
template <int kCols>
__device__ __forceinline__ int piece_at(int row, int piece) {
  static_assert(kCols == 32 || kCols % 64 == 0, "rows of 4 pieces, or of a multiple of 8");
  const int moved = kCols == 32 ? piece ^ (row / 2 & 3) : piece ^ (row & 7);
  return row * kCols + moved * 8;
}

// The row of a 16×16 block that the lane gives to ldmatrix. Its four 8×8 matrices come in one of two orders: `kDown`,
// the two of the left half first, or else the two of the upper half first. The block begins in row row0 + further.
//
// The swizzle is written so that col0, known at compile time, comes last: one instruction then makes the address from
// that of column 0, which is cheaper than keeping all of them in registers.
template <int kCols, bool kDown, class T>
__device__ __forceinline__ const T* block_row(const T* tile, int row0, int further, int col0) {
  const int lane = int(threadIdx.x % 32), second = lane / 8 % 2, fourth = lane / 16;
  const int row = row0 + lane % 8 + 8 * (kDown ? second : fourth);
  return tile + (piece_at<kCols>(row, kDown ? fourth : second) ^ col0) + further * kCols;
}

// Operand a, 16×16, from a tile of its columns.
template <int kCols, class T>
__device__ __forceinline__ void load_a_transposed(uint32_t (&a)[4], const T* tile, int row0, int col0) {
  ldmatrix_x4_trans(a, block_row<kCols, false>(tile, row0, 0, col0));
}

// sum += a·b for two neighbouring operands b, 16×8 each, that one ldmatrix has brought.
template <class T, int kM, int kN>
__device__ __forceinline__ void multiply(float (&sum)[kM][kN][4], int n, const uint32_t (&a)[kM][4],
                                         const uint32_t (&both)[4]) {
  const uint32_t left[2] = {both[0], both[1]}, right[2] = {both[2], both[3]};
#pragma unroll
  for (int m = 0; m < kM; m++) {
    mma_m16n8k16<T>(sum[m][n], a[m], left);
    mma_m16n8k16<T>(sum[m][n + 1], a[m], right);
  }
}

// sum = A Bᵀ: dot products of 16·kM rows of tile A, from row_a on, with 8·kN rows of tile B, from row_b on.
template <int D, class T, int kM, int kN>
__device__ __forceinline__ void dot_rows(float (&sum)[kM][kN][4], const T* A, int row_a, const T* B, int row_b) {
#pragma unroll
  for (int m = 0; m < kM; m++)
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[m][n][i] = 0.0f;
#pragma unroll 4  // all of D = 128 at once would keep too many addresses in registers
  for (int d = 0; d < D; d += 16) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; m++) ldmatrix_x4(a[m], block_row<D, true>(A, row_a, 16 * m, d));
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, block_row<D, false>(B, row_b, 8 * n, d));
      multiply<T>(sum, n, a, b);
    }
  }
}

// sum += a·B for the 16 rows of tile B from row_b on, and its 8·kN columns from col_b on.
template <int D, class T, int kM, int kN>
__device__ __forceinline__ void add_rows(float (&sum)[kM][kN][4], const uint32_t (&a)[kM][4], const T* B, int row_b,
                                         int col_b = 0) {
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, block_row<D, true>(B, row_b, 0, col_b + 8 * n));
    multiply<T>(sum, n, a, b);
  }
}

// What a product left in the registers as operand a of the next one: columns 16k to 16k + 15 of x, rounded to T.
template <class T, int kM, int kN>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[kM][4], const float (&x)[kM][kN][4], int k) {
#pragma unroll
  for (int m = 0; m < kM; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float(&pair)[4] = x[m][2 * k + i / 2];
      a[m][i] = pack<T>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
}

// Writes such an operand to rows [row0, row0 + 16·kM) and columns [col0, col0 + 16) of a tile.
template <int kCols, class T, int kM>
__device__ __forceinline__ void store_operand(T* tile, int row0, int col0, const uint32_t (&a)[kM][4]) {
  const int lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    T* place = tile + (piece_at<kCols>(row0 + g, 0) ^ (col0 + i / 2 * 8)) + i % 2 * 8 * kCols + 2 * t;
#pragma unroll
    for (int m = 0; m < kM; m++) *reinterpret_cast<uint32_t*>(place + 16 * m * kCols) = a[m][i];
  }
}

// Starts the copy of rows [row0, row0 + kRows) of a row-major [rows, D] matrix to a tile; rows past the end become 0.
template <int D, int kRows, int kThreads, class T>
__device__ __forceinline__ void copy_rows(T* tile, const T* matrix, int row0, int rows) {
  static_assert(kRows * (D / 8) % kThreads == 0, "each thread copies as much as the others");
#pragma unroll
  for (int i = 0; i < kRows * (D / 8); i += kThreads) {
    const int piece = (i + int(threadIdx.x)) % (D / 8), row = (i + int(threadIdx.x)) / (D / 8);
    cp_async_16(tile + piece_at<D>(row, piece), matrix + size_t(row0 + row) * D + piece * 8, row0 + row < rows);
  }
}

// Writes 16·kM rows of a gradient, times `factor`, by way of the warp's own rows [tile_row, …) of a tile that nobody
// needs any more: so that what a warp writes at once is contiguous.
template <int D, class T, int kM>
__device__ __forceinline__ void store_rows(const float (&sum)[kM][D / 8][4], float factor, T* tile, int tile_row,
                                           T* gradient, int row0, int rows) {
  const int lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < kM; m++)
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        *reinterpret_cast<uint32_t*>(tile + piece_at<D>(tile_row + 16 * m + 8 * half + g, n) + 2 * t) =
            pack<T>(sum[m][n][2 * half] * factor, sum[m][n][2 * half + 1] * factor);
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * kM * (D / 8); i += 32) {
    const int row = i / (D / 8), piece = i % (D / 8);
    if (row0 + row < rows)
      *reinterpret_cast<uint4*>(gradient + size_t(row0 + row) * D + piece * 8) =
          *reinterpret_cast<const uint4*>(tile + piece_at<D>(tile_row + row, piece));
  }
}

// Which of the lane's four elements of a 16×8 block of Pᵀ dropout keeps: a bit an element. The block is 16 keys from
// key0 by 8 queries from query0. A lane's elements belong to four draws of four neighbouring keys each, and four lanes
// need the same four draws. So each draws once, and the warp votes on the words.
__device__ __forceinline__ unsigned kept_keys_down(const Dropout& drop, int head, int query0, int key0) {
  const int lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4, mine = g % 4;
  const uint4 word = drop.words(head, query0 + 2 * t + mine % 2, key0 / 4 + g / 4 + mine / 2 * 2);
  const unsigned x = __ballot_sync(0xffffffffu, word.x >= drop.threshold);
  const unsigned y = __ballot_sync(0xffffffffu, word.y >= drop.threshold);
  const unsigned z = __ballot_sync(0xffffffffu, word.z >= drop.threshold);
  const unsigned w = __ballot_sync(0xffffffffu, word.w >= drop.threshold);
  const unsigned votes = (mine == 0 ? x : mine == 1 ? y : mine == 2 ? z : w) >> (g / 4 * 16 + t);
  return (votes & 1) | (votes >> 3 & 2) | (votes >> 6 & 4) | (votes >> 9 & 8);
}

// The same for a block of P, 16 queries by 8 keys: two lanes need the same two draws.
__device__ __forceinline__ unsigned kept_queries_down(const Dropout& drop, int head, int query0, int key0) {
  const int lane = int(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const uint4 word = drop.words(head, query0 + g + t % 2 * 8, key0 / 4 + t / 2);
  const unsigned x = __ballot_sync(0xffffffffu, word.x >= drop.threshold);
  const unsigned y = __ballot_sync(0xffffffffu, word.y >= drop.threshold);
  const unsigned z = __ballot_sync(0xffffffffu, word.z >= drop.threshold);
  const unsigned w = __ballot_sync(0xffffffffu, word.w >= drop.threshold);
  const unsigned even = (t % 2 ? z : x) >> (lane & ~1), odd = (t % 2 ? w : y) >> (lane & ~1);
  return (even & 1) | (odd & 1) << 1 | (even & 2) << 1 | (odd & 2) << 2;
}

}  // namespace
