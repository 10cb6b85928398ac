// What a request costs: sectors of global memory, passes over the banks of shared memory. No caches are modelled: each
// request counts as if it went to memory.
#include "simt/traffic.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace simt {
namespace {

constexpr unsigned kAllLanes = ~0u;
constexpr uint32_t kFar = UINT32_MAX / 64;  // lanes farther from each other may come to the same place modulo 4 GB

unsigned lanes_in(unsigned mask) { return unsigned(__builtin_popcount(mask)); }
unsigned lowest_lane(unsigned mask) { return unsigned(__builtin_ctz(mask)); }
unsigned highest_lane(unsigned mask) { return 31 - unsigned(__builtin_clz(mask)); }
// Whether no lane is left out between the first and the last.
bool is_run(unsigned mask) {
  const unsigned run = mask >> lowest_lane(mask);
  return (run & (run + 1)) == 0;
}
uint32_t magnitude(uint32_t stride) { return int32_t(stride) < 0 ? 0 - stride : stride; }
unsigned divide_up(unsigned a, unsigned b) { return (a + b - 1) / b; }

// Sorts and returns how many are different.
unsigned count_different(uint32_t* begin, uint32_t* end) {
  if (!std::is_sorted(begin, end)) std::sort(begin, end);
  return unsigned(std::unique(begin, end) - begin);
}

// Whether each of the lanes [first, first + count) wants what its neighbour wants, or what the one next to that wants.
bool neighbours_agree(unsigned mask, const Addresses& list, unsigned first, unsigned count) {
  bool next = true, next_but_one = true;
  for (unsigned lane = first; lane < first + count; ++lane) {
    const auto agree = [&](unsigned other) {
      const bool both = mask >> lane & mask >> other & 1;
      return !both || list[lane] == list[other];
    };
    next = next && agree(lane ^ 1);
    next_but_one = next_but_one && agree(lane ^ 2);
  }
  return next || next_but_one;
}

// Passes for the lanes [first, end), served together.
unsigned passes_over_banks(unsigned mask, const Addresses& list, unsigned access_bytes, unsigned first, unsigned end) {
  uint32_t words[32 * 4];
  unsigned count = 0;
  for (unsigned lane = first; lane < end; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const uint32_t address = list[lane];
    for (uint32_t word = address / 4; word <= (address + access_bytes - 1) / 4; ++word)
      if (count == 0 || words[count - 1] != word) words[count++] = word;
  }
  count = count_different(words, words + count);
  unsigned of_bank[32] = {}, most = 0;
  for (unsigned i = 0; i < count; ++i) most = std::max(most, ++of_bank[words[i] % 32]);
  return most;
}

// Sectors of lanes at equal distances, where that is enough to tell: each lane has its own, or they leave none out.
std::optional<Transactions> sectors_in_line(const Request& request, unsigned access_bytes) {
  const uint32_t distance = magnitude(request.stride);
  if (distance == 0) return Transactions{1, 1};
  if (distance > kFar) return std::nullopt;
  const unsigned ideal = divide_up(lanes_in(request.mask) * access_bytes, 32);
  if (distance >= 32) return Transactions{lanes_in(request.mask), ideal};
  if (!is_run(request.mask)) return std::nullopt;
  uint32_t low = request.base + lowest_lane(request.mask) * request.stride;
  uint32_t high = request.base + highest_lane(request.mask) * request.stride;
  if (int32_t(request.stride) < 0) std::swap(low, high);
  return Transactions{(low % 32 + (high - low)) / 32 + 1, ideal};
}

// Passes over the banks for lanes at equal distances, where that is enough to tell.
std::optional<Transactions> wavefronts_in_line(const Request& request, unsigned access_bytes) {
  const uint32_t distance = magnitude(request.stride);
  if (access_bytes == 4 && distance % 4 == 0 && distance <= kFar && is_run(request.mask)) {
    if (distance == 0) return Transactions{1, 1};
    const unsigned words = distance / 4, power_of_two = words & -words;
    const unsigned banks = 32 / std::min(32u, power_of_two);  // that the lanes go round and round
    return Transactions{divide_up(lanes_in(request.mask), banks), 1};
  }
  if (access_bytes < 8 || request.mask != kAllLanes) return std::nullopt;
  if (distance == 0) return Transactions{access_bytes / 8, access_bytes / 8};
  if (request.stride == access_bytes) return Transactions{access_bytes / 4, access_bytes / 4};
  return std::nullopt;
}

Transactions sectors_of_list(unsigned mask, const Addresses& list, unsigned access_bytes) {
  uint32_t touched[32];
  unsigned count = 0;
  for (unsigned lanes = mask; lanes; lanes &= lanes - 1) {
    const uint32_t address = list[lowest_lane(lanes)];
    if (count == 0 || touched[count - 1] != address) touched[count++] = address;
  }
  count = count_different(touched, touched + count);
  const unsigned ideal = divide_up(count * access_bytes, 32);
  for (unsigned i = 0; i < count; ++i) touched[i] /= 32;  // an access is aligned to its size: it lies in one sector
  return {count_different(touched, touched + count), ideal};
}

Transactions wavefronts_of_list(unsigned mask, const Addresses& list, unsigned access_bytes) {
  // Of accesses of 8 or 16 bytes, half or a quarter of the lanes are served at a time; twice as many where neighbours
  // want the same, as measured on an H200.
  const unsigned lanes_at_once = access_bytes <= 4 ? 32 : 128 / access_bytes;
  const unsigned lanes_together = std::min(32u, 2 * lanes_at_once);
  Transactions result;
  for (unsigned first = 0; first < 32; first += lanes_together) {
    const unsigned at_once = neighbours_agree(mask, list, first, lanes_together) ? lanes_together : lanes_at_once;
    for (unsigned lane = first; lane < first + lanes_together; lane += at_once) {
      const unsigned passes = passes_over_banks(mask, list, access_bytes, lane, lane + at_once);
      result.taken += passes;
      result.ideal += passes > 0;
    }
  }
  return result;
}

}  // namespace

