// One thread an element: how this chapter's kernels divide a matrix among threads.
#pragma once
#include "harness/kernel.h"

namespace {

// The element of a matrix with `cols` columns that the running thread owns. A block covers a piece of one row, and the
// 32 lanes of a warp are neighbours in it. Threads past the end of the row find col ≥ cols.
struct Element {
  int row, col;
};
__device__ inline Element my_element(int cols) {
  const unsigned pieces = flash::ceil_div(unsigned(cols), blockDim.x);
  return {int(blockIdx.x / pieces), int(blockIdx.x % pieces * blockDim.x + threadIdx.x)};
}

// The launch that gives each element of a [rows, cols] matrix its thread: whole warps, at most 256 threads a block.
struct ElementLaunch {
  dim3 grid, block;
  ElementLaunch(size_t rows, int cols) {
    const int threads = cols >= 256 ? 256 : flash::ceil_div(cols, 32) * 32;
    grid = flash::grid_of(cols == 0 ? 0 : rows * flash::ceil_div(cols, threads));
    block = dim3(unsigned(threads));
  }
};

}  // namespace
