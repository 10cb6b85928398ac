// mma, ldmatrix, stmatrix, cp.async, named barriers: each with a result that is known otherwise.
#include "harness/hopper.h"
#include "simt_kernels/async_kernels.h"

using namespace flash;

namespace simt_kernels {
namespace {

constexpr int kPitch = 24;  // elements a row of a tile

// One warp, one 16 × 16 tile of d, k in steps of 16.
template <class T>
__global__ void product(const T* a, const T* b, float* d, int n, int k) {
  __shared__ __align__(16) T a_tile[2][16 * kPitch], b_tile[2][16 * kPitch];
  const int lane = threadIdx.x, row = blockIdx.y * 16, column = blockIdx.x * 16;
  const auto load = [&](int stage, int k0) {
    const int r = lane / 2, c = lane % 2 * 8;
    const bool inside = k0 < k;
    cp_async_16(&a_tile[stage][r * kPitch + c], inside ? &a[(row + r) * k + k0 + c] : a, inside);
    cp_async_16(&b_tile[stage][r * kPitch + c], inside ? &b[(k0 + r) * n + column + c] : b, inside);
    cp_async_commit();
  };
  float sum[2][4] = {};
  load(0, 0);
  for (int k0 = 0, stage = 0; k0 < k; k0 += 16, stage ^= 1) {
    load(stage ^ 1, k0 + 16);
    cp_async_wait<1>();
    __syncthreads();
    uint32_t a_fragment[4], b_fragment[4];
    ldmatrix_x4(a_fragment, &a_tile[stage][lane % 16 * kPitch + lane / 16 * 8]);
    ldmatrix_x4_trans(b_fragment, &b_tile[stage][lane % 16 * kPitch + lane / 16 * 8]);
    for (int half = 0; half < 2; ++half) {
      const uint32_t b_half[2] = {b_fragment[half * 2], b_fragment[half * 2 + 1]};
      mma_m16n8k16<T>(sum[half], a_fragment, b_half);
    }
    __syncthreads();
  }
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 4; ++i)
      d[(row + lane / 4 + i / 2 * 8) * n + column + half * 8 + lane % 4 * 2 + i % 2] = sum[half][i];
}

// The four 8 × 8 matrices of a tile, each transposed in place.
__global__ void transpose_matrices(const uint16_t* in, uint16_t* out) {
  __shared__ __align__(16) uint16_t tile[16 * kPitch], result[16 * kPitch];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) tile[i / 16 * kPitch + i % 16] = in[i];
  __syncthreads();
  const int row = lane % 16 * kPitch + lane / 16 * 8;
  uint32_t r[4];
  ldmatrix_x4_trans(r, &tile[row]);
  stmatrix_x4(&result[row], r);
  __syncthreads();
  for (int i = lane; i < 256; i += 32) out[i] = result[i / 16 * kPitch + i % 16];
}

__global__ void convert(const float* in, float* exp2, uint32_t* bf16, uint32_t* half, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  exp2[i] = exp2_fast(in[i]);
  const float next = in[i + 1 < count ? i + 1 : 0];
  bf16[i] = pack<__nv_bfloat16>(in[i], next);
  half[i] = pack<__half>(in[i], next);
}

__global__ void hand_over_by_barriers(float* out, int rounds) {
  __shared__ float x[32];
  const int lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (int i = 0; i < rounds; ++i) {
    if (threadIdx.x < 32) {
      if (i > 0) named_barrier_sync(2, 64);  // emptied
      x[lane] = float(i * 32 + lane);
      named_barrier_arrive(1, 64);
    } else {
      named_barrier_sync(1, 64);  // filled
      sum += x[31 - lane];
      if (i + 1 < rounds) named_barrier_arrive(2, 64);
    }
  }
  if (threadIdx.x >= 32) out[lane] = sum;
}

template <class T>
void multiply(const uint16_t* a, const uint16_t* b, float* d, int m, int n, int k) {
  launch(product<T>, dim3(n / 16, m / 16), 32, 0, nullptr, reinterpret_cast<const T*>(a), reinterpret_cast<const T*>(b),
         d, n, k);
}

}  // namespace

template <>
void AsyncKernels<kTarget>::mma_product(bool bfloat16, const uint16_t* a, const uint16_t* b, float* d, int m, int n,
                                        int k) {
  bfloat16 ? multiply<__nv_bfloat16>(a, b, d, m, n, k) : multiply<__half>(a, b, d, m, n, k);
}
template <>
void AsyncKernels<kTarget>::matrix_rows(const uint16_t* in, uint16_t* out) {
  launch(transpose_matrices, 1, 32, 0, nullptr, in, out);
}
template <>
void AsyncKernels<kTarget>::conversions(const float* in, float* exp2, uint32_t* bf16, uint32_t* half, int count) {
  launch(convert, ceil_div(count, 128), 128, 0, nullptr, in, exp2, bf16, half, count);
}
template <>
void AsyncKernels<kTarget>::hand_over(float* out, int rounds) {
  launch(hand_over_by_barriers, 1, 64, 0, nullptr, out, rounds);
}

}  // namespace simt_kernels
