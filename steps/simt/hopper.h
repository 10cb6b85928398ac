// Hopper's mbarriers, TMA and bulk copies for the CPU executor: the twin of harness/hopper.h, which says what each
// function does. The work is done by the executor (mbarriers.cpp, bulk_copies.cpp, flags.cpp).
//
// Clusters are not modelled: a block is alone.
#pragma once
#include "simt/tensor_cores.h"

namespace simt {

// The state is the executor's; these bytes mark the place.
struct Mbarrier {
  uint64_t state;
};
void init_mbarrier(Mbarrier* barrier, unsigned arrivals);
void arrive_at_mbarrier(Mbarrier* barrier, unsigned expected_bytes);
void wait_for_mbarrier(Mbarrier* barrier, unsigned parity);
bool test_mbarrier(Mbarrier* barrier, unsigned parity);
void fence_mbarriers();
void fence_async_proxy();

// A tensor of three dimensions in global memory, and the boxes that it is moved in: `box_rows` rows of 128 or 64 bytes.
struct alignas(128) TensorMap {
  const unsigned char* base;
  unsigned size[3];
  unsigned box_rows;
  unsigned element_bytes;
  unsigned row_bytes;
};
// Throws flash::KernelFault for what a driver refuses.
TensorMap make_tensor_map(const void* base, const unsigned (&size)[3], unsigned box_rows, unsigned element_bytes,
                          unsigned row_bytes);

// How a 16-byte piece's place within the rows of a box is exchanged: with the address's bits 4 and up, by these bits
// from bit 7 on. For rows of 128 bytes 8 rows differ, for rows of 64 bytes 8 rows make 4 different pairs.
constexpr unsigned swizzle_mask(unsigned row_bytes) { return row_bytes / 16 - 1; }

void start_box_load(void* shared, const TensorMap* map, int x, int y, int z, Mbarrier* barrier);
void start_box_store(const TensorMap* map, const void* shared, int x, int y, int z);
void start_bulk_load(void* shared, const void* global, unsigned bytes, Mbarrier* barrier);
void start_bulk_store(float* global, const void* shared, unsigned bytes);
void start_bulk_add(float* global, const void* shared, unsigned bytes);
void commit_bulk_stores();
void wait_for_bulk_reads(int pending);
void wait_for_bulk_stores(int pending);

int read_flag(const int* flag);
void write_flag(int* flag, int value);

// The thread goes on with so many registers: gives the rest back, or waits until there are that many to be had.
void give_registers(int registers);
void take_registers(int registers);

}  // namespace simt

namespace flash {
inline namespace FLASH_TARGET {

using simt::Mbarrier, simt::TensorMap;

SIMT_INLINE void mbarrier_init(Mbarrier* barrier, unsigned arrivals) {
  simt::init_mbarrier(barrier, arrivals);
  simt::stay_in_kernel();
}
SIMT_INLINE void mbarrier_arrive(Mbarrier* barrier) {
  simt::arrive_at_mbarrier(barrier, 0);
  simt::stay_in_kernel();
}
SIMT_INLINE void mbarrier_arrive_expect_tx(Mbarrier* barrier, unsigned bytes) {
  simt::arrive_at_mbarrier(barrier, bytes);
  simt::stay_in_kernel();
}
SIMT_INLINE void mbarrier_wait(Mbarrier* barrier, unsigned parity) {
  simt::wait_for_mbarrier(barrier, parity);
  simt::stay_in_kernel();
}
SIMT_INLINE bool mbarrier_test(Mbarrier* barrier, unsigned parity) {
  const bool over = simt::test_mbarrier(barrier, parity);
  simt::stay_in_kernel();
  return over;
}
SIMT_INLINE void fence_mbarrier_init() {
  simt::fence_mbarriers();
  simt::stay_in_kernel();
}
SIMT_INLINE void fence_proxy_async() {
  simt::fence_async_proxy();
  simt::stay_in_kernel();
}
// The order of the two proxies is watched in shared memory only.
SIMT_INLINE void fence_proxy_async_global() {}

template <class T, int kRowBytes = 128>
TensorMap tensor_map(const void* base, const unsigned (&size)[3], unsigned box_rows) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  return simt::make_tensor_map(base, size, box_rows, sizeof(T), kRowBytes);
}
SIMT_INLINE void tma_prefetch(const TensorMap*) {}
SIMT_INLINE void tma_load_3d(void* shared, const TensorMap* map, int x, int y, int z, Mbarrier* barrier) {
  simt::start_box_load(shared, map, x, y, z, barrier);
  simt::stay_in_kernel();
}
SIMT_INLINE void tma_store_3d(const TensorMap* map, const void* shared, int x, int y, int z) {
  simt::start_box_store(map, shared, x, y, z);
  simt::stay_in_kernel();
}

SIMT_INLINE void bulk_load(void* shared, const void* global, unsigned bytes, Mbarrier* barrier) {
  simt::start_bulk_load(shared, global, bytes, barrier);
  simt::stay_in_kernel();
}
SIMT_INLINE void bulk_store(float* global, const void* shared, unsigned bytes) {
  simt::start_bulk_store(global, shared, bytes);
  simt::stay_in_kernel();
}
SIMT_INLINE void bulk_reduce_add(float* global, const void* shared, unsigned bytes) {
  simt::start_bulk_add(global, shared, bytes);
  simt::stay_in_kernel();
}
SIMT_INLINE void bulk_commit() {
  simt::commit_bulk_stores();
  simt::stay_in_kernel();
}
template <int kPending>
SIMT_INLINE void bulk_wait_read() {
  simt::wait_for_bulk_reads(kPending);
  simt::stay_in_kernel();
}
template <int kPending>
SIMT_INLINE void bulk_wait() {
  simt::wait_for_bulk_stores(kPending);
  simt::stay_in_kernel();
}

SIMT_INLINE void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
  simt::store_matrices(row, r, false);
  simt::stay_in_kernel();
}
SIMT_INLINE void stmatrix_x4_trans(void* row, const uint32_t (&r)[4]) {
  simt::store_matrices(row, r, true);
  simt::stay_in_kernel();
}

SIMT_INLINE int load_acquire(const int* p) {
  const int x = simt::read_flag(p);
  simt::stay_in_kernel();
  return x;
}
SIMT_INLINE void store_release(int* p, int x) {
  simt::write_flag(p, x);
  simt::stay_in_kernel();
}

// A launch returns when its grid is done: the one before is over.
SIMT_INLINE void grid_dependency_launch() {}
SIMT_INLINE void grid_dependency_wait() {}

// Threads begin with as many registers as the block's size allows all of them, and take more only from what others have
// given back. What they use them for is not modelled.
template <int kRegisters>
SIMT_INLINE void setmaxnreg_inc() {
  simt::take_registers(kRegisters);
  simt::stay_in_kernel();
}
template <int kRegisters>
SIMT_INLINE void setmaxnreg_dec() {
  simt::give_registers(kRegisters);
  simt::stay_in_kernel();
}

}  // namespace FLASH_TARGET
}  // namespace flash
