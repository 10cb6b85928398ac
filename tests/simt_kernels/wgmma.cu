// Products by wgmma for many widths, types and layouts, and a product whose tiles TMA brings in.
#include "harness/wgmma.h"
#include "simt_kernels/async_kernels.h"

using namespace flash;

namespace simt_kernels {
namespace {

// Byte `byte` of row `row` of a tile of rows of 128 (or 64) bytes, with its pieces exchanged as TMA does it.
template <int kRow = 128>
__device__ int swizzled(int row, int byte) {
  return row * kRow + ((byte / 16 ^ (kRow == 128 ? row % 8 : row / 2 % 4)) * 16) + byte % 16;
}

// Puts element (mn, k) of an operand of `kMn` rows where wgmma looks for it.
template <class Word, Major kMajor, int kRow>
__device__ void place(uint8_t* tile, int mn, int k, Word element) {
  constexpr int kRowsOfK = 128 / int(sizeof(Word));
  const int at = kMajor == Major::K ? swizzled<kRow>(mn, k * int(sizeof(Word)))
                                    : mn / 64 * kRowsOfK * 128 + swizzled(k, mn % 64 * int(sizeof(Word)));
  *reinterpret_cast<Word*>(tile + at) = element;
}

// d [64][kN] = a [64][k] · b [k][kN], with k · sizeof(T) = kRow.
template <int kN, class T, class Word, Major kA, Major kB, bool kRegisters, int kRow = 128>
__global__ void product(const Word* a, const Word* b, float* d) {
  constexpr int kK = kRow / int(sizeof(T)), kSteps = kRow / 32;
  uint8_t* a_tile = dynamic_shared<uint8_t>();
  uint8_t* b_tile = a_tile + 8192;
  const int t = threadIdx.x;
  for (int i = t; i < 64 * kK; i += 128) place<Word, kA, kRow>(a_tile, i / kK, i % kK, a[i]);
  for (int i = t; i < kK * kN; i += 128) place<Word, kB, kRow>(b_tile, i % kN, i / kN, b[i]);
  fence_proxy_async();
  __syncthreads();

  const uint64_t a_operand = wgmma_operand<kRow>(a_tile, 8192), b_operand = wgmma_operand<kRow>(b_tile, 8192);
  const auto step = [](Major major, int k) { return uint64_t(major == Major::K ? 2 * k : 16 * 128 / 16 * k); };
  const int row = t / 32 * 16 + t % 32 / 4;
  float sum[kN / 2];
  wgmma_fence();
  for (int k = 0; k < kSteps; ++k) {
    if constexpr (kRegisters) {
      uint32_t fragment[4];
      for (int i = 0; i < 4; ++i) {
        const int byte = k * 32 + t % 4 * 4 + i / 2 * 16;
        fragment[i] = *reinterpret_cast<const uint32_t*>(&a[(row + i % 2 * 8) * kK + byte / int(sizeof(Word))]);
      }
      if (k == 0)
        wgmma<kN, T, kB, false>(sum, fragment, b_operand);
      else
        wgmma<kN, T, kB, true>(sum, fragment, b_operand + step(kB, k));
    } else {
      if (k == 0)
        wgmma<kN, T, kA, kB, false>(sum, a_operand, b_operand);
      else
        wgmma<kN, T, kA, kB, true>(sum, a_operand + step(kA, k), b_operand + step(kB, k));
    }
  }
  wgmma_commit();
  wgmma_wait<0>(sum);
  for (int i = 0; i < kN / 2; ++i) d[(row + (i & 2 ? 8 : 0)) * kN + i / 4 * 8 + t % 4 * 2 + (i & 1)] = sum[i];
}

template <int kN, class T, class Word>
void run(int layout, const void* a, const void* b, float* d) {
  const auto start = [&](auto kernel) {
    launch(kernel, 1, 128, 8192 + (kN + 63) / 64 * 8192, nullptr, static_cast<const Word*>(a),
           static_cast<const Word*>(b), d);
  };
  if (layout == 0) return start(product<kN, T, Word, Major::K, Major::K, false>);
  if (layout == 1) return start(product<kN, T, Word, Major::K, Major::K, true>);
  if (layout == 6) return start(product<kN, T, Word, Major::K, Major::K, false, 64>);
  if (layout == 7) return start(product<kN, T, Word, Major::K, Major::K, true, 64>);
  if constexpr (sizeof(T) == 2) {
    if (layout == 2) return start(product<kN, T, Word, Major::K, Major::MN, false>);
    if (layout == 3) return start(product<kN, T, Word, Major::MN, Major::K, false>);
    if (layout == 4) return start(product<kN, T, Word, Major::MN, Major::MN, false>);
    if (layout == 5) return start(product<kN, T, Word, Major::K, Major::MN, true>);
  }
}

template <int kN>
void run(int type, int layout, const void* a, const void* b, float* d) {
  if (type == 0) return run<kN, __half, uint16_t>(layout, a, b, d);
  if (type == 1) return run<kN, __nv_bfloat16, uint16_t>(layout, a, b, d);
  run<kN, __nv_fp8_e4m3, uint8_t>(layout, a, b, d);
}

// c [m][64] = a [m][k] · b [64][k]ᵀ: a producer warpgroup, two consumers of 64 rows each, two stages.
__global__ void __launch_bounds__(384, 1)
    pipeline(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, float* c, int k) {
  struct Stage {
    __half a[128 * 64], b[64 * 64];
  };
  constexpr int kStages = 2;
  Stage* stage = dynamic_shared<Stage>();
  __shared__ Mbarrier full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 2);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, steps = k / 64;
  if (group == 0) {
    setmaxnreg_dec<40>();
    for (int i = 0; thread == 0 && i < steps; ++i) {
      const int s = i % kStages;
      mbarrier_wait(&empty[s], (i / kStages & 1) ^ 1);
      mbarrier_arrive_expect_tx(&full[s], sizeof(Stage));
      tma_load_3d(stage[s].a, &a_map, i * 64, int(blockIdx.x) * 128, 0, &full[s]);
      tma_load_3d(stage[s].b, &b_map, i * 64, 0, 0, &full[s]);
    }
    return;
  }
  setmaxnreg_inc<232>();
  float sum[32] = {};
  for (int i = 0; i < steps; ++i) {
    const int s = i % kStages;
    mbarrier_wait(&full[s], i / kStages & 1);
    wgmma_fence();
    for (int kk = 0; kk < 4; ++kk)
      wgmma<64, __half, Major::K, Major::K, true>(sum, wgmma_operand(stage[s].a + (group - 1) * 64 * 64) + 2 * kk,
                                                  wgmma_operand(stage[s].b) + 2 * kk);
    wgmma_commit();
    wgmma_wait<0>(sum);
    if (thread == 0) mbarrier_arrive(&empty[s]);
  }
  const int row = int(blockIdx.x) * 128 + (group - 1) * 64 + thread / 32 * 16 + thread % 32 / 4;
  for (int i = 0; i < 32; ++i) c[(row + (i & 2 ? 8 : 0)) * 64 + i / 4 * 8 + thread % 4 * 2 + (i & 1)] = sum[i];
}

__global__ void convert(const float* in, uint32_t* packed, float* back, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i * 4 >= count) return;
  packed[i] = pack_e4m3(in[i * 4], in[i * 4 + 1], in[i * 4 + 2], in[i * 4 + 3]);
  for (int j = 0; j < 4; ++j) back[i * 4 + j] = float(__nv_fp8_e4m3(in[i * 4 + j]));
}

}  // namespace

