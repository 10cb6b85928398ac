// CUDA for a plain C++ compiler: the twin of harness/cuda_target.h for the CPU executor. A kernel file includes
// harness/kernel.h, which includes this when the compiler is not nvcc.
//
// Models: grids, blocks, warps of 32, shared and constant memory, launches. Does not model: streams (a launch returns
// when the grid is done), registers, occupancy, caches, time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "harness/error.h"
#include "harness/step.h"
#include "simt/cuda_half.h"
#include "simt/cuda_math.h"
#include "simt/cuda_types.h"
#include "simt/cuda_warp.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static thread_local  // one block at a time runs on an OS thread
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))

#ifdef SIMT_OBSERVED
#define FLASH_TARGET cpu_observed
#else
#define FLASH_TARGET cpu
#endif

namespace simt {

// The executor stores these before it lets a thread go on. To the kernel they are constants, which also keeps reads of
// them out of the observation.
extern const __thread uint3 threadIdx, blockIdx, blockDim, gridDim;

// A kernel launch with its arguments bound: `body(arguments)` is what each thread calls.
struct Launch {
  const void* kernel;  // its address, for its name
  bool observed;       // its code reports memory accesses
  dim3 grid, block;
  size_t smem_bytes;
  void (*body)(const void* arguments);
  const void* arguments;
  size_t argument_bytes;
};

// Runs all blocks of the grid. Throws flash::LaunchError if no GPU could run such a launch, flash::KernelFault if
// the kernel did what no kernel may do.
void run_grid(const Launch& launch);

// Bytes of shared memory that a block may have at most (Options::shared_bytes).
size_t shared_memory_limit();

// Where the running block's dynamic shared memory begins.
unsigned char* dynamic_shared_base();

}  // namespace simt

using simt::threadIdx, simt::blockIdx, simt::blockDim, simt::gridDim;
constexpr int warpSize = 32;

namespace flash {
inline namespace FLASH_TARGET {

constexpr Target kTarget = Target::FLASH_TARGET;

// Bytes of shared memory that a block may have at most.
inline size_t shared_memory_limit() { return simt::shared_memory_limit(); }

// Kernels that keep their blocks running start so many: few, so that each has several tiles to do.
inline int multiprocessors() { return 4; }

// Runs `kernel` on `grid` blocks of `block` threads with `smem_bytes` of dynamic shared memory.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes, Stream, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;  // nothing to do
  const auto call = [kernel, ... params = Params(std::forward<Args>(args))] { kernel(params...); };
  simt::run_grid({.kernel = reinterpret_cast<const void*>(kernel),
                  .observed = kTarget == Target::cpu_observed,
                  .grid = grid,
                  .block = block,
                  .smem_bytes = smem_bytes,
                  .body = [](const void* bound) { (*static_cast<decltype(&call)>(bound))(); },
                  .arguments = &call,
                  .argument_bytes = sizeof call});
}

// Here a launch returns when the grid is done: nothing can begin early.
template <class... Params, class... Args>
void launch_early(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes, Stream stream, Args&&... args) {
  launch(kernel, grid, block, smem_bytes, stream, std::forward<Args>(args)...);
}

// The block's dynamic shared memory, as much as launch() was given.
template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(simt::dynamic_shared_base());
}

}  // namespace FLASH_TARGET
}  // namespace flash
