// wgmma for the CPU executor: the twin of harness/wgmma.h, which says what each function does. The work is done by the
// executor (wgmma.cpp).
#pragma once
#include "simt/cuda_fp8.h"
#include "simt/hopper.h"

namespace simt {

enum class Major { K, MN };

template <class T>
constexpr Element kElement = sizeof(T) == 1                     ? Element::e4m3
                             : std::is_same_v<T, __nv_bfloat16> ? Element::bfloat16
                                                                : Element::half;

// Describes an operand in shared memory, in the bits of the instruction's descriptor: address, `next`, the bytes of 8
// rows, swizzle.
uint64_t describe_operand(const void* shared, unsigned next, unsigned row_bytes);

// What a thread brings to the product of its warpgroup.
struct WarpgroupProduct {
  Element type;
  Major a_major, b_major;
  bool add;
  int n;
  float* d;
  const uint32_t* a_registers;  // null: a is in shared memory
  uint64_t a, b;
};
void start_product(const WarpgroupProduct& product);
void fence_warpgroup();
void commit_products();
void wait_for_products(int pending, const float* d);

}  // namespace simt

namespace flash {
inline namespace FLASH_TARGET {

using simt::Major;

template <int kRowBytes = 128>
SIMT_INLINE uint64_t wgmma_operand(const void* shared, unsigned next = 0) {
  const uint64_t operand = simt::describe_operand(shared, next, kRowBytes);
  simt::stay_in_kernel();
  return operand;
}

SIMT_INLINE void wgmma_fence() {
  simt::fence_warpgroup();
  simt::stay_in_kernel();
}
SIMT_INLINE void wgmma_commit() {
  simt::commit_products();
  simt::stay_in_kernel();
}
template <int kPending, int n>
SIMT_INLINE void wgmma_wait(float (&d)[n]) {
  simt::wait_for_products(kPending, d);
  simt::stay_in_kernel();
}

template <int kN, class T, Major kA, Major kB, bool kAdd>
SIMT_INLINE void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b) {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256);
  static_assert(sizeof(T) == 2 || (kA == Major::K && kB == Major::K));
  simt::start_product({simt::kElement<T>, kA, kB, kAdd, kN, d, nullptr, a, b});
  simt::stay_in_kernel();
}
template <int kN, class T, Major kB, bool kAdd>
SIMT_INLINE void wgmma(float (&d)[kN / 2], const uint32_t* a, uint64_t b) {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256);
  static_assert(sizeof(T) == 2 || kB == Major::K);
  simt::start_product({simt::kElement<T>, Major::K, kB, kAdd, kN, d, a, 0, b});
  simt::stay_in_kernel();
}

SIMT_INLINE uint32_t pack_e4m3(float a, float b, float c, float d) {
  return uint32_t(simt::e4m3_bits(a)) | uint32_t(simt::e4m3_bits(b)) << 8 | uint32_t(simt::e4m3_bits(c)) << 16 |
         uint32_t(simt::e4m3_bits(d)) << 24;
}

}  // namespace FLASH_TARGET
}  // namespace flash
