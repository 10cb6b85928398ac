// Copies by the tensor memory accelerator: a box of a tensor, or a run of bytes.
#pragma once
#include <vector>

#include "simt/happens_before.h"
#include "simt/hopper.h"

namespace simt {

struct BulkCopy {
  enum Kind { load, store, add };
  Kind kind;
  unsigned char* shared;
  unsigned bytes;         // of shared memory
  unsigned char* global;  // null: a box
  TensorMap map;          // of a box
  int x, y, z;            // of a box
  int thread;             // that has started it
  const void* code;
  View issued;                      // under observation: what that thread knew
  std::vector<unsigned char> data;  // of a store: what it has read from shared memory, once it has

  // Calls row(shared, first, global, bytes) for each 128 bytes of shared memory (or what there is left): those from
  // `first` on go with `bytes` bytes of global memory; where there are none, global is null.
  template <class Row>
  void for_each_row(Row row) const {
    for (unsigned r = 0; r * kRowBytes < bytes; ++r) {
      unsigned first = 0, count = bytes - r * kRowBytes < kRowBytes ? bytes - r * kRowBytes : kRowBytes;
      unsigned char* from = global ? global + r * kRowBytes : row_of_box(r, first, count);
      row(shared + r * kRowBytes, first, from, count);
    }
  }
  static constexpr unsigned kRowBytes = 128;

  // Moves a load's bytes. As many as `bytes` are then there.
  void land() const;
  // A store reads its bytes, and writes them. Under observation both are accesses of its thread.
  void read();
  void write() const;

 private:
  unsigned char* row_of_box(unsigned row, unsigned& first, unsigned& count) const;
};

}  // namespace simt
