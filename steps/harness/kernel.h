// The one header of a kernel file. nvcc compiles the file for a GPU; a C++ compiler compiles the very same text for the
// executor in steps/simt, plain or observed. All three end up in one program, so what is defined in headers lives in an
// inline namespace named after the target, and a kernel file puts its own code into an unnamed namespace.
#pragma once

#ifdef __CUDACC__
#include "harness/cuda_target.h"
#else
#include "simt/cuda.h"
#endif

#include <algorithm>
#include <utility>

#include "harness/step.h"

namespace flash {
inline namespace FLASH_TARGET {

// Enters a step, as compiled for this target, into the registry:
//     const Registration step = register_step(__FILE__, {.idea = "…", …});
inline Registration register_step(const char* file, Step step) { return Registration(file, kTarget, std::move(step)); }

// ⌈a / b⌉: how many tiles of b cover a.
template <class A, class B>
__host__ __device__ constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

// A one-dimensional grid, which alone is long enough for batch × heads × tiles. Throws Error past what a GPU takes.
inline dim3 grid_of(size_t blocks) { return dim3(checked_grid_length(blocks)); }

}  // namespace FLASH_TARGET
}  // namespace flash
