// The two matrix products of attention on tiles in shared memory, each thread with a small block of results in its
// registers. Chapter 03 works this out (steps/03_tiling/register_tiles.cu says why everything is where it is); the
// chapters after it build on the result.
//
// A warp's 32 lanes stand 4 high and 8 wide. With R rows and C columns a thread, a warp computes 4R rows of 8C columns:
//
//     thread (y, x) of a warp owns rows  first + 4r + y  (r < R)   and columns  32 (c / 4) + 4x + c % 4  (c < C)
//
// so that its columns are groups of four neighbours: one float4, and one draw of dropout's four random words.
#pragma once
#include "harness/kernel.h"

namespace flash {
inline namespace FLASH_TARGET {

constexpr int kTilePad = 4;  // floats after each row of a tile: rows that are read together fall in different banks

// Where the running thread stands: its warp in the block, and its lane's row and column in the warp.
struct WarpPlace {
  int warp = int(threadIdx.x / 32), y = int(threadIdx.x % 32 / 8), x = int(threadIdx.x % 8);

  template <int R>
  __device__ int row(int r) const {
    return warp * 4 * R + 4 * r + y;
  }
  __device__ int column(int c) const { return c / 4 * 32 + 4 * x + c % 4; }
};

// In which row of its tile a right-hand operand's row j is stored: the 8 lanes beside each other, whose rows are four
// apart, then read 8 neighbouring rows of the tile.
__device__ constexpr int slot(int j) { return (j / 32 * 4 + j % 4) * 8 + j % 32 / 4; }

// Copies rows [row0, row0 + kRows) of a row-major [rows, D] matrix into a tile, 16 bytes a thread at a time; rows past
// the end become zeros. `kSlots`: in the order of slot(), for a right-hand operand.
template <int kRows, int D, bool kSlots>
__device__ void load_tile(float (&tile)[kRows][D + kTilePad], const float* matrix, int row0, int rows) {
  for (int i = threadIdx.x; i < kRows * (D / 4); i += blockDim.x) {
    const int row = i / (D / 4), column = i % (D / 4) * 4;
    float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row0 + row < rows) four = *reinterpret_cast<const float4*>(matrix + size_t(row0 + row) * D + column);
    *reinterpret_cast<float4*>(&tile[kSlots ? slot(row) : row][column]) = four;
  }
}

// A tile on its way from HBM to shared memory, in the registers of a block's kThreads threads: fetched before a product
// and stored after it, so that the product hides the latency of the loads.
template <int kRows, int D, int kThreads>
struct TileInFlight {
  static constexpr int kPieces = kRows * D / 4 / kThreads;
  static_assert(kPieces * kThreads * 4 == kRows * D, "each thread has as many 16-byte pieces as the others");
  float4 piece[kPieces];

  // Loads rows [row0, row0 + kRows) of a row-major [rows, D] matrix; rows past the end become zeros.
  __device__ void fetch(const float* matrix, int row0, int rows) {
#pragma unroll
    for (int k = 0; k < kPieces; k++) {
      const int i = k * kThreads + int(threadIdx.x), row = i / (D / 4), column = i % (D / 4) * 4;
      piece[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (row0 + row < rows) piece[k] = *reinterpret_cast<const float4*>(matrix + size_t(row0 + row) * D + column);
    }
  }

  // Stores what was fetched as a right-hand operand, in the order of slot().
  __device__ void store(float (&tile)[kRows][D + kTilePad]) const {
#pragma unroll
    for (int k = 0; k < kPieces; k++) {
      const int i = k * kThreads + int(threadIdx.x), row = i / (D / 4), column = i % (D / 4) * 4;
      *reinterpret_cast<float4*>(&tile[slot(row)][column]) = piece[k];
    }
  }
};

// sum[r][c] += Σ_d A[row r][d] · B[column c][d]: a tile of A Bᵀ. B lies in the order of slot().
template <int R, int C, int D, int kRowsA, int kRowsB>
__device__ void add_dots(float (&sum)[R][C], const float (&A)[kRowsA][D + kTilePad],
                         const float (&B)[kRowsB][D + kTilePad]) {
  const WarpPlace place;
#pragma unroll 2
  for (int d = 0; d < D; d += 4) {
    float4 a[R];
#pragma unroll
    for (int r = 0; r < R; r++) a[r] = *reinterpret_cast<const float4*>(&A[place.row<R>(r)][d]);
#pragma unroll
    for (int c = 0; c < C; c++) {
      const float4 b = *reinterpret_cast<const float4*>(&B[c * 8 + place.x][d]);  // = slot(place.column(c))
#pragma unroll
      for (int r = 0; r < R; r++) {
        sum[r][c] = fmaf(a[r].x, b.x, sum[r][c]);
        sum[r][c] = fmaf(a[r].y, b.y, sum[r][c]);
        sum[r][c] = fmaf(a[r].z, b.z, sum[r][c]);
        sum[r][c] = fmaf(a[r].w, b.w, sum[r][c]);
      }
    }
  }
}

// For add_weighted_rows: every term counts.
struct AllTerms {
  __device__ constexpr bool operator()(int, int, float) const { return true; }
};

// sum[r][c] += Σ_j P[row r][j] · V[j][column c]: a tile of P V. V's row j lies at slot(j).
//
// `counts(r, j, weight)` says whether term j belongs to row r. Where not every row sees every key it must: a weight of
// 0 does not keep a NaN in V out, since 0 · NaN = NaN.
template <int R, int C, int J, int D, int kRowsP, class Counts>
__device__ void add_weighted_rows(float (&sum)[R][C], const float (&P)[kRowsP][J + kTilePad],
                                  const float (&V)[J][D + kTilePad], Counts counts) {
  static_assert(C * 8 == D, "a thread has D / 8 columns");
  const WarpPlace place;
#pragma unroll 2
  for (int j = 0; j < J; j += 4) {
    float4 p[R];
#pragma unroll
    for (int r = 0; r < R; r++) p[r] = *reinterpret_cast<const float4*>(&P[place.row<R>(r)][j]);
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
      for (int c = 0; c < C; c += 4) {
        const float4 v = *reinterpret_cast<const float4*>(&V[slot(j) + 8 * k][place.column(c)]);  // slot(j + k)
#pragma unroll
        for (int r = 0; r < R; r++) {
          const float weight = k == 0 ? p[r].x : k == 1 ? p[r].y : k == 2 ? p[r].z : p[r].w;
          if (!counts(r, j + k, weight)) continue;
          sum[r][c] = fmaf(weight, v.x, sum[r][c]);
          sum[r][c + 1] = fmaf(weight, v.y, sum[r][c + 1]);
          sum[r][c + 2] = fmaf(weight, v.z, sum[r][c + 2]);
          sum[r][c + 3] = fmaf(weight, v.w, sum[r][c + 3]);
        }
      }
    }
  }
}

// Of the 8 lanes that share a row, in each of them.
__device__ inline float row_max(float x) {
  for (int step = 1; step < 8; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ inline float row_sum(float x) {
  for (int step = 1; step < 8; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

}  // namespace FLASH_TARGET
}  // namespace flash
