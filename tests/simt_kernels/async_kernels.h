// Kernels for tests/async_test.cpp: tensor cores, asynchronous copies, Hopper's barriers.
#pragma once
#include <cstddef>
#include <cstdint>

#include "harness/step.h"

namespace simt_kernels {

// Deliberate mistakes. The kernels that have one are templates over it; `none` is the same kernel without.
enum class AsyncFault {
  none,
  // ampere_faults.cu
  no_copy_wait,
  no_copy_commit,
  copy_wait_pending,
  no_barrier_after_copy_wait,
  tile_reused_too_early,
  named_barrier_too_many,
  named_barrier_counts_differ,
  no_named_barrier,
  named_barrier_number,
  misaligned_row,
  copy_past_shared,
};

template <flash::Target kTarget>
struct AsyncKernels {
  // ampere.cu
  // d [m][n] = a [m][k] · b [k][n], 16-bit elements, multiples of 16, by mma, ldmatrix and cp.async
  static void mma_product(bool bfloat16, const uint16_t* a, const uint16_t* b, float* d, int m, int n, int k);
  static void matrix_rows(const uint16_t* in, uint16_t* out);  // 16 × 16, through ldmatrix and stmatrix
  static void conversions(const float* in, float* exp2, uint32_t* bf16, uint32_t* half, int count);  // pairs
  static void hand_over(float* out, int rounds);  // warp 0 to warp 1 by named barriers, 32 results

  // ampere_faults.cu
  static void ampere_fault(AsyncFault fault, const float* in, float* out);  // 64 floats
  static int ampere_fault_line();
};

}  // namespace simt_kernels
