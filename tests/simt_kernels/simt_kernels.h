// Kernels for tests/simt_test.cpp. Each file here is compiled twice, plain and observed, as kernel files of chapters
// are; the host functions of both are told apart by the target.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "harness/step.h"

namespace simt_kernels {

// Deliberate mistakes, a kernel each in faults.cu.
enum class Fault {
  none,
  early_exit,
  barrier_in_branch,
  two_barriers,
  warp_and_block_barrier,
  different_collectives,
  not_in_own_mask,
  overlapping_masks,
  absent_lane,
  beyond_last_lane,
  exception,
  missing_barrier,
  missing_syncwarp,
  shuffle_for_barrier,
  byte_race,
  two_readers,
  atomic_and_plain,
  blocks_write_one_word,
  blocks_read_after_write,
  past_end,
  before_start,
  host_pointer,
  past_dynamic_shared,
  far_past_static_shared,
  past_static_shared_0,
  past_static_shared_1,
  past_static_shared_2,
  row_overflow,
  misaligned,
  uninitialised_static,
  uninitialised_dynamic,
  uninitialised_global,
};

template <flash::Target kTarget>
struct Kernels {
  // words.cu
  static void integer_words(const int* in, int* out, int count);    // kIntegerWords results for each number
  static void float_words(const float* in, float* out, int count);  // kFloatWords results for each number
  static void vector_words(const float* in, float* out);            // 16 floats
  static void round_to_half(const float* in, uint16_t* bits, float* back, int count);
  static void round_to_bfloat16(const float* in, uint16_t* bits, float* back, int count);
  static void half_words(const float* in, float* out);  // in: 4 numbers, out: 32
  static void constants(float* out);                    // 4 floats

  // crashes.cu: what ends a program
  static void divide(int by, int* result);
  static void write_to(int* where);

  // collectives.cu
  static void indices(uint32_t* out, const uint32_t (&grid)[3], const uint32_t (&block)[3]);  // 6 a thread
  static void shuffles(int* out, int threads, int width);                                     // 4 results a thread
  static void shuffle_types(double* out);                                                     // 6 results a lane
  static void votes(unsigned* out, int threads);                                              // 6 results a thread
  static void partial_masks(int* out);                                                        // 32
  static void atomics(int* ints, float* sum, unsigned long long* big, int blocks);            // 8 ints
  static void reverse(const float* in, float* out, int count);  // shared memory, static and dynamic
  static void unwritten_shared(float* out, int blocks);         // 2 floats a block
  static void softmax_rows(const float* in, float* out, int rows, int columns);
  static void empty(const uint32_t (&grid)[3], const uint32_t (&block)[3], size_t smem_bytes);
  static void too_much_static_shared(char* out);  // never runs

  // traffic.cu
  static void strided_copy(const float* in, float* out, int stride, int blocks);  // 128 threads a block
  static void vector_copy(const float* in, float* out, int blocks);               // float4 by 128 threads
  static void half_copy(const uint16_t* in, uint16_t* out);                       // 32 halves
  static void transpose(const float* in, float* out, bool padded);                // 32 × 32
  static void broadcast(const float* in, float* out);                             // 32 threads read in[0]
  static void counted_collectives(int* out);                                      // 64 threads

  // faults.cu
  static void fault(Fault fault, float* data, float* result);
  static int fault_line();                      // of the last fault
  static void overrun(float* data, int index);  // writes data[index]
};

constexpr int kIntegerWords = 10;
constexpr int kFloatWords = 20;

}  // namespace simt_kernels
