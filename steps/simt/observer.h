// Watches every memory access of a block. The observed build of a kernel calls the functions of access.cpp before each
// access to memory; here is what they know and what they check:
//
//   bounds          of arrays in device memory, shared variables, dynamic shared memory
//   alignment       to the size of the access
//   initialisation  of each byte, per block for shared memory
//   races           between threads by HappensBefore; between blocks any two accesses to a word of which one writes,
//                   unless both are atomic
//   traffic         as requests of warps
//
// Not watched: a thread's own stack, kernel arguments, constant memory; whether another block has finished (there is no
// such order in CUDA, short of atomics and fences, which are not understood here).
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "simt/block.h"
#include "simt/happens_before.h"
#include "simt/shadow.h"
#include "simt/symbols.h"
#include "simt/traffic.h"

namespace simt {

// A place in the code that touches memory, as one worker sees it in one launch. A place that touches both global and
// shared memory counts as two.
struct Site {
  const void* code = nullptr;
  unsigned number = 0;  // the same for all workers
  unsigned size = 0;
  Region* region = nullptr;            // touched last
  std::vector<RequestStream> streams;  // by warp
  SiteTraffic traffic;
};

class Observer {
 public:
  explicit Observer(BlockRunner& block);

  void begin_launch(const Launch& launch);
  void begin_block(uint64_t number);
  void resume(int thread);  // this one runs from now on
  void met(const std::vector<int>& members, bool orders_memory);
  void complete_requests(const std::vector<int>& members);
  void end_launch(Counters& counters);  // adds what was counted
  void forget_accesses();

  // What is called before each access.
  template <unsigned kSize, bool kWrite>
  void access(uintptr_t address, const void* code, bool atomic);

  // Barriers at which some arrive and others wait: the running thread leaves what it knows, or takes what was left.
  void release(Gathered& gathered);
  SharedClock publish(Gathered& gathered) const { return order_.publish(gathered); }
  void acquire(const SharedClock& published) { order_.acquire(me_, published); }

  // Shared memory that a copy of the running thread will fill, and has filled: from then on it is as if the thread
  // had just written it. (async_observer.cpp)
  void mark_in_flight(uintptr_t address, size_t bytes);
  void land_own_copy(uintptr_t address, size_t bytes, const void* code);

  BlockRunner& block() { return block_; }

 private:
  template <bool kWrite>
  void check_cell(const Site& site, Cell& cell, uintptr_t address, bool atomic);
  template <unsigned kSize, bool kWrite>
  void check_order(const Site& site, uintptr_t address, bool atomic);
  bool conflicts(Moment earlier) const;

  Site* site_of(uintptr_t address, unsigned size, bool write, const void* code);
  Site& find_or_add_site(const void* code, bool shared, bool write, unsigned size);
  Region* static_region_at(uintptr_t address);
  Region* shared_region_at(uintptr_t address);
  void stamp_writes(Region& region, uintptr_t address, size_t bytes, uint64_t moment);
  void retire(Site& site, const Request& request);
  void flush(int warp);
  void check_moments();

  [[noreturn]] void out_of_bounds(uintptr_t address, unsigned size, bool write, const void* code);
  [[noreturn]] void misaligned(const Site& site, uintptr_t address);
  void uninitialised(const Site& site, uintptr_t address);
  void unfinished(const Site& site, uintptr_t address);
  void race(const Site& site, uintptr_t address, Moment other, bool other_wrote, bool atomic);
  bool already_told(unsigned site, unsigned other);
  std::string place_in(const Region& region, uintptr_t address) const;

  BlockRunner& block_;
  const Launch* launch_ = nullptr;
  HappensBefore order_;
  uint64_t launch_floor_ = 0;                     // moments below this one are of earlier launches
  int me_ = 0;                                    // the running thread
  unsigned turn_ = 0;                             // so many accesses until others get a turn
  std::vector<unsigned> lanes_of_warp_;           // masks
  std::vector<std::vector<Site*>> open_streams_;  // by warp: sites that it has touched since its lanes last met

  static constexpr size_t kRecentSites = 4096;
  Site nowhere_;                            // fills recent_ at first
  std::array<Site*, kRecentSites> recent_;  // by the low bits of the code address
  std::unordered_map<uintptr_t, std::unique_ptr<Site>> sites_;
  std::set<std::pair<unsigned, unsigned>> told_;  // findings of this launch, by sites

  ThreadStorage statics_;                                               // this OS thread's static shared variables
  std::unordered_map<size_t, std::unique_ptr<Region>> static_regions_;  // by place
  std::vector<Region*> touched_;                                        // by this launch
  Region dynamic_;
};

// The observer of this OS thread while observed kernel code runs on it, else null.
extern thread_local Observer* observing;

// Gives the blocks of a launch numbers of their own, and begins a list of sites. Throws flash::Error if there are not
// as many numbers. Returns whether numbers began anew: then what is known of earlier accesses must be forgotten.
bool number_blocks(uint64_t count);

}  // namespace simt
