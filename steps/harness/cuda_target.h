// Kernels on a GPU: the checked launch, dynamic shared memory, and nothing that hides CUDA. Its twin for the CPU is
// steps/simt/cuda.h.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <string>
#include <utility>

#include "harness/error.h"
#include "harness/step.h"

#define FLASH_TARGET gpu

namespace flash {
inline namespace gpu {

constexpr Target kTarget = Target::gpu;

// Throws KernelFault when a CUDA call failed; `what` says what was tried.
inline void check_cuda(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) throw KernelFault(what + ": " + cudaGetErrorString(status));
}

// What a launch needs against what the GPU in use has; throws LaunchError with both figures. (gpu_device.cu)
void check_launch(const void* kernel, dim3 grid, dim3 block, size_t smem_bytes);

// Bytes of shared memory that a block of the GPU in use may have at most. (gpu_device.cu)
size_t shared_memory_limit();

// How many multiprocessors the GPU in use has: a kernel that keeps its blocks running starts so many. (gpu_device.cu)
int multiprocessors();

// Launches `kernel` on `grid` blocks of `block` threads with `smem_bytes` of dynamic shared memory, asynchronously.
// More than 48 KB of shared memory is opted in to here. Throws LaunchError if the GPU cannot run such a launch.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes, Stream stream, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;  // nothing to do
  check_launch(reinterpret_cast<const void*>(kernel), grid, block, smem_bytes);
  kernel<<<grid, block, smem_bytes, stream>>>(std::forward<Args>(args)...);
  check_cuda(cudaGetLastError(), "kernel launch");
}

// The same for a kernel that calls grid_dependency_wait() (hopper.h) before it reads what the kernel launched before it
// on this stream writes: it need not wait for that one's end to begin. For GPUs from sm_90 on.
template <class... Params, class... Args>
void launch_early(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes, Stream stream, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;  // nothing to do
  check_launch(reinterpret_cast<const void*>(kernel), grid, block, smem_bytes);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = smem_bytes, config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, Params(std::forward<Args>(args))...), "kernel launch");
}

// The block's dynamic shared memory, as much as launch() was given.
template <class T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}

}  // namespace gpu
}  // namespace flash
