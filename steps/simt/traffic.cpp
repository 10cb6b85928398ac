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
  // Of accesses of 8 or 16 bytes, half or a quarter of the lanes are served at a time.
  const unsigned lanes_at_once = access_bytes <= 4 ? 32 : 128 / access_bytes;
  const Shape shape = shape_of(request, access_bytes);
  if (shape.one_address || (shape.contiguous && access_bytes >= 4)) return {32 / lanes_at_once, 32 / lanes_at_once};
  Transactions result;
  for (unsigned first = 0; first < 32; first += lanes_at_once) {
    uint32_t words[32];
    unsigned count = 0;
    for (unsigned lane = first; lane < first + lanes_at_once; ++lane) {
      if (!(request.mask >> lane & 1)) continue;
      const uint32_t address = request.address[lane];
      for (uint32_t word = address / 4; word <= (address + access_bytes - 1) / 4; ++word)
        if (count == 0 || words[count - 1] != word) words[count++] = word;
    }
    if (count == 0) continue;
    count = count_different(words, words + count);
    unsigned of_bank[32] = {}, most = 0;
    for (unsigned i = 0; i < count; ++i) most = std::max(most, ++of_bank[words[i] % 32]);
    result.taken += most;
    result.ideal += 1;
  }
  return result;
}

}  // namespace simt
