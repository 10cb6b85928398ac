// Tensor cores and asynchronous copies for the CPU executor: the twin of harness/tensor_cores.h, which says what each
// function does. The work is done by the executor (tensor_cores.cpp, async_copies.cpp); its functions are never
// inlined, so that their return addresses tell the line of the kernel.
#pragma once
#include <cmath>
#include <type_traits>

#include "simt/cuda.h"

namespace simt {

// What the elements of a matrix operand are.
enum class Element { half, bfloat16, e4m3 };

void mma(Element type, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void load_matrices(uint32_t (&r)[4], const void* row, bool transposed);
void store_matrices(void* row, const uint32_t (&r)[4], bool transposed);

void start_copy(void* shared, const void* global, bool inside);
void commit_copies();
void wait_for_copies(int pending);

void sync_named_barrier(int id, int threads);
void arrive_at_named_barrier(int id, int threads);

}  // namespace simt

namespace flash {
inline namespace FLASH_TARGET {

template <class T>
constexpr bool kIsBfloat16 = std::is_same_v<T, __nv_bfloat16>;

template <class T>
SIMT_INLINE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(simt::Half<T>);
  simt::mma(kIsBfloat16<T> ? simt::Element::bfloat16 : simt::Element::half, d, a, b);
  simt::stay_in_kernel();
}

SIMT_INLINE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  simt::load_matrices(r, row, false);
  simt::stay_in_kernel();
}
SIMT_INLINE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  simt::load_matrices(r, row, true);
  simt::stay_in_kernel();
}

SIMT_INLINE void cp_async_16(void* shared, const void* global, bool inside = true) {
  simt::start_copy(shared, global, inside);
  simt::stay_in_kernel();
}
SIMT_INLINE void cp_async_commit() {
  simt::commit_copies();
  simt::stay_in_kernel();
}
template <int kPending>
SIMT_INLINE void cp_async_wait() {
  simt::wait_for_copies(kPending);
  simt::stay_in_kernel();
}

SIMT_INLINE float exp2_fast(float x) {
  const float y = __builtin_exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

template <class T>
SIMT_INLINE uint32_t pack(float low, float high) {
  static_assert(simt::Half<T>);
  if constexpr (kIsBfloat16<T>)
    return simt::bfloat16_bits(low) | uint32_t(simt::bfloat16_bits(high)) << 16;
  else
    return simt::half_bits(low) | uint32_t(simt::half_bits(high)) << 16;
}

SIMT_INLINE void named_barrier_sync(int id, int threads) {
  simt::sync_named_barrier(id, threads);
  simt::stay_in_kernel();
}
SIMT_INLINE void named_barrier_arrive(int id, int threads) {
  simt::arrive_at_named_barrier(id, threads);
  simt::stay_in_kernel();
}

}  // namespace FLASH_TARGET
}  // namespace flash
