// One mistake a kernel. Each says where it makes it, so that the test can compare that with what is found.
#include <stdexcept>

#include "harness/kernel.h"
#include "simt_kernels/simt_kernels.h"

using flash::dynamic_shared;
using flash::kTarget;
using flash::launch;

namespace simt_kernels {
namespace {

constexpr unsigned kAll = 0xffffffffu;

int line;  // of the mistake: set on the line before

__global__ void none(float* data, float* result) {
  __shared__ float x[64];
  x[threadIdx.x] = data[threadIdx.x];
  __syncthreads();
  result[threadIdx.x] = x[63 - threadIdx.x];
}

__global__ void early_exit(float* data, float* result) {
  if (threadIdx.x == 5) return;
  line = __LINE__ + 1;
  __syncthreads();
  result[threadIdx.x] = data[threadIdx.x];
}

__global__ void barrier_in_branch(float* data, float* result) {
  __shared__ float x[64];
  x[threadIdx.x] = data[threadIdx.x];
  if (threadIdx.x < 32) __syncthreads();
  line = __LINE__ + 1;
  __syncthreads();
  result[threadIdx.x] = x[63 - threadIdx.x];
}

__global__ void two_barriers(float* data, float* result) {  // as many arrive as at one
  if (threadIdx.x % 2) {
    result[threadIdx.x] = data[0];
    __syncthreads();
  } else {
    result[threadIdx.x] = data[1];
    line = __LINE__ - 3;
    __syncthreads();
  }
}

__global__ void warp_and_block_barrier(float* data, float* result) {
  result[threadIdx.x] = data[threadIdx.x];
  line = __LINE__ + 2;
  if (threadIdx.x % 2)
    __syncwarp();
  else
    __syncthreads();
}

__global__ void different_collectives(float* data, float* result) {
  result[threadIdx.x] = data[threadIdx.x];
  line = __LINE__ + 2;
  if (threadIdx.x % 2)
    __syncwarp();
  else
    result[threadIdx.x] = __shfl_sync(kAll, 1.0f, 0);
}

__global__ void not_in_own_mask(float* data, float* result) {
  line = __LINE__ + 1;
  result[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, data[0], 1);
}

__global__ void overlapping_masks(float* data, float* result) {
  const unsigned mask = threadIdx.x % 32 < 8 ? 0x000001ffu : kAll;
  line = __LINE__ + 1;
  result[threadIdx.x] = __shfl_xor_sync(mask, data[0], 1);
}

__global__ void absent_lane(float* data, float* result) {
  line = __LINE__ + 1;
  if (threadIdx.x < 16) result[threadIdx.x] = __shfl_sync(0x0000ffffu, data[0], 20);
}

__global__ void beyond_last_lane(float* data, float* result) {  // 40 threads: lane 8 of the second warp is not there
  line = __LINE__ + 1;
  result[threadIdx.x] = __shfl_sync(kAll, data[0], 8);
}

__global__ void exception(float*, float*) { throw std::runtime_error("not in a kernel"); }

__global__ void missing_barrier(float* data, float* result) {
  __shared__ float tile[64];
  tile[threadIdx.x] = data[threadIdx.x];
  line = __LINE__ + 1;
  result[threadIdx.x] = tile[63 - threadIdx.x];
}

__global__ void missing_syncwarp(float* data, float* result) {
  __shared__ float tile[2][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  tile[warp][lane] = data[threadIdx.x];
  __syncwarp();
  result[threadIdx.x] = tile[warp][31 - lane];
  line = __LINE__ + 1;
  tile[warp][lane] = result[threadIdx.x];
}

__global__ void shuffle_for_barrier(float* data, float* result) {  // a shuffle orders no memory accesses
  __shared__ float tile[2][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  tile[warp][lane] = __shfl_xor_sync(kAll, data[threadIdx.x], 1);
  const float x = __shfl_xor_sync(kAll, data[threadIdx.x], 1);
  line = __LINE__ + 1;
  result[threadIdx.x] = x + tile[warp][31 - lane];
}

__global__ void byte_race(float*, float* result) {  // bytes next to each other are no race, the same byte is one
  __shared__ unsigned char bytes[64];
  bytes[threadIdx.x] = 1;
  __syncthreads();
  line = __LINE__ + 1;
  bytes[threadIdx.x / 2] = 2;
  __syncthreads();
  if (threadIdx.x < 16) result[threadIdx.x] = float(reinterpret_cast<unsigned*>(bytes)[threadIdx.x]);
}

__global__ void two_readers(float* data, float* result) {  // the last reader writes, others have read too
  __shared__ float x;
  if (threadIdx.x == 0) x = data[0];
  __syncthreads();
  const float mine = x;
  line = __LINE__ + 1;
  if (threadIdx.x == 62) x = mine + 1.0f;
  result[threadIdx.x] = mine;
}

__global__ void atomic_and_plain(float* data, float*) {
  line = __LINE__ + 2;
  if (threadIdx.x == 0)
    data[0] = 1.0f;
  else
    atomicAdd(&data[0], 1.0f);
}

__global__ void blocks_write_one_word(float*, float* result) {
  line = __LINE__ + 1;
  if (threadIdx.x == 0) result[0] = float(blockIdx.x);
}

__global__ void blocks_read_after_write(float*, float* result) {
  if (threadIdx.x == 0) result[blockIdx.x] = 1.0f;
  __threadfence();
  __syncthreads();
  line = __LINE__ + 1;
  if (threadIdx.x == 1) result[32 + blockIdx.x] = result[1 - blockIdx.x];
}

__global__ void past_end(float* data, float* result) {
  line = __LINE__ + 1;
  result[threadIdx.x] = data[256 + threadIdx.x];
}

__global__ void before_start(float* data, float*) {
  line = __LINE__ + 1;
  if (threadIdx.x == 0) data[-1] = 0.0f;
}

__global__ void host_pointer(float* data, float* result) {
  line = __LINE__ + 1;
  result[threadIdx.x] = data[threadIdx.x];
}

__global__ void past_dynamic_shared(float* data, float* result) {  // 64 floats
  float* x = dynamic_shared<float>();
  line = __LINE__ + 1;
  x[threadIdx.x + 1] = data[threadIdx.x];
  result[threadIdx.x] = x[threadIdx.x + 1];
}

__global__ void far_past_static_shared(float* data, float* result) {
  __shared__ float x[64];
  float* pointer = x;
  line = __LINE__ + 1;
  pointer[threadIdx.x + 100'000'000] = data[threadIdx.x];
  result[threadIdx.x] = x[threadIdx.x];
}

// The arrays of the instances are likely to lie one after the other.
template <int kInstance>
__global__ void past_static_shared(float* data, float* result) {
  __shared__ float x[64];
  float* pointer = x;
  pointer[threadIdx.x + 1] = data[threadIdx.x];
  __syncthreads();
  result[threadIdx.x] = x[63];
}

__global__ void row_overflow(float*, float* result, int width) {  // into the next row, which is inside the array
  __shared__ float tile[4][33];
  line = __LINE__ + 1;
  for (int i = threadIdx.x; i < width; i += 64) tile[1][i] = float(i);
  __syncthreads();
  result[threadIdx.x] = tile[1][threadIdx.x % 33];
}

__global__ void misaligned(float* data, float* result) {
  line = __LINE__ + 1;
  const float4 v = *reinterpret_cast<const float4*>(data + threadIdx.x * 2);
  result[threadIdx.x] = v.x;
}

__global__ void uninitialised_static(float* data, float* result) {
  __shared__ float x[64];
  if (threadIdx.x != 7) x[threadIdx.x] = data[threadIdx.x];
  line = __LINE__ + 1;
  result[threadIdx.x] = x[threadIdx.x];
}

__global__ void uninitialised_dynamic(float* data, float* result) {
  float* x = dynamic_shared<float>();
  if (threadIdx.x != 7) x[threadIdx.x] = data[threadIdx.x];
  line = __LINE__ + 1;
  result[threadIdx.x] = x[threadIdx.x];
}

__global__ void uninitialised_global(float* data, float* result) {
  line = __LINE__ + 1;
  data[threadIdx.x] = result[threadIdx.x];
}

__global__ void write_at(float* data, int index) { data[index] = 1.0f; }

}  // namespace

template <>
void Kernels<kTarget>::fault(Fault fault, float* data, float* result) {
  line = 0;
  const auto run = [&](void (*kernel)(float*, float*), int blocks = 1, int threads = 64, size_t smem_bytes = 0) {
    launch(kernel, blocks, threads, smem_bytes, nullptr, data, result);
  };
  switch (fault) {
    case Fault::none:
      return run(none);
    case Fault::early_exit:
      return run(early_exit);
    case Fault::barrier_in_branch:
      return run(barrier_in_branch);
    case Fault::two_barriers:
      return run(two_barriers);
    case Fault::warp_and_block_barrier:
      return run(warp_and_block_barrier);
    case Fault::different_collectives:
      return run(different_collectives);
    case Fault::not_in_own_mask:
      return run(not_in_own_mask);
    case Fault::overlapping_masks:
      return run(overlapping_masks);
    case Fault::absent_lane:
      return run(absent_lane);
    case Fault::beyond_last_lane:
      return run(beyond_last_lane, 1, 40);
    case Fault::exception:
      return run(exception);
    case Fault::missing_barrier:
      return run(missing_barrier);
    case Fault::missing_syncwarp:
      return run(missing_syncwarp);
    case Fault::shuffle_for_barrier:
      return run(shuffle_for_barrier);
    case Fault::byte_race:
      return run(byte_race);
    case Fault::two_readers:
      return run(two_readers);
    case Fault::atomic_and_plain:
      return run(atomic_and_plain);
    case Fault::blocks_write_one_word:
      return run(blocks_write_one_word, 2);
    case Fault::blocks_read_after_write:
      return run(blocks_read_after_write, 2);
    case Fault::past_end:
      return run(past_end);
    case Fault::before_start:
      return run(before_start);
    case Fault::host_pointer:
      return run(host_pointer);
    case Fault::past_dynamic_shared:
      return run(past_dynamic_shared, 1, 64, 64 * sizeof(float));
    case Fault::far_past_static_shared:
      return run(far_past_static_shared);
    case Fault::past_static_shared_0:
      return run(past_static_shared<0>);
    case Fault::past_static_shared_1:
      return run(past_static_shared<1>);
    case Fault::past_static_shared_2:
      return run(past_static_shared<2>);
    case Fault::row_overflow:
      return launch(row_overflow, 1, 64, 0, nullptr, data, result, 34);
    case Fault::misaligned:
      return run(misaligned);
    case Fault::uninitialised_static:
      return run(uninitialised_static);
    case Fault::uninitialised_dynamic:
      return run(uninitialised_dynamic, 1, 64, 64 * sizeof(float));
    case Fault::uninitialised_global:
      return run(uninitialised_global);
  }
}

template <>
int Kernels<kTarget>::fault_line() {
  return line;
}

template <>
void Kernels<kTarget>::overrun(float* data, int index) {
  launch(write_at, 1, 1, 0, nullptr, data, index);
}

}  // namespace simt_kernels
