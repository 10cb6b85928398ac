// Hopper's instructions for the CPU executor: the twin of harness/hopper.h, which says what each function does.
#pragma once
#include "simt/tensor_cores.h"

namespace flash {
inline namespace FLASH_TARGET {

SIMT_INLINE void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
  simt::store_matrices(row, r);
  simt::stay_in_kernel();
}

}  // namespace FLASH_TARGET
}  // namespace flash
