// Stands in for the files gpu_*.cu in a build without CUDA.
#include "harness/device.h"
#include "harness/rates.h"

namespace flash {

#ifdef FLASHSTEPS_GPU_OFF
constexpr const char* kNoGpuCode =
    "this build has no GPU code: it was configured with FLASHSTEPS_GPU=off; configure again without that";
#else
constexpr const char* kNoGpuCode =
    "this build has no GPU code: CMake found no nvcc; install the CUDA Toolkit and configure again";
#endif

Device* gpu_device(std::string* why) {
  if (why) *why = kNoGpuCode;
  return nullptr;
}

int gpu_holding(const void*, const std::string&) { throw Error(kNoGpuCode); }

CurrentGpu::CurrentGpu(std::optional<int>) {}
CurrentGpu::~CurrentGpu() = default;

Rates measure_rates(Device&) { throw Error(kNoGpuCode); }

}  // namespace flash
