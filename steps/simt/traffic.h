// Puts the accesses of a warp's lanes together again into the requests that a GPU would make of them, and counts what
// memory would have to do for each.
//
// The executor's lanes run one after the other. The n-th access of each lane at one place in the code, counted since
// all of the warp's lanes last met, is taken for the same instruction. Where lanes go different ways through a loop
// this may pair accesses that a GPU would not; in code without such loops the counts are exact.
#pragma once
#include <cstdint>
#include <vector>

#include "simt/executor.h"

namespace simt {

// One access of up to 32 lanes. Addresses are taken modulo 4 GB: only distances matter.
struct Request {
  unsigned mask = 0;  // of the lanes that take part
  uint32_t address[32];
};

// What a request costs, and what it would cost at best.
struct Transactions {
  unsigned taken = 0, ideal = 0;
};

// Sectors of 32 bytes of global memory that a request touches. At best its different bytes fill them.
Transactions sectors(const Request& request, unsigned access_bytes);

// Passes over the 32 banks of 4 bytes that a request to shared memory takes: a bank serves one word a pass, to as many
// lanes as want it. At best there are no bank conflicts.
Transactions wavefronts(const Request& request, unsigned access_bytes);

// The requests of one warp at one place in the code.
class RequestStream {
 public:
  // Adds a lane's next access; calls `retire(request)` for each request that is then complete.
  template <class Retire>
  void add(unsigned lane, uint32_t address, unsigned all_lanes, Retire retire) {
    in_use_ = true;
    const uint32_t position = count_[lane]++ - first_;  // in open_
    if (int32_t(position) < int32_t(retired_)) {        // too late: the others' request is done with
      Request alone;
      alone.mask = 1u << lane;
      alone.address[lane] = address;
      return retire(alone);
    }
    if (position >= open_.size()) {
      open_.emplace_back();
      if (open_.size() - retired_ > kMostOpen) retire(open_[retired_++]);
    }
    Request& request = open_[position];
    request.mask |= 1u << lane;
    request.address[lane] = address;
    if (position == retired_ && request.mask == all_lanes) retire_complete(all_lanes, retire);
  }

  // Whether anything was added since the last flush.
  bool in_use() const { return in_use_; }

  // The warp's lanes have all met: nothing can be added to what is open.
  template <class Retire>
  void flush(Retire retire) {
    in_use_ = false;
    for (; retired_ < open_.size(); ++retired_) retire(open_[retired_]);
    open_.clear();
    first_ = 0;
    retired_ = 0;
    for (uint32_t& count : count_) count = 0;
  }

 private:
  static constexpr size_t kMostOpen = 1024;

  template <class Retire>
  void retire_complete(unsigned all_lanes, Retire retire) {
    while (retired_ < open_.size() && open_[retired_].mask == all_lanes) retire(open_[retired_++]);
    if (retired_ == open_.size() || retired_ > kMostOpen) {
      open_.erase(open_.begin(), open_.begin() + long(retired_));
      first_ += uint32_t(retired_);
      retired_ = 0;
    }
  }

  bool in_use_ = false;
  uint32_t count_[32] = {};  // accesses of each lane
  uint32_t first_ = 0;       // which of them open_[0] is
  size_t retired_ = 0;       // so many at the front of open_ are done with
  std::vector<Request> open_;
};

}  // namespace simt
