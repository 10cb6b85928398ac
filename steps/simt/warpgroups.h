// What the warpgroups of a block have under way: products by wgmma, in groups.
#pragma once
#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "simt/block.h"
#include "simt/happens_before.h"
#include "simt/wgmma.h"

namespace simt {

constexpr int kWarpgroupSize = 128;
constexpr int kRows = 64;           // of a and d
constexpr unsigned kRowBytes = 32;  // of one row of an operand that is K-major: 16 elements of 2 bytes, or 32 of 1

// Results that are not there yet. Until they are, the registers hold NaN.
struct Accumulator {
  int n;
  std::array<float*, kWarpgroupSize> d;  // by thread
  std::vector<float> values;             // [64][n]
  int pending = 0;                       // products that are still to be added
};

struct Product {
  WarpgroupProduct what;  // of one of the threads
  Accumulator* accumulator;
  std::vector<unsigned char> a_registers;  // [64][32 bytes], if a comes from there
  const void* code;
  View issued;  // under observation: what the first thread knew
};

struct Warpgroup {
  bool used = false;
  Meeting meeting;
  std::deque<std::vector<Product>> groups{1};  // the last one is not committed yet
  std::vector<std::unique_ptr<Accumulator>> accumulators;
  std::array<bool, kWarpgroupSize> fenced{};       // by thread: since the last wait
  std::array<unsigned, kWarpgroupSize> commits{};  // by thread
  unsigned committed = 0;                          // the largest of these
  int agent = -1;         // under observation: its products, as one that works beside the threads
  unsigned finished = 0;  // waits that have finished some
};

// An operand's pieces of 16 bytes, as offsets in dynamic shared memory: row after row of m (n) when K-major, of k when
// MN-major.
struct Pieces {
  std::array<uint32_t, 512> offsets;
  size_t count = 0;
  unsigned row_bytes = 128;
  void add(size_t offset) { offsets[count++] = uint32_t(offset ^ (offset >> 7 & swizzle_mask(row_bytes)) << 4); }
};
Pieces pieces_of(uint64_t operand, Major major, int mn);

// Ends the block if an operand does not lie where it may.
void check_operand(uint64_t operand, const Pieces& pieces, const void* code);

// Adds a product to its accumulator.
void multiply(const Product& product);

}  // namespace simt
