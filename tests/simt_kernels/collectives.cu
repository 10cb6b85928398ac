// What threads do together.
#include "harness/kernel.h"
#include "simt_kernels/simt_kernels.h"

using flash::dynamic_shared;
using flash::kTarget;
using flash::launch;

namespace simt_kernels {
namespace {

constexpr unsigned kAll = 0xffffffffu;

dim3 shape(const uint32_t (&size)[3]) { return dim3(size[0], size[1], size[2]); }

// Each thread writes its indices at the place that the indices give.
__global__ void write_indices(uint32_t* out) {
  const uint32_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const uint32_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  uint32_t* mine = out + (size_t(block) * (blockDim.x * blockDim.y * blockDim.z) + thread) * 6;
  mine[0] = blockIdx.x;
  mine[1] = blockIdx.y;
  mine[2] = blockIdx.z;
  mine[3] = threadIdx.x;
  mine[4] = threadIdx.y;
  mine[5] = threadIdx.z;
}

__global__ void all_shuffles(int* out, int width) {
  const int t = threadIdx.x, value = 1000 + t;
  out[4 * t] = __shfl_sync(kAll, value, t * 7 + 3, width);
  out[4 * t + 1] = __shfl_up_sync(kAll, value, 3, width);
  out[4 * t + 2] = __shfl_down_sync(kAll, value, 3, width);
  out[4 * t + 3] = __shfl_xor_sync(kAll, value, 5, width);
}

__global__ void shuffles_of_types(double* out) {
  const int t = threadIdx.x, from = 31 - t;
  double* mine = out + 6 * t;
  mine[0] = __shfl_sync(kAll, t * 0.5, from);
  mine[1] = double(__shfl_sync(kAll, float(t) * 0.25f, from));
  mine[2] = double(__shfl_sync(kAll, (1ull << 40) + unsigned(t), from));
  mine[3] = double(float(__shfl_sync(kAll, __float2half(float(t)), from)));
  const float2 pair = __half22float2(__shfl_sync(kAll, __floats2half2_rn(float(t), float(-t)), from));
  mine[4] = double(pair.x - pair.y);
  mine[5] = double(__shfl_sync(kAll, unsigned(t), from));
}

__global__ void all_votes(unsigned* out) {
  const unsigned t = threadIdx.x;
  unsigned* mine = out + 6 * t;
  mine[0] = __ballot_sync(kAll, t % 3 == 0);
  mine[1] = unsigned(__any_sync(kAll, t == 5)) << 1 | unsigned(__any_sync(kAll, t == 1000));
  mine[2] = unsigned(__all_sync(kAll, t < 1000)) << 1 | unsigned(__all_sync(kAll, t != 5));
  mine[3] = unsigned(__syncthreads_count(t % 5 == 0));
  mine[4] = unsigned(__syncthreads_or(t == 7) != 0) << 1 | unsigned(__syncthreads_or(0) != 0);
  mine[5] = unsigned(__syncthreads_and(1) != 0) << 1 | unsigned(__syncthreads_and(t != 7) != 0);
}

// The two halves of a warp go ways of their own, and meet again.
__global__ void halves_of_warp(int* out) {
  __shared__ int x[32];
  const int t = threadIdx.x;
  x[t] = t;
  if (t < 16) {
    for (int i = 0; i < 3; ++i) {
      __syncwarp(0x0000ffffu);
      const int next = x[(t + 1) % 16];
      __syncwarp(0x0000ffffu);
      x[t] = next;
    }
  } else {
    x[t] = __shfl_xor_sync(0xffff0000u, x[t], 1);
  }
  __syncwarp();
  out[t] = x[31 - t];
}

__global__ void all_atomics(int* ints, float* sum, unsigned long long* big) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  __shared__ int in_block;
  if (threadIdx.x == 0) in_block = 0;
  __syncthreads();
  atomicAdd(&in_block, 1);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&ints[0], in_block);
  atomicMax(&ints[1], i);
  atomicMin(&ints[2], -i);
  atomicExch(&ints[3], 42);
  const int seen = atomicCAS(&ints[4], 0, i + 1);
  if (seen == 0) atomicAdd(&ints[5], 1);  // just one thread finds it zero
  atomicOr(&ints[6], 1 << (i % 31));
  atomicAnd(&ints[7], ~(1 << (i % 31)));
  atomicAdd(sum, 0.5f);
  atomicAdd(big, 1ull << 33);
}

