// Stands in for the files gpu_*.cu in a build without CUDA.
#include "harness/device.h"
#include "harness/rates.h"

namespace flash {

constexpr const char* kNoGpuCode =
    "this build has no GPU code: CMake found no nvcc; install the CUDA Toolkit and configure again";

Device* gpu_device(std::string* why) {
  if (why) *why = kNoGpuCode;
  return nullptr;
}

Rates measure_rates(Device&) { throw Error(kNoGpuCode); }

}  // namespace flash
