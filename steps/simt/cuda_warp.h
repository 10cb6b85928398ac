// What the threads of a warp or a block do together: barriers, shuffles, votes, atomics. The work is done by the
// executor (collectives.cpp); here CUDA's words are translated into its calls. Those calls are never inlined: their
// return addresses tell which line of the kernel they stand in.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/cuda_types.h"

namespace simt {

constexpr unsigned kFullMask = 0xffffffffu;

// All threads of the block meet; each gets the number of those that brought a true predicate.
void sync_block();
int sync_block_count(bool predicate);
// The lanes in `mask` meet.
void sync_warp(unsigned mask);
// They meet, and each gets the word that lane `source` brought, or the mask of lanes that brought a true predicate.
uint64_t shuffle(unsigned mask, uint64_t word, int source);
unsigned ballot(unsigned mask, bool predicate);

int lane_id();

// A fence between the thread and other blocks.
void fence_memory();

enum class AtomicOp { add, min, max, exchange, bit_and, bit_or };
// Defined for int, unsigned, unsigned long long and float (add and exchange also for double).
template <class T>
T atomic(AtomicOp op, T* address, T value);
template <class T>
T atomic_compare_and_swap(T* address, T expected, T desired);

inline namespace SIMT_BUILD {

// Put after a call whose result may go unused: it is not the last thing that a kernel does, so it cannot become a jump,
// which would leave the kernel's line unknown.
SIMT_INLINE void stay_in_kernel() { asm volatile(""); }

// Shuffles any type of up to 8 bytes.
template <class T>
SIMT_INLINE T shuffle_value(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 8, "shuffles are for types of at most 8 bytes");
  uint64_t word = 0;
  std::memcpy(&word, static_cast<const void*>(&value), sizeof value);
  word = shuffle(mask, word, source);
  std::memcpy(static_cast<void*>(&value), &word, sizeof value);
  return value;
}

// The warp is cut into groups of `width` lanes (a power of two). Where the source lies outside the lane's group, the
// lane gets its own value.
template <class T>
SIMT_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return shuffle_value(mask, value, (lane_id() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
SIMT_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = lane_id(), position = lane & (width - 1);
  return shuffle_value(mask, value, position >= int(delta) ? lane - int(delta) : lane);
}
template <class T>
SIMT_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = lane_id(), position = lane & (width - 1);
  return shuffle_value(mask, value, position + int(delta) < width ? lane + int(delta) : lane);
}
template <class T>
SIMT_INLINE T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  // A lane may read from its own group and from earlier ones.
  const int lane = lane_id(), source = lane ^ bits, end_of_group = lane | (width - 1);
  return shuffle_value(mask, value, source <= end_of_group ? source : lane);
}

SIMT_INLINE void __syncthreads() {
  sync_block();
  stay_in_kernel();
}
SIMT_INLINE int __syncthreads_count(int predicate) { return sync_block_count(predicate != 0); }
SIMT_INLINE int __syncthreads_or(int predicate) { return sync_block_count(predicate != 0) != 0; }
SIMT_INLINE int __syncthreads_and(int predicate) { return sync_block_count(predicate == 0) == 0; }
SIMT_INLINE void __syncwarp(unsigned mask = kFullMask) {
  sync_warp(mask);
  stay_in_kernel();
}
SIMT_INLINE unsigned __ballot_sync(unsigned mask, int predicate) { return ballot(mask, predicate != 0); }
SIMT_INLINE int __any_sync(unsigned mask, int predicate) { return ballot(mask, predicate != 0) != 0; }
SIMT_INLINE int __all_sync(unsigned mask, int predicate) { return ballot(mask, predicate == 0) == 0; }

// Blocks run on OS threads that see memory alike: a fence has nothing to do. For the observer it makes the thread's
// atomics tell other blocks what has happened before.
SIMT_INLINE void __threadfence() {
  fence_memory();
  stay_in_kernel();
}
SIMT_INLINE void __threadfence_block() {}
SIMT_INLINE void __threadfence_system() { __threadfence(); }

template <class T>
using NotDeduced = std::type_identity_t<T>;

template <class T>
SIMT_INLINE T atomicAdd(T* address, NotDeduced<T> value) {
  const T old = atomic<T>(AtomicOp::add, address, value);
  stay_in_kernel();
  return old;
}
template <class T>
SIMT_INLINE T atomicMin(T* address, NotDeduced<T> value) {
  const T old = atomic<T>(AtomicOp::min, address, value);
  stay_in_kernel();
  return old;
}
template <class T>
SIMT_INLINE T atomicMax(T* address, NotDeduced<T> value) {
  const T old = atomic<T>(AtomicOp::max, address, value);
  stay_in_kernel();
  return old;
}
template <class T>
SIMT_INLINE T atomicExch(T* address, NotDeduced<T> value) {
  const T old = atomic<T>(AtomicOp::exchange, address, value);
  stay_in_kernel();
  return old;
}
template <class T>
SIMT_INLINE T atomicAnd(T* address, NotDeduced<T> value) {
  const T old = atomic<T>(AtomicOp::bit_and, address, value);
  stay_in_kernel();
  return old;
}
template <class T>
SIMT_INLINE T atomicOr(T* address, NotDeduced<T> value) {
  const T old = atomic<T>(AtomicOp::bit_or, address, value);
  stay_in_kernel();
  return old;
}
template <class T>
SIMT_INLINE T atomicCAS(T* address, NotDeduced<T> expected, NotDeduced<T> desired) {
  const T old = atomic_compare_and_swap<T>(address, expected, desired);
  stay_in_kernel();
  return old;
}

}  // namespace SIMT_BUILD
}  // namespace simt

using simt::__shfl_sync, simt::__shfl_up_sync, simt::__shfl_down_sync, simt::__shfl_xor_sync;
using simt::__syncthreads, simt::__syncthreads_count, simt::__syncthreads_or, simt::__syncthreads_and;
using simt::__syncwarp, simt::__ballot_sync, simt::__any_sync, simt::__all_sync;
using simt::__threadfence, simt::__threadfence_block, simt::__threadfence_system;
using simt::atomicAdd, simt::atomicMin, simt::atomicMax, simt::atomicExch, simt::atomicAnd, simt::atomicOr;
using simt::atomicCAS;
