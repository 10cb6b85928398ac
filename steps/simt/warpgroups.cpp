// Where the operands of a wgmma lie, and its arithmetic.
#include "simt/warpgroups.h"

#include <algorithm>
#include <cstring>

#include "simt/matrix_product.h"

namespace simt {

// ---- Operands in shared memory

namespace {

unsigned row_bytes_of(uint64_t operand) { return operand >> 62 == 1 ? 128 : 64; }

}  // namespace

Pieces pieces_of(uint64_t operand, Major major, int mn) {
  const size_t start = (operand & 0x3fff) << 4, next = (operand >> 16 & 0x3fff) << 4;
  const size_t group = (operand >> 32 & 0x3fff) << 4;  // from 8 rows to the next 8
  Pieces pieces;
  pieces.row_bytes = row_bytes_of(operand);
  const size_t row_bytes = pieces.row_bytes;
  if (major == Major::K) {
    for (size_t row = 0; row < size_t(mn); ++row)
      for (size_t half = 0; half < 2; ++half) pieces.add(start + row / 8 * group + row % 8 * row_bytes + half * 16);
  } else {
    for (size_t k = 0; k < 16; ++k)
      for (size_t i = 0; i < size_t(mn) / 8; ++i)
        pieces.add(start + i / 8 * next + k / 8 * group + k % 8 * 128 + i % 8 * 16);
  }
  return pieces;
}

void check_operand(uint64_t operand, const Pieces& pieces, const void* code) {
  if (operand >> 3 & swizzle_mask(row_bytes_of(operand)))
    runner->fail(Kind::misaligned, code, {{"an operand of wgmma that does not begin in the first of 8 rows"}});
  const size_t last = *std::max_element(pieces.offsets.begin(), pieces.offsets.begin() + pieces.count);
  if (last + 16 > runner->dynamic_bytes())
    runner->fail(Kind::out_of_bounds, code,
                 {{"an operand of wgmma that reads dynamic shared memory up to byte " + std::to_string(last + 16) +
                   " of " + std::to_string(runner->dynamic_bytes())}});
}

// ---- The arithmetic

namespace {

struct Scratch {
  alignas(32) unsigned char bytes[256 * kRowBytes];
  alignas(32) float values[256 * 32], a[kRows * 32], b[32 * 256];
};
Scratch& scratch() {
  static thread_local std::unique_ptr<Scratch> scratch = std::make_unique<Scratch>();
  return *scratch;
}

void transpose(const float* from, float* to, int rows, int columns) {
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) to[j * rows + i] = from[i * columns + j];
}

// An operand's values as [m][k] (k_first) or as [k][n].
void gather(uint64_t operand, Major major, Element type, int mn, bool k_last, float* values) {
  Scratch& s = scratch();
  const Pieces pieces = pieces_of(operand, major, mn);
  for (size_t i = 0; i < pieces.count; ++i) std::memcpy(&s.bytes[i * 16], runner->shared + pieces.offsets[i], 16);
  const int k = int(kRowBytes / element_bytes(type));
  if ((major == Major::K) == k_last) return to_floats(type, s.bytes, values, size_t(mn) * k);
  to_floats(type, s.bytes, s.values, size_t(mn) * k);
  major == Major::K ? transpose(s.values, values, mn, k) : transpose(s.values, values, k, mn);
}

}  // namespace

void multiply(const Product& product) {
  Scratch& s = scratch();
  const WarpgroupProduct& what = product.what;
  const int k = int(kRowBytes / element_bytes(what.type));
  if (what.a_registers) {
    to_floats(what.type, product.a_registers.data(), s.a, size_t(kRows * k));
  } else {
    gather(what.a, what.a_major, what.type, kRows, /*k_last=*/true, s.a);
  }
  gather(what.b, what.b_major, what.type, what.n, /*k_last=*/false, s.b);
  std::vector<float>& values = product.accumulator->values;
  if (!what.add) std::fill(values.begin(), values.end(), 0.0f);
  multiply_add(s.a, s.b, values.data(), kRows, what.n, k);
  runner->counts.matrix_flops += uint64_t(2 * kRows) * uint64_t(what.n) * uint64_t(k);
}

}  // namespace simt
