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

  // Calls row(shared, first, global, bytes) for each row of shared memory (or what there is left of it): its bytes from
  // `first` on go with `bytes` bytes of global memory; where there are none, global is null.
  template <class Row>
  void for_each_row(Row row) const {
    const unsigned row_bytes = bytes_of_row();
    for (unsigned r = 0; r * row_bytes < bytes; ++r) {
      unsigned first = 0, count = bytes - r * row_bytes < row_bytes ? bytes - r * row_bytes : row_bytes;
      unsigned char* from = global ? global + r * row_bytes : row_of_box(r, first, count);
      row(shared + r * row_bytes, first, from, count);
    }
  }
  unsigned bytes_of_row() const { return global ? 128 : map.row_bytes; }
  // The 16-byte piece `piece` of a row of a box, whose pieces are exchanged as the row's address says.
  template <class Byte>
  Byte* piece_of_row(Byte* row, unsigned piece) const {
    const uintptr_t address = uintptr_t(row) + piece * 16;
    return row + (address ^ (address >> 7 & swizzle_mask(map.row_bytes)) << 4) - uintptr_t(row);
  }

  // Moves a load's bytes. As many as `bytes` are then there.
  void land() const;
  // A store reads its bytes, and writes them. Under observation both are accesses of its thread.
  void read();
  void write() const;

 private:
  unsigned char* row_of_box(unsigned row, unsigned& first, unsigned& count) const;
};

}  // namespace simt
