// One mistake a kernel with cp.async, ldmatrix or named barriers. Each kernel says where it makes it.
#include "harness/tensor_cores.h"
#include "simt_kernels/async_kernels.h"

using namespace flash;

namespace simt_kernels {
namespace {

using enum AsyncFault;

int line;  // at which the mistake shows: set on the line before

// Two tiles of 16 floats come in, the second one twice. 4 threads of the second warp copy, 16 of the first use them.
template <AsyncFault kFault>
__global__ void copy(const float* in, float* out) {
  __shared__ __align__(16) float tile[2][16];
  const int t = threadIdx.x;
  const int c = t - 32;  // which copies, if any
  const bool copies = c >= 0 && c < 4, uses = t < 16;
  for (int i = 0; i < 2; ++i) {
    if (copies) cp_async_16(&tile[i][c * 4], &in[i * 16 + c * 4]);
    cp_async_commit();
  }
  cp_async_wait<1>();
  __syncthreads();
  if (uses) out[t] = tile[0][15 - t];
  if (kFault == copy_wait_pending) cp_async_wait<1>();
  if (kFault != no_copy_wait && kFault != copy_wait_pending) cp_async_wait<0>();
  if (kFault != no_barrier_after_copy_wait) __syncthreads();
  line = __LINE__ + 1;
  if (uses) out[16 + t] = tile[1][15 - t];
  if (kFault != tile_reused_too_early) __syncthreads();
  if (copies) cp_async_16(&tile[1][c * 4], &in[32 + c * 4]);
  if (kFault != no_copy_commit) cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  line = kFault == no_copy_commit ? __LINE__ + 1 : line;
  if (uses) out[32 + t] = tile[1][15 - t];
}

// The first warp hands 32 numbers to the second one.
template <AsyncFault kFault>
__global__ void hand_over_once(const float* in, float* out) {
  __shared__ float tile[32];
  constexpr int kNumber = kFault == named_barrier_number ? 16 : 3,
                kThreads = kFault == named_barrier_too_many ? 96 : 64;
  const int t = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    tile[t] = in[t];
    line = __LINE__ + 1;
    named_barrier_arrive(kNumber, kThreads);
  } else {
    line = kFault == named_barrier_number ? line : __LINE__ + 1;
    if (kFault != no_named_barrier) named_barrier_sync(3, kFault == named_barrier_counts_differ ? 96 : kThreads);
    line = kFault == no_named_barrier ? __LINE__ + 1 : line;
    out[t] = tile[31 - t];
  }
}

template <AsyncFault kFault>
__global__ void rows(const float* in, float* out) {
  float* tile = dynamic_shared<float>();  // 33 rows of 4
  const int t = threadIdx.x;
  for (int i = 0; i < 4; ++i) tile[t * 4 + i] = in[t];
  __syncthreads();
  uint32_t r[4] = {};
  line = __LINE__ + 1;
  if (kFault != copy_past_shared) ldmatrix_x4(r, &tile[t * 4 + (kFault == misaligned_row ? 2 : 0)]);
  line = kFault == copy_past_shared ? __LINE__ + 1 : line;
  if (kFault == copy_past_shared) cp_async_16(&tile[33 * 4], in);
  out[t] = float(r[0]);
}

}  // namespace

template <>
void AsyncKernels<kTarget>::ampere_fault(AsyncFault fault, const float* in, float* out) {
  const auto run = [&](void (*kernel)(const float*, float*), int threads, size_t smem_bytes = 0) {
    launch(kernel, 1, threads, smem_bytes, nullptr, in, out);
  };
  switch (fault) {
    case no_copy_wait:
      return run(copy<no_copy_wait>, 64);
    case no_copy_commit:
      return run(copy<no_copy_commit>, 64);
    case copy_wait_pending:
      return run(copy<copy_wait_pending>, 64);
    case no_barrier_after_copy_wait:
      return run(copy<no_barrier_after_copy_wait>, 64);
    case tile_reused_too_early:
      return run(copy<tile_reused_too_early>, 64);
    case named_barrier_too_many:
      return run(hand_over_once<named_barrier_too_many>, 64);
    case named_barrier_counts_differ:
      return run(hand_over_once<named_barrier_counts_differ>, 64);
    case no_named_barrier:
      return run(hand_over_once<no_named_barrier>, 64);
    case named_barrier_number:
      return run(hand_over_once<named_barrier_number>, 64);
    case misaligned_row:
      return run(rows<misaligned_row>, 32, 33 * 16);
    case copy_past_shared:
      return run(rows<copy_past_shared>, 32, 33 * 16);
    default:
      run(copy<none>, 64);
      run(hand_over_once<none>, 64);
      run(rows<none>, 32, 33 * 16);
  }
}

template <>
int AsyncKernels<kTarget>::ampere_fault_line() {
  return line;
}

}  // namespace simt_kernels
