// What algorithm1.cu and forward.cu share: loading a tile, and the warp's reductions of chapter 04.
#pragma once
#include "harness/kernel.h"

namespace {

// Copies rows [row0, row0 + kRows) of a row-major [rows, D] matrix into shared memory, neighbouring threads
// neighbouring columns; rows past the end become zeros. A tile's rows may be longer than D.
template <int D, int kRows, int kStride>
__device__ void load_tile(float (&tile)[kRows][kStride], const float* matrix, int row0, int rows) {
  for (int i = threadIdx.x; i < kRows * D; i += blockDim.x) {
    const int row = row0 + i / D, column = i % D;
    tile[i / D][column] = row < rows ? matrix[size_t(row) * D + column] : 0.0f;
  }
}

// Of all lanes of a warp, in every lane.
__device__ inline float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

}  // namespace
