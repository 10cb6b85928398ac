// One mistake a kernel with mbarriers, TMA, bulk copies or flags. Each kernel says where it makes it.
#include "harness/hopper.h"
#include "simt_kernels/async_kernels.h"

using namespace flash;

namespace simt_kernels {
namespace {

using enum AsyncFault;

int line;  // at which the mistake shows: set on the line before

// The second warp's first thread loads 32 floats into a tile, round after round; the first warp sums them up.
template <AsyncFault kFault>
__global__ void rounds(const float* in, float* out) {
  constexpr int kRounds = kFault == no_mbarrier_wait || kFault == wrong_parity ? 1 : 3;
  float* tile = dynamic_shared<float>();
  __shared__ Mbarrier full, empty;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    if (kFault != uninitialised_mbarrier) mbarrier_init(&full, 1);
    mbarrier_init(&empty, 32);
    if (kFault != no_mbarrier_fence) fence_mbarrier_init();
  }
  if (kFault != no_barrier_after_init) __syncthreads();
  if (threadIdx.x == 32) {
    for (int i = 0; i < kRounds; ++i) {
      if (kFault == no_arrive) line = __LINE__ + 1;
      if (kFault != no_wait_for_empty) mbarrier_wait(&empty, (i & 1) ^ 1);
      if (kFault == uninitialised_mbarrier) line = __LINE__ + 1;
      mbarrier_arrive_expect_tx(&full, kFault == wrong_bytes ? 144 : 128);
      if (kFault == arrival_too_many) line = __LINE__ + 1;
      if (kFault == arrival_too_many) mbarrier_arrive(&full);
      if (kFault == no_mbarrier_fence || kFault == no_wait_for_empty) line = __LINE__ + 1;
      bulk_load(tile, in + i * 32, 128, &full);
      if (kFault == no_wait_for_empty) mbarrier_wait(&full, i & 1);
    }
  } else if (threadIdx.x < 32) {
    float sum = 0.0f;
    for (int i = 0; i < kRounds; ++i) {
      if (kFault == wrong_bytes || kFault == no_barrier_after_init) line = __LINE__ + 1;
      if (kFault != no_mbarrier_wait) mbarrier_wait(&full, kFault == wrong_parity ? (i & 1) ^ 1 : i & 1);
      if (kFault == no_mbarrier_wait || kFault == wrong_parity) line = __LINE__ + 1;
      sum += tile[31 - lane];
      if (kFault != no_arrive) mbarrier_arrive(&empty);
    }
    out[lane] = sum;
  }
}

// All write a tile, one thread has it stored; then another writes it again.
template <AsyncFault kFault>
__global__ void store(const float* in, float* out) {
  constexpr bool kWritesAgain = kFault == none || kFault == no_bulk_wait_read;
  float* tile = dynamic_shared<float>();
  const int t = threadIdx.x;
  if (kFault == no_barrier_before_store) line = __LINE__ + 1;
  tile[t] = in[t];
  if (kFault != no_fence_before_store) fence_proxy_async();
  if (kFault != no_barrier_before_store) __syncthreads();
  if (t == 32) {
    if (kFault == no_fence_before_store || kFault == no_bulk_commit || kFault == no_bulk_wait) line = __LINE__ + 1;
    bulk_store(out, tile, 256);
    if (kFault != no_bulk_commit) bulk_commit();
    if (kFault != no_bulk_wait_read && kFault != no_bulk_wait) bulk_wait_read<0>();
  }
  __syncthreads();
  if (kFault == no_bulk_wait_read) line = __LINE__ + 1;
  if (kWritesAgain && t == 0) tile[0] = 0.0f;
  if (t == 32 && kFault != no_bulk_wait) bulk_wait<0>();
}

template <AsyncFault kFault>
__global__ void box(const __grid_constant__ TensorMap map, float* out) {  // 8 rows
  unsigned char* tile = dynamic_shared<unsigned char>();
  __shared__ Mbarrier full;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(&full, 1024);
    line = __LINE__ + 1;
    tma_load_3d(tile + (kFault == misaligned_box    ? 512
                        : kFault == box_past_shared ? 2048
                                                    : 0),
                &map, 0, kFault == box_past_tensor ? 124 : 0, 0, &full);
  }
  __syncthreads();
  mbarrier_wait(&full, 0);
  out[threadIdx.x] = float(tile[threadIdx.x]);
}

// The first block leaves numbers to the second.
template <AsyncFault kFault>
__global__ void tell(const float* in, float* out) {
  int* flag = reinterpret_cast<int*>(out + 128);
  const int t = threadIdx.x;
  if (blockIdx.x == 0) {
    out[t] = in[t];
    __syncthreads();
    if (t == 0) kFault == no_release ? void(atomicExch(flag, 1)) : store_release(flag, 1);
  } else {
    if (kFault == flag_never_set) line = __LINE__ + 2;
    if (t == 0)
      while (load_acquire(flag) < (kFault == flag_never_set ? 2 : 1)) {
      }
    __syncthreads();
    if (kFault == no_release) line = __LINE__ + 1;
    out[64 + t] = out[63 - t];
  }
}

}  // namespace

template <>
void AsyncKernels<kTarget>::hopper_fault(AsyncFault fault, const float* in, float* out) {
  const auto run = [&](void (*kernel)(const float*, float*), int blocks = 1) {
    launch(kernel, blocks, 64, 2048, nullptr, in, out);
  };
  const auto run_box = [&](void (*kernel)(TensorMap, float*), unsigned rows = 8) {
    const unsigned size[3] = {64, rows, 1};
    launch(kernel, 1, 64, 2048, nullptr, tensor_map<__half>(in, size, 8), out);
  };
  switch (fault) {
    case no_mbarrier_wait:
      return run(rounds<no_mbarrier_wait>);
    case wrong_parity:
      return run(rounds<wrong_parity>);
    case no_arrive:
      return run(rounds<no_arrive>);
    case arrival_too_many:
      return run(rounds<arrival_too_many>);
    case wrong_bytes:
      return run(rounds<wrong_bytes>);
    case uninitialised_mbarrier:
      return run(rounds<uninitialised_mbarrier>);
    case no_mbarrier_fence:
      return run(rounds<no_mbarrier_fence>);
    case no_barrier_after_init:
      return run(rounds<no_barrier_after_init>);
    case no_wait_for_empty:
      return run(rounds<no_wait_for_empty>);
    case no_fence_before_store:
      return run(store<no_fence_before_store>);
    case no_barrier_before_store:
      return run(store<no_barrier_before_store>);
    case no_bulk_commit:
      return run(store<no_bulk_commit>);
    case no_bulk_wait_read:
      return run(store<no_bulk_wait_read>);
    case no_bulk_wait:
      return run(store<no_bulk_wait>);
    case misaligned_box:
      return run_box(box<misaligned_box>);
    case box_past_shared:
      return run_box(box<box_past_shared>);
    case box_past_tensor:
      return run_box(box<box_past_tensor>, 4096);  // the array has 128 rows
    case no_release:
      return run(tell<no_release>, 2);
    case flag_never_set:
      return run(tell<flag_never_set>, 2);
    default:
      run(rounds<none>);
      run(store<none>);
      run_box(box<none>);
      run(tell<none>, 2);
  }
}

template <>
int AsyncKernels<kTarget>::hopper_fault_line() {
  return line;
}

}  // namespace simt_kernels
