// One mistake a kernel with wgmma. Each kernel says where it makes it.
#include "harness/wgmma.h"
#include "simt_kernels/async_kernels.h"

using namespace flash;

namespace simt_kernels {
namespace {

using enum AsyncFault;

int line;  // at which the mistake shows: set on the line before

// Two tiles that the threads write themselves, and their product.
template <AsyncFault kFault>
__global__ void product(const float* in, float* out) {
  constexpr bool kOverwritten = kFault == tile_overwritten || kFault == tile_overwritten_after_barrier;
  uint32_t* tile = dynamic_shared<uint32_t>();
  const int t = threadIdx.x;
  if (kFault == no_fence_before_wgmma || kFault == no_barrier_before_wgmma) line = __LINE__ + 1;
  for (int i = t; i < 4096; i += 128) tile[i] = pack<__half>(in[i], 0.5f);
  if (kFault != no_fence_before_wgmma) fence_proxy_async();
  if (kFault != no_barrier_before_wgmma) __syncthreads();

  const uint64_t a = wgmma_operand(tile), b = a + 8192 / 16;
  float sum[32];
  if (kFault != no_wgmma_fence) wgmma_fence();
  if (kFault == no_wgmma_fence || kFault == operand_past_shared || kFault == operands_differ) line = __LINE__ + 1;
  wgmma<64, __half, Major::K, Major::K, false>(sum, a,
                                               b + (kFault == operand_past_shared ? 64
                                                    : kFault == operands_differ   ? t / 32 * 2
                                                                                  : 0));
  if (kFault != no_wgmma_commit) wgmma_commit();
  if (kFault == tile_overwritten_after_barrier) __syncthreads();
  if (kOverwritten) line = __LINE__ + 1;
  if (kOverwritten && t == 64) tile[5] = 0;
  if (kFault == tile_overwritten_after_barrier) __syncthreads();
  if (kFault == registers_reused) sum[5] = 0.0f;
  if (kFault == registers_reused) line = __LINE__ + 2;
  if (kFault == wgmma_wait_pending || kFault == no_wgmma_commit) line = __LINE__ + 1;
  if (kFault != no_wgmma_wait) wgmma_wait<kFault == wgmma_wait_pending>(sum);
  for (int i = 0; i < 32; ++i) out[i * 128 + t] = sum[i];
}

// A producer fills one stage again and again, two warpgroups multiply it with itself.
template <AsyncFault kFault>
__global__ void __launch_bounds__(384, 1) pipeline(const float* in, float* out) {
  float* stage = dynamic_shared<float>();
  __shared__ Mbarrier full, empty;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&empty, kFault == stage_released_by_one ? 1 : 2);
    fence_mbarrier_init();
  }
  __syncthreads();
  const int group = threadIdx.x / 128, t = threadIdx.x % 128;
  if (kFault == too_many_registers) line = __LINE__ + 4;
  if (group == 0)
    setmaxnreg_dec<40>();
  else  // of 168 at launch, 128 are to be had, for two
    setmaxnreg_inc<kFault == too_many_registers ? 240 : 232>();
  if (group == 0) {
    for (int i = 0; t == 0 && i < 3; ++i) {
      mbarrier_wait(&empty, (i & 1) ^ 1);
      mbarrier_arrive_expect_tx(&full, 8192);
      line = __LINE__ + 1;
      bulk_load(stage, in, 8192, &full);
    }
    return;
  }
  float sum[32] = {};
  for (int i = 0; i < 3; ++i) {
    mbarrier_wait(&full, i & 1);
    wgmma_fence();
    wgmma<64, __nv_bfloat16, Major::K, Major::K, true>(sum, wgmma_operand(stage), wgmma_operand(stage));
    wgmma_commit();
    if (kFault == stage_released_early && t == 0) mbarrier_arrive(&empty);
    if (kFault == stage_released_early) named_barrier_sync(1, 384 - 128);
    wgmma_wait<0>(sum);
    if (kFault == stage_released_by_one && threadIdx.x == 128) mbarrier_arrive(&empty);
    if (kFault == none && t == 0) mbarrier_arrive(&empty);
  }
  for (int i = 0; i < 16; ++i) out[(group - 1) * 2048 + i * 128 + t] = sum[i];
}

}  // namespace

template <>
void AsyncKernels<kTarget>::wgmma_fault(AsyncFault fault, const float* in, float* out) {
  const auto run = [&](void (*kernel)(const float*, float*), int threads = 128, size_t smem_bytes = 16384) {
    launch(kernel, 1, threads, smem_bytes, nullptr, in, out);
  };
  switch (fault) {
    case no_wgmma_wait:
      return run(product<no_wgmma_wait>);
    case wgmma_wait_pending:
      return run(product<wgmma_wait_pending>);
    case registers_reused:
      return run(product<registers_reused>);
    case too_many_registers:
      return run(pipeline<too_many_registers>, 384, 8192);
    case no_wgmma_commit:
      return run(product<no_wgmma_commit>);
    case no_fence_before_wgmma:
      return run(product<no_fence_before_wgmma>);
    case no_barrier_before_wgmma:
      return run(product<no_barrier_before_wgmma>);
    case no_wgmma_fence:
      return run(product<no_wgmma_fence>);
    case tile_overwritten:
      return run(product<tile_overwritten>);
    case tile_overwritten_after_barrier:
      return run(product<tile_overwritten_after_barrier>);
    case operand_past_shared:
      return run(product<operand_past_shared>);
    case operands_differ:
      return run(product<operands_differ>);
    case stage_released_early:
      return run(pipeline<stage_released_early>, 384, 8192);
    case stage_released_by_one:
      return run(pipeline<stage_released_by_one>, 384, 8192);
    default:
      run(pipeline<none>, 384, 8192);
      run(product<none>);
  }
}

template <>
int AsyncKernels<kTarget>::wgmma_fault_line() {
  return line;
}

}  // namespace simt_kernels
