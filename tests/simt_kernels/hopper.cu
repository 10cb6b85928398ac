// TMA, bulk copies, mbarriers and flags: each with a result that is known otherwise.
#include "harness/hopper.h"
#include "simt_kernels/async_kernels.h"

using namespace flash;

namespace simt_kernels {
namespace {

constexpr int kBoxRows = 16;

// Loads a box, hands out shared memory as it then is, and stores the box elsewhere.
__global__ void box(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, int x, int y, int z,
                    uint8_t* raw, int bytes) {
  uint8_t* tile = dynamic_shared<uint8_t>();
  __shared__ Mbarrier full;
  if (threadIdx.x == 0) {
    tma_prefetch(&from);
    mbarrier_init(&full, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&full, bytes);
    tma_load_3d(tile, &from, x, y, z, &full);
  }
  mbarrier_wait(&full, 0);
  for (int i = threadIdx.x; i < bytes; i += 64) raw[i] = tile[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store_3d(&to, tile, x, y, z);
    bulk_commit();
    bulk_wait<0>();
  }
}

// out[0] = in, out[1] += 2 · in, by way of shared memory; 256 floats.
__global__ void runs(const float* in, float* out) {
  float* tile = dynamic_shared<float>();
  __shared__ Mbarrier full;
  const int t = threadIdx.x;
  if (t == 0) {
    mbarrier_init(&full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&full, 1024);
    bulk_load(tile, in, 1024, &full);
  }
  __syncthreads();
  while (!mbarrier_test(&full, 0)) {
  }
  tile[256 + t] = 2.0f * tile[t];
  fence_proxy_async();
  __syncthreads();
  if (t == 0) {
    bulk_store(out, tile, 1024);
    bulk_commit();
    bulk_reduce_add(out + 256, tile + 256, 512);
    bulk_reduce_add(out + 256 + 128, tile + 256 + 128, 512);
    bulk_commit();
    bulk_wait_read<1>();
    tile[0] = -1.0f;
    bulk_wait_read<0>();
    tile[256] = -1.0f;
    bulk_wait<0>();
  }
}

// A ring of stages: one warp loads rows of 32 floats, the other sums them up.
__global__ void ring(const float* in, float* out, int rows) {
  constexpr int kStages = 3;
  float* tile = dynamic_shared<float>();
  __shared__ Mbarrier full[kStages], empty[kStages];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 32);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    setmaxnreg_dec<24>();
    for (int i = 0; i < rows; ++i) {
      const int s = i % kStages;
      mbarrier_wait(&empty[s], (i / kStages & 1) ^ 1);
      mbarrier_arrive_expect_tx(&full[s], 128);
      bulk_load(tile + s * 32, in + i * 32, 128, &full[s]);
    }
  } else if (threadIdx.x >= 32) {
    setmaxnreg_inc<240>();
    float sum = 0.0f;
    for (int i = 0; i < rows; ++i) {
      const int s = i % kStages;
      mbarrier_wait(&full[s], i / kStages & 1);
      sum += tile[s * 32 + 31 - lane];
      mbarrier_arrive(&empty[s]);
    }
    out[lane] = sum;
  }
}

// Each block waits for the one before, then adds its number to a list that only flags protect.
__global__ void chain(int* flag, int* list) {
  const int block = blockIdx.x;
  if (threadIdx.x == 0)
    while (load_acquire(flag) < block) {
    }
  __syncthreads();
  list[threadIdx.x] = list[threadIdx.x] * 3 + block;
  __syncthreads();
  if (threadIdx.x == 0) store_release(flag, block + 1);
}

// The block that comes last sums up what all have written.
__global__ void last_block(int* counter, int* parts, int* sum) {
  __shared__ bool last;
  parts[blockIdx.x * 32 + threadIdx.x] = int(blockIdx.x + threadIdx.x);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(counter, 1) == int(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  int mine = 0;
  for (int i = 0; i < int(gridDim.x); ++i) mine += parts[i * 32 + threadIdx.x];
  atomicAdd(sum, mine);
}

// A lock by atomics, and what it protects.
__global__ void locked(int* lock, int* count) {
  for (int i = 0; i < 3; ++i) {
    while (atomicCAS(lock, 0, 1) != 0) {
    }
    __threadfence();
    *count += 1;
    __threadfence();
    atomicExch(lock, 0);
  }
}

}  // namespace

template <>
void AsyncKernels<kTarget>::move_box(bool bytes, int row_bytes, const void* from, void* to, const unsigned (&size)[3],
                                     const int (&at)[3], uint8_t* raw) {
  const auto map = [&](const void* base) {
    if (row_bytes == 64)
      return bytes ? tensor_map<uint8_t, 64>(base, size, kBoxRows) : tensor_map<__half, 64>(base, size, kBoxRows);
    return bytes ? tensor_map<uint8_t>(base, size, kBoxRows) : tensor_map<__half>(base, size, kBoxRows);
  };
  const int box_bytes = kBoxRows * row_bytes;
  launch(box, 1, 64, box_bytes, nullptr, map(from), map(to), at[0], at[1], at[2], raw, box_bytes);
}
template <>
void AsyncKernels<kTarget>::bulk_runs(const float* in, float* out) {
  launch(runs, 1, 256, 2048, nullptr, in, out);
}
template <>
void AsyncKernels<kTarget>::ring_sum(const float* in, float* out, int rows) {
  launch(ring, 1, 64, 384, nullptr, in, out, rows);
}
template <>
void AsyncKernels<kTarget>::flag_chain(int* flag, int* list, int blocks) {
  launch(chain, blocks, 32, 0, nullptr, flag, list);
}
template <>
void AsyncKernels<kTarget>::last_block_sum(int* counter, int* parts, int* sum, int blocks) {
  launch(last_block, blocks, 32, 0, nullptr, counter, parts, sum);
}
template <>
void AsyncKernels<kTarget>::lock_and_count(int* lock, int* count, int blocks) {
  launch(locked, blocks, 32, 0, nullptr, lock, count);
}

}  // namespace simt_kernels
