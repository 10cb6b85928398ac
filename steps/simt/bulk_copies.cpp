// TMA and bulk copies. Loads land when their mbarrier is waited for and no thread can go on; stores read shared memory
// when the thread waits for that, and write global memory when it waits for them altogether.
#include "simt/bulk_copies.h"

#include <cstring>

#include "harness/error.h"
#include "simt/async.h"
#include "simt/observer.h"

namespace simt {
namespace {

void check_copy(const BulkCopy& copy, const char* what) {
  BlockRunner& block = *runner;
  const bool is_box = !copy.global;
  const unsigned alignment = is_box ? 1024 : 16;
  if (uintptr_t(copy.shared) % alignment != 0)
    block.fail(Kind::misaligned, copy.code,
               {{std::string(what) + ": its shared memory does not begin at a multiple of " +
                 std::to_string(alignment) + " bytes"}});
  if (!is_box && (uintptr_t(copy.global) % 16 != 0 || copy.bytes % 16 != 0))
    block.fail(
        Kind::misaligned, copy.code,
        {{std::string(what) + " of " + std::to_string(copy.bytes) + " bytes; size and address are multiples of 16"}});
  if (!block.is_shared(copy.shared, copy.bytes))
    block.fail(Kind::out_of_bounds, copy.code,
               {{std::string(what) + ": not all of its " + std::to_string(copy.bytes) +
                 " bytes are in the block's shared memory"}});
}

BulkCopy box(BulkCopy::Kind kind, const void* shared, const TensorMap* map, int x, int y, int z, const void* code) {
  return {kind,
          static_cast<unsigned char*>(const_cast<void*>(shared)),
          map->box_rows * map->row_bytes,
          nullptr,
          *map,
          x,
          y,
          z,
          runner->running->id,
          code,
          {},
          {}};
}
BulkCopy run(BulkCopy::Kind kind, const void* shared, const void* global, unsigned bytes, const void* code) {
  return {kind,
          static_cast<unsigned char*>(const_cast<void*>(shared)),
          bytes,
          static_cast<unsigned char*>(const_cast<void*>(global)),
          {},
          0,
          0,
          0,
          runner->running->id,
          code,
          {},
          {}};
}

void start_load(BulkCopy copy, const char* what, const Mbarrier* barrier) {
  check_copy(copy, what);
  MbarrierState& state = state_of(barrier, copy.code);
  if (observer()) observer()->start_load(copy, state);
  ++runner->counts.bulk_copies;
  state.loads.push_back(std::move(copy));
}

void start_store(BulkCopy copy, const char* what) {
  check_copy(copy, what);
  if (observer()) observer()->start_store(copy);
  ++runner->counts.bulk_copies;
  runner->async->stores_of(copy.thread).start(std::move(copy));
}

void add_floats(unsigned char* to, const unsigned char* from, unsigned bytes) {
  for (unsigned i = 0; i < bytes; i += sizeof(float)) {
    float addend;
    std::memcpy(&addend, from + i, sizeof addend);
    auto* sum = reinterpret_cast<float*>(to + i);
    float old, changed;
    __atomic_load(sum, &old, __ATOMIC_RELAXED);
    do changed = old + addend;
    while (!__atomic_compare_exchange(sum, &old, &changed, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
  }
}

}  // namespace

// ---- A copy

unsigned char* BulkCopy::row_of_box(unsigned row, unsigned& first, unsigned& count) const {
  const int64_t width = int64_t(map.size[0]) * map.element_bytes, from = int64_t(x) * map.element_bytes;
  const int64_t begin = std::max<int64_t>(from, 0), end = std::min<int64_t>(from + map.row_bytes, width);
  const int64_t line = int64_t(y) + row;
  first = 0;
  count = 0;
  if (begin >= end || line < 0 || line >= map.size[1] || z < 0 || z >= int64_t(map.size[2])) return nullptr;
  first = unsigned(begin - from);
  count = unsigned(end - begin);
  return const_cast<unsigned char*>(map.base) + (int64_t(z) * map.size[1] + line) * width + begin;
}

void BulkCopy::land() const {
  for_each_row([&](unsigned char* to, unsigned first, const unsigned char* from, unsigned count) {
    if (global) {
      std::memcpy(to, from, count);
      return;
    }
    unsigned char row[128] = {};
    if (from) std::memcpy(row + first, from, count);
    for (unsigned piece = 0; piece < map.row_bytes / 16; ++piece)
      std::memcpy(piece_of_row(to, piece), row + piece * 16, 16);
  });
}

void BulkCopy::read() {
  if (!data.empty()) return;
  if (observer()) observer()->finish_store_reads(*this);
  data.resize(bytes);
  if (global) {
    std::memcpy(data.data(), shared, bytes);
  } else {
    for (unsigned at = 0; at < bytes; at += 16)
      std::memcpy(&data[at], piece_of_row(shared + at / map.row_bytes * map.row_bytes, at % map.row_bytes / 16), 16);
  }
}

void BulkCopy::write() const {
  if (observer()) observer()->finish_store_writes(*this);
  for_each_row([&](const unsigned char* row, unsigned first, unsigned char* to, unsigned count) {
    if (!to) return;
    const unsigned char* from = data.data() + (row - shared) + first;
    if (kind == add) {
      add_floats(to, from, count);
    } else {
      std::memcpy(to, from, count);
    }
  });
}

// ---- What kernels call

TensorMap make_tensor_map(const void* base, const unsigned (&size)[3], unsigned box_rows, unsigned element_bytes,
                          unsigned row_bytes) {
  const bool empty = size[0] == 0 || size[1] == 0 || size[2] == 0;
  if (empty || box_rows == 0 || box_rows > 256 || uintptr_t(base) % 16 != 0 || size[0] * element_bytes % 16 != 0)
    throw flash::KernelFault("a tensor map of [" + std::to_string(size[2]) + "][" + std::to_string(size[1]) + "][" +
                             std::to_string(size[0]) + "] elements of " + std::to_string(element_bytes) +
                             " bytes in boxes of " + std::to_string(box_rows) +
                             " rows: no size may be 0, a row and the address are multiples of 16 bytes, a box has at "
                             "most 256 rows");
  return {static_cast<const unsigned char*>(base), {size[0], size[1], size[2]}, box_rows, element_bytes, row_bytes};
}

void start_box_load(void* shared, const TensorMap* map, int x, int y, int z, Mbarrier* barrier) {
  const ObservationPause pause;
  start_load(box(BulkCopy::load, shared, map, x, y, z, SIMT_CALLER), "tma_load_3d", barrier);
}
void start_bulk_load(void* shared, const void* global, unsigned bytes, Mbarrier* barrier) {
  const ObservationPause pause;
  start_load(run(BulkCopy::load, shared, global, bytes, SIMT_CALLER), "bulk_load", barrier);
}
void start_box_store(const TensorMap* map, const void* shared, int x, int y, int z) {
  const ObservationPause pause;
  start_store(box(BulkCopy::store, shared, map, x, y, z, SIMT_CALLER), "tma_store_3d");
}
void start_bulk_store(float* global, const void* shared, unsigned bytes) {
  const ObservationPause pause;
  start_store(run(BulkCopy::store, shared, global, bytes, SIMT_CALLER), "bulk_store");
}
void start_bulk_add(float* global, const void* shared, unsigned bytes) {
  const ObservationPause pause;
  start_store(run(BulkCopy::add, shared, global, bytes, SIMT_CALLER), "bulk_reduce_add");
}

void commit_bulk_stores() {
  const ObservationPause pause;
  runner->async->stores_of(runner->running->id).commit();
}

void wait_for_bulk_reads(int pending) {
  const ObservationPause pause;
  runner->async->stores_of(runner->running->id).visit(size_t(pending), [](BulkCopy& copy) { copy.read(); });
}

void wait_for_bulk_stores(int pending) {
  const ObservationPause pause;
  runner->async->stores_of(runner->running->id).wait(size_t(pending), [](BulkCopy& copy) {
    copy.read();
    copy.write();
  });
}

}  // namespace simt
