// Puts the accesses of a warp's lanes together again into the requests that a GPU would make of them, and counts what
// memory would have to do for each.
//
// The executor's lanes run one after the other. The n-th access of each lane at one place in the code, counted since
// all of the warp's lanes last met, is taken for the same instruction. Where lanes go different ways through a loop
// this may pair accesses that a GPU would not; in code without such loops the counts are exact.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "simt/executor.h"

namespace simt {

using Addresses = std::array<uint32_t, 32>;  // by lane; of those that take part

// One access of up to 32 lanes. Addresses are taken modulo 4 GB: only distances matter.
//
// Lanes mostly come one after the other and are at equal distances, "in line": then two numbers say where all of them
// are. Only other requests have a list of addresses beside them, which takes eight times as much of the cache.
struct Request {
  unsigned mask = 0;       // of the lanes that take part
  unsigned is_listed = 0;  // 0: lane l is at base + l * stride
  uint32_t base = 0;
  uint32_t stride = 0;

  // Whether a lane is where those before it let expect.
  bool expects(unsigned lane, uint32_t address) const { return ((address - base - lane * stride) | is_listed) == 0; }
  // Adds a lane if it is in line with those before it. Any first lane is, and any neighbour of it.
  bool add_in_line(unsigned lane, uint32_t address);
  Addresses addresses_in_line() const;
};

// What a request costs, and what it would cost at best.
struct Transactions {
  unsigned taken = 0, ideal = 0;
};

// Sectors of 32 bytes of global memory that a request touches. At best its different bytes fill them. `list` has the
// addresses if they are listed.
Transactions sectors(const Request& request, const Addresses* list, unsigned access_bytes);

// Passes over the 32 banks of 4 bytes that a request to shared memory takes: a bank serves one word a pass, to as many
// lanes as want it. At best there are no bank conflicts.
Transactions wavefronts(const Request& request, const Addresses* list, unsigned access_bytes);

// The requests of one warp at one place in the code.
class RequestStream {
 public:
  explicit RequestStream(unsigned all_lanes) : all_lanes_(all_lanes) {}

  // Adds a lane's next `count` accesses, at equal distances, as long as that is easy: each belongs to a request that is
  // open, is where it is expected, and is not the last one. Returns how many were added.
  unsigned add_expected(unsigned lane, uint32_t address, uint32_t stride, unsigned count) {
    const uint32_t first = count_[lane], open = first - retired_ < opened_ - retired_ ? opened_ - first : 0;
    const unsigned most = std::min(count, open), bit = 1u << lane;
    // Only the oldest can become complete: then all that the lanes before had in common is done with.
    if (most == 0 || (first == retired_ && (request_at(first).mask | bit) == all_lanes_)) return 0;
    Request* const requests = requests_.data();
    const uint32_t last_slot = uint32_t(requests_.size()) - 1;
    unsigned added = 0;
    for (; added < most; ++added, address += stride) {
      Request& request = requests[(first + added) & last_slot];
      if (!request.expects(lane, address)) break;
      request.mask |= bit;
    }
    count_[lane] = first + added;
    return added;
  }

  // Adds a lane's next access, whatever it is; calls `retire(request, list)` for each request that is then complete.
  template <class Retire>
  void add(unsigned lane, uint32_t address, Retire retire) {
    const uint32_t position = count_[lane]++;
    if (int32_t(position - retired_) < 0)  // too late: the others' request is done with
      return retire(Request{.mask = 1u << lane, .base = address}, nullptr);
    if (position == opened_) {
      open();
      if (opened_ - retired_ > kMostOpen) retire_oldest(retire);
    }
    if (!request_at(position).add_in_line(lane, address)) add_to_list(position, lane, address);
    if (position != retired_) return;
    while (retired_ != opened_ && request_at(retired_).mask == all_lanes_) retire_oldest(retire);
  }

  // Whether anything was added since the last flush.
  bool in_use() const { return opened_ != 0; }

  // The warp's lanes have all met: nothing can be added to what is open.
  template <class Retire>
  void flush(Retire retire) {
    while (retired_ != opened_) retire_oldest(retire);
    opened_ = retired_ = 0;
    count_.fill(0);
  }

 private:
  static constexpr uint32_t kMostOpen = 1024;

  size_t slot(uint32_t position) const { return position & (requests_.size() - 1); }
  Request& request_at(uint32_t position) { return requests_[slot(position)]; }
  void open();
  void add_to_list(uint32_t position, unsigned lane, uint32_t address);
  template <class Retire>
  void retire_oldest(Retire retire) {
    const Request& request = request_at(retired_);
    retire(request, request.is_listed ? &lists_[slot(retired_)] : nullptr);
    ++retired_;
  }

  unsigned all_lanes_;
  uint32_t retired_ = 0;                 // so many requests are done with
  uint32_t opened_ = 0;                  // so many have begun
  std::vector<Request> requests_;        // those that are open, in a ring; its size is a power of two
  std::vector<Addresses> lists_;         // beside them; empty until the first one is needed
  std::array<uint32_t, 32> count_ = {};  // accesses of each lane
};

}  // namespace simt