Transactions sectors(const Request& request, const Addresses* list, unsigned access_bytes) {
  if (list) return sectors_of_list(request.mask, *list, access_bytes);
  if (const auto known = sectors_in_line(request, access_bytes)) return *known;
  return sectors_of_list(request.mask, request.addresses_in_line(), access_bytes);
}

Transactions wavefronts(const Request& request, const Addresses* list, unsigned access_bytes) {
  if (list) return wavefronts_of_list(request.mask, *list, access_bytes);
  if (const auto known = wavefronts_in_line(request, access_bytes)) return *known;
  return wavefronts_of_list(request.mask, request.addresses_in_line(), access_bytes);
}

// ---- Putting them together

bool Request::add_in_line(unsigned lane, uint32_t address) {
  if (is_listed) return false;
  if (mask == 0) {
    base = address;
    stride = 0;
  } else if (!expects(lane, address)) {
    const unsigned first = lowest_lane(mask);
    if (mask != 1u << first || (lane != first + 1 && lane + 1 != first)) return false;
    stride = lane > first ? address - base : base - address;
    base = address - lane * stride;
  }
  mask |= 1u << lane;
  return true;
}

Addresses Request::addresses_in_line() const {
  Addresses all;
  for (unsigned lane = 0; lane < 32; ++lane) all[lane] = base + lane * stride;
  return all;
}

// Begins the next request, in a larger ring if this one is full.
void RequestStream::open() {
  if (opened_ - retired_ == requests_.size()) {
    const std::vector<Request> requests =
        std::exchange(requests_, std::vector<Request>(std::max<size_t>(32, 2 * requests_.size())));
    const std::vector<Addresses> lists =
        std::exchange(lists_, std::vector<Addresses>(lists_.empty() ? 0 : requests_.size()));
    for (uint32_t position = retired_; position != opened_; ++position) {
      const size_t before = position & (requests.size() - 1);
      request_at(position) = requests[before];
      if (!lists.empty()) lists_[slot(position)] = lists[before];
    }
  }
  request_at(opened_++) = Request();
}

void RequestStream::add_to_list(uint32_t position, unsigned lane, uint32_t address) {
  if (lists_.empty()) lists_.resize(requests_.size());
  Request& request = request_at(position);
  Addresses& list = lists_[slot(position)];
  if (!request.is_listed) list = request.addresses_in_line();
  list[lane] = address;
  request.is_listed = 1;
  request.mask |= 1u << lane;
}

}  // namespace simt