__global__ void reverse_block(const float* in, float* out, int count) {
  __shared__ float a[64];
  float* b = dynamic_shared<float>();
  const int i = blockIdx.x * 64 + threadIdx.x;
  a[threadIdx.x] = i < count ? in[i] : 0.0f;
  __syncthreads();
  b[threadIdx.x] = a[63 - threadIdx.x];
  __syncthreads();
  if (i < count) out[i] = b[threadIdx.x] + (threadIdx.x % 2 ? a[threadIdx.x] : 0.0f);
}

// Reads shared memory before writing to it: what an earlier block has left there must not be seen.
__global__ void read_unwritten(float* out) {  // all but the first block
  __shared__ float x[32];
  float* y = dynamic_shared<float>();
  if (blockIdx.x > 0) {
    out[2 * blockIdx.x] = x[5];
    out[2 * blockIdx.x + 1] = y[5];
  }
  x[5] = 1.0f;
  y[5] = 1.0f;
}

// A row a warp: shuffles, shared memory and warp barriers together.
__global__ void softmax(const float* in, float* out, int rows, int columns) {
  __shared__ float row_copy[4][128];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * 4 + warp;
  if (row >= rows) return;
  float most = -INFINITY;
  for (int j = lane; j < columns; j += 32) most = fmaxf(most, in[row * columns + j]);
  for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, d));
  float sum = 0.0f;
  for (int j = lane; j < columns; j += 32) {
    row_copy[warp][j] = __expf(in[row * columns + j] - most);
    sum += row_copy[warp][j];
  }
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
  __syncwarp();
  for (int j = lane; j < columns; j += 32) out[row * columns + columns - 1 - j] = row_copy[warp][columns - 1 - j] / sum;
}

__global__ void nothing() {}

__global__ void hoard(char* out) {
  __shared__ char many[(48 << 10) + 1];
  many[threadIdx.x] = char(threadIdx.x);
  __syncthreads();
  *out = many[blockIdx.x];
}

}  // namespace

template <>
void Kernels<kTarget>::indices(uint32_t* out, const uint32_t (&grid)[3], const uint32_t (&block)[3]) {
  launch(write_indices, shape(grid), shape(block), 0, nullptr, out);
}
template <>
void Kernels<kTarget>::shuffles(int* out, int threads, int width) {
  launch(all_shuffles, 1, threads, 0, nullptr, out, width);
}
template <>
void Kernels<kTarget>::shuffle_types(double* out) {
  launch(shuffles_of_types, 1, 32, 0, nullptr, out);
}
template <>
void Kernels<kTarget>::votes(unsigned* out, int threads) {
  launch(all_votes, 1, threads, 0, nullptr, out);
}
template <>
void Kernels<kTarget>::partial_masks(int* out) {
  launch(halves_of_warp, 1, 32, 0, nullptr, out);
}
template <>
void Kernels<kTarget>::atomics(int* ints, float* sum, unsigned long long* big, int blocks) {
  launch(all_atomics, blocks, 64, 0, nullptr, ints, sum, big);
}
template <>
void Kernels<kTarget>::reverse(const float* in, float* out, int count) {
  launch(reverse_block, flash::ceil_div(count, 64), 64, 64 * sizeof(float), nullptr, in, out, count);
}
template <>
void Kernels<kTarget>::unwritten_shared(float* out, int blocks) {
  launch(read_unwritten, blocks, 1, 32 * sizeof(float), nullptr, out);
}
template <>
void Kernels<kTarget>::softmax_rows(const float* in, float* out, int rows, int columns) {
  launch(softmax, flash::ceil_div(rows, 4), 128, 0, nullptr, in, out, rows, columns);
}
template <>
void Kernels<kTarget>::empty(const uint32_t (&grid)[3], const uint32_t (&block)[3], size_t smem_bytes) {
  launch(nothing, shape(grid), shape(block), smem_bytes, nullptr);
}
template <>
void Kernels<kTarget>::too_much_static_shared(char* out) {
  launch(hoard, 1, 1, 0, nullptr, out);
}

}  // namespace simt_kernels
