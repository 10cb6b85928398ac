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

}  // namespace simt
