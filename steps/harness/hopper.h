// What Hopper (sm_90a) has beyond Ampere: mbarriers, the tensor memory accelerator (TMA), wgmma, registers that move
// between warps. One function an instruction; nvcc gets the PTX below, the CPU executor has its own definitions
// (simt/hopper.h). Sections are those of the PTX ISA, version 8.7. The products themselves: harness/wgmma.h.
#pragma once
#include "harness/tensor_cores.h"

#ifndef __CUDACC__
#include "simt/hopper.h"
#else
#include <cuda.h>

namespace flash {
inline namespace gpu {

// ---- mbarrier (9.7.13.15): counts arrivals and bytes. A phase ends when as many threads have arrived as it was made
// for and all bytes announced have come; the next phase begins at once. The first phase has parity 0.
struct Mbarrier {
  uint64_t state;
};
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity is over.
__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE%=;\n"
      "bra WAIT%=;\nDONE%=:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Whether it is over.
__device__ __forceinline__ bool mbarrier_test(Mbarrier* barrier, unsigned parity) {
  uint32_t over;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(over)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return over;
}
// Makes initialised mbarriers visible to TMA (9.7.13.4).
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Makes what this thread has written to shared memory visible to TMA and wgmma, the "async proxy" (9.7.13.4).
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders this thread's accesses to global memory with those of the bulk copies around it.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- TMA (9.7.9.25.5): one thread moves a box of a tensor. A row of a box has 128 bytes, and its 16-byte piece p lies
// at p ^ (r % 8) in row r, so that neither rows nor columns of pieces collide in the banks; or it has 64 bytes, and the
// piece lies at p ^ (r / 2 % 4). Boxes begin at multiples of 1,024 bytes of shared memory. What lies outside the tensor
// reads as zero and is not written.
struct alignas(128) TensorMap {
  CUtensorMap map;
};
// The tensor [size[2]][size[1]][size[0]] of T at `base`, in boxes of [1][box_rows][kRowBytes / sizeof(T)]. For the
// host. Throws KernelFault if the driver refuses.
template <class T, int kRowBytes = 128>
TensorMap tensor_map(const void* base, const unsigned (&size)[3], unsigned box_rows) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found),
             "cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess) throw KernelFault("the driver has no cuTensorMapEncodeTiled: update it");
  const cuuint64_t sizes[3] = {size[0], size[1], size[2]};
  const cuuint64_t strides[2] = {size[0] * sizeof(T), cuuint64_t(size[0]) * size[1] * sizeof(T)};
  const cuuint32_t box[3] = {kRowBytes / sizeof(T), box_rows, 1}, steps[3] = {1, 1, 1};
  const auto type = sizeof(T) == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                    : kIsBfloat16<T> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  TensorMap tensor;
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      &tensor.map, type, 3, const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      kRowBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw KernelFault("cuTensorMapEncodeTiled refuses a tensor, error " + std::to_string(int(status)));
  return tensor;
}
__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map->map) : "memory");
}
// Loads the box at (x, y, z), counted in elements; `barrier` gets its bytes when they are there.
__device__ __forceinline__ void tma_load_3d(void* shared, const TensorMap* map, int x, int y, int z,
                                            Mbarrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(&map->map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Stores a box. Before it, fence_proxy_async() by those who wrote it and a barrier; after it, bulk_commit().
__device__ __forceinline__ void tma_store_3d(const TensorMap* map, const void* shared, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map->map),
               "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
               : "memory");
}

// ---- Bulk copies without a tensor map (9.7.9.25.4): addresses and sizes are multiples of 16 bytes.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes, Mbarrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void bulk_store(float* global, const void* shared, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}
// global[i] += shared[i], each addition one atomic step.
__device__ __forceinline__ void bulk_reduce_add(float* global, const void* shared, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}
// This thread's stores since the last commit become a group. bulk_wait_read: until all but the newest kPending groups
// have read their shared memory, which may then be written again; bulk_wait: until they are done altogether.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Stores four 8×8 matrices of 16-bit elements, ldmatrix's counterpart (9.7.14.5.16); with _trans, their transposes.
__device__ __forceinline__ void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// A flag between blocks (9.7.9.8, 9.7.9.11): who reads by load_acquire what store_release wrote sees what was written
// before it.
__device__ __forceinline__ int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(int* p, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

// ---- A kernel that was started by launch_early() may run beside the one before it on its stream, once all blocks of
// that one have called grid_dependency_launch() or ended. grid_dependency_wait() waits for its end, and makes what it
// wrote visible (9.7.13.13).
__device__ __forceinline__ void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- Registers (9.7.19.5): a warpgroup gives registers back, another takes them. The kernel needs
// __launch_bounds__(threads, 1), and the sum must stay within what the block was launched with, else it waits for ever.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace gpu
}  // namespace flash
#endif
