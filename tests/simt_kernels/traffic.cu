// Kernels whose memory traffic is known in closed form.
#include "harness/kernel.h"
#include "simt_kernels/simt_kernels.h"

using flash::kTarget;
using flash::launch;

namespace simt_kernels {
namespace {

__global__ void copy_strided(const float* in, float* out, int stride) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[i * stride];
}

__global__ void copy_vectors(const float4* in, float4* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float4 v = in[i];
  out[i] = make_float4(v.w, v.z, v.y, v.x);
}

__global__ void copy_halves(const half* in, half* out) { out[threadIdx.x] = in[threadIdx.x]; }

template <int kStride>
__global__ void transpose_tile(const float* in, float* out) {
  __shared__ float tile[32][kStride];
  for (int row = threadIdx.y; row < 32; row += 8) tile[row][threadIdx.x] = in[row * 32 + threadIdx.x];
  __syncthreads();
  for (int row = threadIdx.y; row < 32; row += 8) out[row * 32 + threadIdx.x] = tile[threadIdx.x][row];
}

__global__ void read_one(const float* in, float* out) { out[threadIdx.x] = in[0]; }

__global__ void count_me(int* out) {
  const int t = threadIdx.x;
  int x = __shfl_xor_sync(0xffffffffu, t, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  x += __any_sync(0xffffffffu, x > 3);
  __syncwarp();
  __syncthreads();
  __syncthreads();
  __syncthreads();
  if (t < 5) atomicAdd(out, x);
}

}  // namespace

template <>
void Kernels<kTarget>::strided_copy(const float* in, float* out, int stride, int blocks) {
  launch(copy_strided, blocks, 128, 0, nullptr, in, out, stride);
}
template <>
void Kernels<kTarget>::vector_copy(const float* in, float* out, int blocks) {
  launch(copy_vectors, blocks, 128, 0, nullptr, reinterpret_cast<const float4*>(in), reinterpret_cast<float4*>(out));
}
template <>
void Kernels<kTarget>::half_copy(const uint16_t* in, uint16_t* out) {
  launch(copy_halves, 1, 32, 0, nullptr, reinterpret_cast<const half*>(in), reinterpret_cast<half*>(out));
}
template <>
void Kernels<kTarget>::transpose(const float* in, float* out, bool padded) {
  launch(padded ? transpose_tile<33> : transpose_tile<32>, 1, dim3(32, 8), 0, nullptr, in, out);
}
template <>
void Kernels<kTarget>::broadcast(const float* in, float* out) {
  launch(read_one, 1, 32, 0, nullptr, in, out);
}
template <>
void Kernels<kTarget>::counted_collectives(int* out) {
  launch(count_me, 1, 64, 0, nullptr, out);
}

}  // namespace simt_kernels
