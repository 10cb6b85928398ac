// Measures the rates of harness/rates.h.
#include <algorithm>
#include <vector>

#include "harness/rates.h"
#include "harness/wgmma.h"

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

// The same for tensor cores. Their operands are no zeros, since the power that a product takes depends on its bits.
constexpr int kProductsPerRound = 16;

// mma.sync, from registers: every GPU since sm_80. Eight independent 16×8×16 products for each warp.
__global__ void warp_products(int rounds, float* out) {
#if __CUDA_ARCH__ >= 800
  float d[8][4] = {};
  const uint32_t bits = 0x3f003f00u | (threadIdx.x * 0x9e3779b9u & 0x80bf80bfu);  // bf16 of ±0.5 to ±1
  const uint32_t a[4] = {bits, bits ^ 0x21, bits ^ 0x80000011u, bits ^ 0x8009u}, b[2] = {bits ^ 0x8000u, bits ^ 0x13};
  for (int round = 0; round < rounds; round++) {
#pragma unroll
    for (int k = 0; k < kProductsPerRound; k++) mma_m16n8k16<__nv_bfloat16>(d[k % 8], a, b);
  }
  float sum = 0;
  for (const auto& tile : d) sum += tile[0] + tile[1] + tile[2] + tile[3];
  if (sum == 12345.678f) *out = sum;
#endif
}
constexpr double kWarpProductFlops = 2.0 * 16 * 8 * 16;

// wgmma, from shared memory: Hopper, in code for sm_90a. A warpgroup multiplies 64×64 by 64×256 elements of 16 bits
// (64×128 by 128×256 of 8 bits) four times a round.
template <class T>
__global__ void __launch_bounds__(256, 1) warpgroup_products(int rounds, float* out) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  struct alignas(1024) Operands {
    uint32_t a[2][64 * 32], b[256 * 32];
  };
  Operands& s = *dynamic_shared<Operands>();
  for (unsigned i = threadIdx.x; i < sizeof s / 4; i += 256)
    s.a[0][i] = 0x3f003f00u | (i * 0x9e3779b9u >> 3 & 0x80bf80bfu);  // finite as bf16 and as e4m3
  fence_proxy_async();
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const uint64_t a = wgmma_operand(s.a[warpgroup]), b = wgmma_operand(s.b);
  float d[128] = {};
  for (int round = 0; round < rounds; round++) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kProductsPerRound; k++)
      wgmma<256, T, Major::K, Major::K, true>(d, a + k % 4 * 2, b + k % 4 * 2);
    wgmma_commit();
    wgmma_wait<0>(d);
  }
  float sum = 0;
  for (float x : d) sum += x;
  if (sum == 12345.678f) *out = sum;
#endif
}
template <class T>
constexpr double kWarpgroupProductFlops = 2.0 * 64 * 256 * (32 / sizeof(T));

// Of some launches, the median: the first ones warm up.
double median_ms(Device& gpu, const std::function<void()>& work) {
  std::vector<double> ms = gpu.times_ms(12, [&](int) { work(); });
  std::sort(ms.begin() + 3, ms.end());
  return ms[3 + 4];
}

template <class T>
double warpgroup_rate(Device& gpu, int multiprocessors, float* out) {
  constexpr int kRounds = 500;
  const double ms = median_ms(gpu, [&] {
    launch(warpgroup_products<T>, dim3(unsigned(multiprocessors)), 256, 4 * (2 * 64 + 256) * 32, nullptr, kRounds, out);
  });
  return kWarpgroupProductFlops<T> * kProductsPerRound * kRounds * 2 * multiprocessors / (ms * 1e-3);
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

  auto* nothing = static_cast<float*>(out.data());
  if (gpu.sm() >= 80) {
    constexpr int kWarps = 8;
    const double ms = median_ms(
        gpu, [&] { launch(warp_products, dim3(unsigned(blocks)), 32 * kWarps, 0, nullptr, kRounds, nothing); });
    rates.mma_sync_flops = kWarpProductFlops * kProductsPerRound * kRounds * kWarps * blocks / (ms * 1e-3);
    rates.bf16_flops = rates.mma_sync_flops;
  }
  if (gpu.sm() == 90) {
    rates.bf16_flops = warpgroup_rate<__nv_bfloat16>(gpu, properties.multiProcessorCount, nothing);
    rates.e4m3_flops = warpgroup_rate<__nv_fp8_e4m3>(gpu, properties.multiProcessorCount, nothing);
  }

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
