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
  // hopper_faults.cu
  no_mbarrier_wait,
  wrong_parity,
  no_arrive,
  arrival_too_many,
  wrong_bytes,
  uninitialised_mbarrier,
  no_mbarrier_fence,
  no_barrier_after_init,
  no_wait_for_empty,
  no_fence_before_store,
  no_barrier_before_store,
  no_bulk_commit,
  no_bulk_wait_read,
  no_bulk_wait,
  misaligned_box,
  box_past_shared,
  box_past_tensor,
  no_release,
  flag_never_set,
  // wgmma_faults.cu
  no_wgmma_wait,
  wgmma_wait_pending,
  no_wgmma_commit,
  registers_reused,
  too_many_registers,
  no_fence_before_wgmma,
  no_barrier_before_wgmma,
  no_wgmma_fence,
  tile_overwritten,
  tile_overwritten_after_barrier,
  operand_past_shared,
  operands_differ,
  stage_released_early,
  stage_released_by_one,
};

template <flash::Target kTarget>
struct AsyncKernels {
  // ampere.cu
  // d [m][n] = a [m][k] · b [k][n], 16-bit elements, multiples of 16, by mma, ldmatrix and cp.async
  static void mma_product(bool bfloat16, const uint16_t* a, const uint16_t* b, float* d, int m, int n, int k);
  static void matrix_rows(const uint16_t* in, uint16_t* out);  // 16 × 16, through ldmatrix and stmatrix
  static void conversions(const float* in, float* exp2, uint32_t* bf16, uint32_t* half, int count);  // pairs
  static void hand_over(float* out, int rounds);  // warp 0 to warp 1 by named barriers, 32 results

  // hopper.cu
  // Loads the box of 16 rows of 128 or 64 bytes at `at` of a tensor of 1- or 2-byte elements, and stores it to another
  // one; raw: its bytes, as they lie in shared memory.
  static void move_box(bool bytes, int row_bytes, const void* from, void* to, const unsigned (&size)[3],
                       const int (&at)[3], uint8_t* raw);
  static void bulk_runs(const float* in, float* out);           // in: 256 floats, out: 512
  static void ring_sum(const float* in, float* out, int rows);  // rows of 32 floats
  static void flag_chain(int* flag, int* list, int blocks);     // 32 ints
  static void last_block_sum(int* counter, int* parts, int* sum, int blocks);
  static void lock_and_count(int* lock, int* count, int blocks);  // 32 threads a block, 3 times each

  // wgmma.cu
  // type: half, bfloat16, e4m3; layout: a and b K-major; a in registers; b, a, both MN-major; b MN-major, a in
  // registers; a and b K-major in rows of 64 bytes; the same with a in registers
  static void wgmma_product(int type, int layout, int n, const void* a, const void* b, float* d);
  // c [m][64] = a [m][k] · b [64][k]ᵀ in half; m a multiple of 128, k of 64
  static void wgmma_pipeline(const uint16_t* a, const uint16_t* b, float* c, int m, int k);
  static void e4m3_numbers(const float* in, uint32_t* packed, float* back, int count);

  // Faults: in and out have 4,096 floats. The line is that of the last fault.
  static void ampere_fault(AsyncFault fault, const float* in, float* out);
  static int ampere_fault_line();
  static void hopper_fault(AsyncFault fault, const float* in, float* out);
  static int hopper_fault_line();
  static void wgmma_fault(AsyncFault fault, const float* in, float* out);
  static int wgmma_fault_line();
};

}  // namespace simt_kernels