template <>
void AsyncKernels<kTarget>::wgmma_product(int type, int layout, int n, const void* a, const void* b, float* d) {
  switch (n) {
    case 64:
      return run<64>(type, layout, a, b, d);
    case 80:
      return run<80>(type, layout, a, b, d);
    case 96:
      return run<96>(type, layout, a, b, d);
    case 112:
      return run<112>(type, layout, a, b, d);
    case 128:
      return run<128>(type, layout, a, b, d);
    case 176:
      return run<176>(type, layout, a, b, d);
    case 192:
      return run<192>(type, layout, a, b, d);
    default:
      return run<256>(type, layout, a, b, d);
  }
}
template <>
void AsyncKernels<kTarget>::wgmma_pipeline(const uint16_t* a, const uint16_t* b, float* c, int m, int k) {
  const unsigned a_size[3] = {unsigned(k), unsigned(m), 1}, b_size[3] = {unsigned(k), 64, 1};
  launch(pipeline, m / 128, 384, 2 * (128 + 64) * 128, nullptr, tensor_map<__half>(a, a_size, 128),
         tensor_map<__half>(b, b_size, 64), c, k);
}
template <>
void AsyncKernels<kTarget>::e4m3_numbers(const float* in, uint32_t* packed, float* back, int count) {
  launch(convert, ceil_div(count, 256), 64, 0, nullptr, in, packed, back, count);
}

}  // namespace simt_kernels
