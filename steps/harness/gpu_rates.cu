// Measures the rates of harness/rates.h.
#include <algorithm>
#include <vector>

#include "harness/kernel.h"
#include "harness/rates.h"

namespace flash {
namespace {

constexpr int kFmasPerRound = 64;

// Independent chains of multiply-adds, with no memory access: as fast as the units go.
__global__ void multiply_adds(int rounds, float factor, float* out) {
  float x[16];
  for (int i = 0; i < 16; i++) x[i] = float(threadIdx.x + i);
  for (int round = 0; round < rounds; round++) {
#pragma unroll
    for (int k = 0; k < kFmasPerRound; k++) x[k % 16] = fmaf(x[k % 16], factor, 1.0f);
  }
  float sum = 0;
  for (int i = 0; i < 16; i++) sum += x[i];
  if (sum == 12345.678f) *out = sum;  // never, but the compiler cannot know
}

// Of some launches, the median: the first ones warm up.
double median_ms(Device& gpu, const std::function<void()>& work) {
  std::vector<double> ms;
  for (int i = 0; i < 12; i++) ms.push_back(gpu.time_ms(work));
  std::sort(ms.begin() + 3, ms.end());
  return ms[3 + 4];
}

}  // namespace

Rates measure_rates(Device& gpu) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  Rates rates;

  constexpr int kRounds = 2000, kThreads = 1024;
  const int blocks = properties.multiProcessorCount * 4;
  const Buffer out(gpu, "rate measurement", sizeof(float));
  const double fma_ms = median_ms(gpu, [&] {
    launch(multiply_adds, dim3(unsigned(blocks)), kThreads, 0, nullptr, kRounds, 0.5f, static_cast<float*>(out.data()));
  });
  rates.fp32_flops = 2.0 * kFmasPerRound * kRounds * kThreads * blocks / (fma_ms * 1e-3);

  const size_t bytes = size_t(1) << 30;
  const Buffer from(gpu, "rate measurement", bytes), to(gpu, "rate measurement", bytes);
  gpu.poison(from.data(), bytes);
  const double copy_ms = median_ms(gpu, [&] {
    check_cuda(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice), "copying on the GPU");
  });
  rates.hbm_bytes = 2.0 * double(bytes) / (copy_ms * 1e-3);
  return rates;
}

}  // namespace flash
