// Puts the accesses of a warp's lanes together again into the requests that a GPU would make of them, and counts what
// memory would have to do for each.
//
// The executor's lanes run one after the other. The n-th access of each lane at one place in the code, counted since
// all of the warp's lanes last met, is taken for the same instruction. Where lanes go different ways through a loop
// this may pair accesses that a GPU would not; in code without such loops the counts are exact.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "simt/executor.h"

namespace simt {

// One access of up to 32 lanes. Addresses are taken modulo 4 GB: only distances matter.
//
// Lanes mostly come one after the other and are at equal distances: then two numbers say where all of them are. Only
// those of other requests are listed, which takes more of the cache.
struct Request {
  unsigned mask = 0;    // of the lanes that take part
  unsigned listed = 0;  // 1: by address[]; 0: lane l is at base + l * stride
  uint32_t base = 0;
  uint32_t stride = 0;
  uint32_t address[32];  // of the lanes in the mask, where they are listed

  void clear() { mask = listed = 0; }
  void add(unsigned lane, uint32_t at) {
    if (!is_in_line(lane, at)) get_in_line(lane, at);
    mask |= 1u << lane;
  }

 private:
  bool is_in_line(unsigned lane, uint32_t at) const { return ((at - base - lane * stride) | listed) == 0 && mask != 0; }
  // The first lane, the second one, which shows the distance, and those that are somewhere else.
  void get_in_line(unsigned lane, uint32_t at);
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
    const uint32_t position = count_[lane]++ - first_;  // in open_
    if (position - retired_ >= opened_ - retired_ && !begin_request(position, lane, address, retire)) return;
    Request& request = open_[position];
    request.add(lane, address);
    if (request.mask == all_lanes && position == retired_) retire_complete(all_lanes, retire);
  }

  // Whether anything was added since the last flush.
  bool in_use() const { return in_use_; }

  // The warp's lanes have all met: nothing can be added to what is open.
  template <class Retire>
  void flush(Retire retire) {
    for (; retired_ < opened_; ++retired_) retire(open_[retired_]);
    in_use_ = false;
    opened_ = 0;
    first_ = 0;
    retired_ = 0;
    for (uint32_t& count : count_) count = 0;
  }

 private:
  static constexpr uint32_t kMostOpen = 1024;

  // Makes room for an access that no open request waits for. Returns whether it is the first of one: it may also come
  // too late, when the others' request is done with.
  template <class Retire>
  [[gnu::noinline]] bool begin_request(uint32_t position, unsigned lane, uint32_t address, Retire retire) {
    in_use_ = true;
    if (int32_t(position) < int32_t(retired_)) {
      Request alone;
      alone.add(lane, address);
      retire(alone);
      return false;
    }
    if (opened_ == open_.size()) open_.resize(std::max<size_t>(64, 2 * open_.size()));
    open_[opened_++].clear();
    if (opened_ - retired_ > kMostOpen) retire(open_[retired_++]);
    return true;
  }

  template <class Retire>
  [[gnu::noinline]] void retire_complete(unsigned all_lanes, Retire retire) {
    while (retired_ < opened_ && open_[retired_].mask == all_lanes) retire(open_[retired_++]);
    if (retired_ == opened_ || retired_ > kMostOpen) {
      std::move(open_.begin() + retired_, open_.begin() + opened_, open_.begin());
      first_ += retired_;
      opened_ -= retired_;
      retired_ = 0;
    }
  }

  uint32_t count_[32] = {};  // accesses of each lane
  uint32_t first_ = 0;       // which of them open_[0] is
  uint32_t retired_ = 0;     // so many at the front of open_ are done with
  uint32_t opened_ = 0;      // so many of open_ are in use
  bool in_use_ = false;
  std::vector<Request> open_;
};

}  // namespace simt
