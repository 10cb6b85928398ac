// What a request costs: sectors of global memory, passes over the banks of shared memory. No caches are modelled: each
// request counts as if it went to memory.
#include "simt/traffic.h"

#include <algorithm>

namespace simt {
namespace {

// The two shapes that nearly all requests have, recognised without sorting.
struct Shape {
  bool one_address;  // all lanes want the same
  bool contiguous;   // all 32 lanes, each next to the one before
};
Shape shape_of(const Request& request, unsigned access_bytes) {
  if (request.mask != ~0u) return {false, false};
  uint32_t same = 0, next = 0;
  for (unsigned lane = 1; lane < 32; ++lane) {
    same |= request.address[lane] ^ request.address[0];
    next |= request.address[lane] ^ (request.address[0] + lane * access_bytes);
  }
  return {same == 0, next == 0};
}

// Sorts and returns how many are different.
unsigned count_different(uint32_t* begin, uint32_t* end) {
  if (!std::is_sorted(begin, end)) std::sort(begin, end);
  return unsigned(std::unique(begin, end) - begin);
}

// Whether each of the lanes [first, first + count) wants what its neighbour wants, or what the one next to that wants.
bool neighbours_agree(const Request& request, unsigned first, unsigned count) {
  bool next = true, next_but_one = true;
  for (unsigned lane = first; lane < first + count; ++lane) {
    const auto agree = [&](unsigned other) {
      const bool both = request.mask >> lane & request.mask >> other & 1;
      return !both || request.address[lane] == request.address[other];
    };
    next = next && agree(lane ^ 1);
    next_but_one = next_but_one && agree(lane ^ 2);
  }
  return next || next_but_one;
}

// Passes for the lanes [first, end), served together.
unsigned passes_over_banks(const Request& request, unsigned access_bytes, unsigned first, unsigned end) {
  uint32_t words[32 * 4];
  unsigned count = 0;
  for (unsigned lane = first; lane < end; ++lane) {
    if (!(request.mask >> lane & 1)) continue;
    const uint32_t address = request.address[lane];
    for (uint32_t word = address / 4; word <= (address + access_bytes - 1) / 4; ++word)
      if (count == 0 || words[count - 1] != word) words[count++] = word;
  }
  count = count_different(words, words + count);
  unsigned of_bank[32] = {}, most = 0;
  for (unsigned i = 0; i < count; ++i) most = std::max(most, ++of_bank[words[i] % 32]);
  return most;
}

}  // namespace

Transactions sectors(const Request& request, unsigned access_bytes) {
  const Shape shape = shape_of(request, access_bytes);
  if (shape.one_address) return {1, 1};
  const uint32_t first = request.address[0];
  if (shape.contiguous) return {(first + 32 * access_bytes - 1) / 32 - first / 32 + 1, access_bytes};
  uint32_t touched[32];
  unsigned count = 0;
  for (unsigned lanes = request.mask; lanes; lanes &= lanes - 1) {
    const uint32_t address = request.address[__builtin_ctz(lanes)];
    if (count == 0 || touched[count - 1] != address) touched[count++] = address;
  }
  count = count_different(touched, touched + count);
  const unsigned ideal = (count * access_bytes + 31) / 32;
  for (unsigned i = 0; i < count; ++i) touched[i] /= 32;  // an access is aligned to its size: it lies in one sector
  return {count_different(touched, touched + count), ideal};
}

Transactions wavefronts(const Request& request, unsigned access_bytes) {
  // Of accesses of 8 or 16 bytes, half or a quarter of the lanes are served at a time; twice as many where neighbours
  // want the same, as measured on an H200.
  const unsigned lanes_at_once = access_bytes <= 4 ? 32 : 128 / access_bytes;
  const unsigned lanes_together = std::min(32u, 2 * lanes_at_once);
  const Shape shape = shape_of(request, access_bytes);
  if (shape.one_address) return {32 / lanes_together, 32 / lanes_together};
  if (shape.contiguous && access_bytes >= 4) return {32 / lanes_at_once, 32 / lanes_at_once};
  Transactions result;
  for (unsigned first = 0; first < 32; first += lanes_together) {
    const unsigned at_once = neighbours_agree(request, first, lanes_together) ? lanes_together : lanes_at_once;
    for (unsigned lane = first; lane < first + lanes_together; lane += at_once) {
      const unsigned passes = passes_over_banks(request, access_bytes, lane, lane + at_once);
      result.taken += passes;
      result.ideal += passes > 0;
    }
  }
  return result;
}

}  // namespace simt
