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
//   fences          between threads' own writes to shared memory and reads of it by TMA and wgmma
//
// What is asynchronous takes time from its start to the wait for it: a copy's target may not be used in between, what a
// copy or a product reads may not be written.
//
// Not watched: a thread's own stack, kernel arguments, constant memory. Between blocks only flags make an order: by
// store_release and load_acquire, or by atomics of threads that have called __threadfence before.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simt/block.h"
#include "simt/flags.h"
#include "simt/happens_before.h"
#include "simt/hopper.h"
#include "simt/shadow.h"
#include "simt/symbols.h"
#include "simt/traffic.h"

namespace simt {

struct BulkCopy;
struct MbarrierState;
struct Warpgroup;

constexpr int kMaxWarpgroups = 8;
constexpr size_t kMostSites = size_t(1) << Moment::kSiteBits;

// Reads of the running thread, one after the other at one place in the code and at equal distances, as loops make them.
// They are looked at together, before anything happens that could make a difference to them.
struct Run {
  static constexpr uintptr_t kUnknown = ~uintptr_t(0);

  uintptr_t next = kUnknown;  // where the next read goes on with it
  unsigned count = 0;
  unsigned most = 0;  // so many are sure to be inside the array
  uintptr_t stride = 0;
  uintptr_t first = 0;
  bool is_pending = false;  // whether the observer has it in its list

  bool takes(uintptr_t address) const { return address == next && count < most; }
  void take() {
    ++count;
    next += stride;
  }
  // The bytes from the first to the last that it reads, and the gaps.
  bool overlaps(uintptr_t address, size_t bytes, unsigned size) const {
    const uintptr_t last = first + (count - 1) * stride;
    return address < std::max(first, last) + size && std::min(first, last) < address + bytes;
  }
};

// A place in the code that touches memory, as one worker sees it in one launch. A place that touches both global and
// shared memory counts as two.
struct Site {
  const void* code = nullptr;
  Run run;
  Region* region = nullptr;  // touched last
  unsigned number = 0;       // the same for all workers
  unsigned size = 0;
  std::vector<RequestStream> streams;  // by warp
  SiteTraffic traffic;
};

class Observer {
 public:
  explicit Observer(BlockRunner& block);

  void begin_launch(const Launch& launch);
  void begin_block(uint64_t number);
  void resume(int thread);  // this one runs from now on
  void end_turn();          // others run if it has made many accesses
  void met(const std::vector<int>& members, bool orders_memory);
  void complete_requests(const std::vector<int>& members);
  void end_launch(Counters& counters);  // adds what was counted
  void forget_accesses();

  // What is called before each access.
  template <unsigned kSize, bool kWrite>
  void access(uintptr_t address, const void* code, bool atomic);
  // The same for a read that may become part of a run, and for a write, which may touch what one reads.
  template <unsigned kSize>
  void read(uintptr_t address, const void* code);
  template <unsigned kSize>
  void write(uintptr_t address, const void* code);
  // Looks at the reads that are put off. To be called before anything else that the running thread does: whatever it
  // asks of observer() comes after that.
  void settle() {
    if (!pending_.empty()) settle_runs();
  }

  // Barriers at which some arrive and others wait: the running thread leaves what it knows, or takes what was left.
  void release(Gathered& gathered);
  SharedClock publish(Gathered& gathered) const { return order_.publish(gathered); }
  void acquire(const SharedClock& published);

  // ---- What is asynchronous (async_observer.cpp)

  // Shared memory that a copy of the running thread will fill, and has filled: from then on it is as if the thread
  // had just written it.
  void mark_in_flight(uintptr_t address, size_t bytes);
  void land_own_copy(uintptr_t address, size_t bytes, const void* code);

  void init_mbarrier(const Mbarrier* barrier, MbarrierState& state, const void* code);
  void use_mbarrier(const Mbarrier* barrier, const MbarrierState& state, bool arrives, const void* code);
  void end_phase(MbarrierState& barrier);
  void fence_mbarriers();
  void fence_proxy();

  void start_load(const BulkCopy& copy, MbarrierState& barrier);
  void finish_load(const BulkCopy& copy, const MbarrierState& barrier);
  void start_store(BulkCopy& copy);
  void finish_store_reads(const BulkCopy& copy);
  void finish_store_writes(const BulkCopy& copy);
  void act_as(int thread) { me_ = thread; }

  // Products of a warpgroup read pieces of 16 bytes of dynamic shared memory, from the start to the end of a wait.
  void start_product_reads(const uint32_t* offsets, size_t count, int first_thread, const void* code);
  View take_view(int thread) { return order_.take_view(thread); }
  void begin_product_wait(Warpgroup& group);
  void finish_product_reads(const uint32_t* offsets, size_t count, const View& issued, int group_number,
                            const Warpgroup& group, const void* code);
  void end_product_wait(const Warpgroup& group, int first_thread);

  // ---- Order between blocks (flags.h)

  void fence_memory() { fenced_[size_t(me_)] = true; }
  bool has_fenced() const { return fenced_[size_t(me_)]; }
  bool uses_flags() const { return has_fenced() || any_flag_tells(); }
  void acquire_flag(const SharedKnowledge& told);
  // What the running thread knows of all blocks, and what was told before.
  SharedKnowledge knowledge(const SharedKnowledge& before);
  void write_flag(uintptr_t address, const void* code);

  BlockRunner& block() { return block_; }

 private:
  template <unsigned kSize>
  void begin_or_end_run(uintptr_t address, const void* code);
  void settle_runs();
  void settle_run(Site& site);
  template <unsigned kSize>
  void settle_run_of(Site& site);
  template <unsigned kSize, bool kWrite>
  Site* site_for(uintptr_t address, const void* code);
  template <unsigned kSize, bool kWrite>
  Site* other_site(uintptr_t address, const void* code);
  template <unsigned kSize, bool kWrite>
  void look_at(Site& site, uintptr_t address, uintptr_t stride, unsigned count, bool atomic);
  void count_requests(Site& site, uintptr_t address, uintptr_t stride, unsigned count);
  void count_unexpected(Site& site, uintptr_t address);
  template <unsigned kSize, bool kWrite>
  bool check_written(const Site& site, uintptr_t address, bool atomic);
  // An access of the running thread, and what that knows of others, for the order of accesses.
  struct Access {
    const Site& site;
    Region& region;
    bool atomic;
    uint64_t
        floor;  // moments below this one come before it anyway. In shared memory those of other blocks mean nothing
    uint64_t moment;  // of it itself
    Knowledge known;
    bool is_mine(uint64_t other) const { return other >> Moment::kThreadShift == moment >> Moment::kThreadShift; }
  };
  Access access_at(const Site& site, bool atomic) const {
    return {site,
            *site.region,
            atomic,
            site.traffic.shared ? order_.floor() : launch_floor_,
            order_.stamp(me_) | uint64_t(site.number) << Moment::kSiteShift,
            order_.knowledge(me_)};
  }
  bool is_simple(const Access& access) const { return acquired_.empty() && access.known.is_simple; }
  // Does an earlier access of another thread, above the floor, come without order before this one?
  SIMT_INLINE bool conflicts(const Access& access, uint64_t earlier) const {
    if (!is_simple(access) || (earlier & Moment::kAgent)) return conflicts(Moment(earlier));
    return access.known.is_news(earlier);
  }
  void check_write(const Access& access, const std::atomic<uint64_t>& last, uintptr_t address);
  template <unsigned kSize>
  void note_reads(const Access& access, uintptr_t address, uintptr_t stride, unsigned count);
  template <bool kWrite>
  void check_cell(const Access& access, Cells cells, uintptr_t address);
  template <bool kWrite>
  void check_cells(const Access& access, Cells cells, uintptr_t address, size_t count, unsigned bytes_each);
  template <unsigned kSize, bool kWrite>
  void check_order(const Access& access, uintptr_t address);
  template <bool kWrite>
  void check_range(const Site& site, uintptr_t address, size_t bytes, bool atomic);
  void check_product_reads(const Site& site, uintptr_t address, size_t bytes);
  // The same for the running thread, whatever the earlier one is.
  bool conflicts(Moment earlier) const {
    if (earlier.block() == order_.block() && order_.ordered(earlier, me_)) return false;
    return acquired_.empty() || !flags_cover(earlier);
  }
  bool flags_cover(Moment earlier) const;
  bool knows(const Acquired& acquired) const;

  // Reads of 16 bytes of shared memory past the threads' own view of it: by TMA, or by wgmma. `checked` is the last
  // moment that was found to come before them.
  struct AsyncReaders {
    std::array<int, 4> threads;  // those that must know of what is read
    int count;
    uint64_t checked = 0;
  };
  void check_async_read(const Site& site, uintptr_t piece, AsyncReaders& readers);
  bool check_writer(const Site& site, uintptr_t address, uint64_t write, AsyncReaders& readers);
  bool is_fenced(Moment write, int reader) const;
  void check_untouched(const Site& site, uintptr_t piece, const View& issued, uint64_t& checked);
  bool is_readable(const Site& site, uintptr_t address, size_t bytes);
  void count_bulk(Site& site, uint64_t bytes, uint64_t transactions);

  Site* site_of(uintptr_t address, unsigned size, bool write, const void* code);
  Site& find_or_add_site(const void* code, bool shared, bool write, unsigned size);
  Region* static_region_at(uintptr_t address);
  Region* shared_region_at(uintptr_t address);
  void stamp_writes(Region& region, uintptr_t address, size_t bytes, uint64_t moment);
  void retire(Site& site, const Request& request, const Addresses* list);
  void flush(int warp);
  void check_moments();

  [[noreturn]] void out_of_bounds(uintptr_t address, unsigned size, bool write, const void* code);
  [[noreturn]] void misaligned(const Site& site, uintptr_t address);
  void uninitialised(const Site& site, uintptr_t address);
  void unfinished(const Site& site, uintptr_t address);
  void overtaken(const Site& site, uintptr_t address, Moment write);
  void unfenced(const Site& site, uintptr_t address, Moment write);
  void race(const Site& site, uintptr_t address, Moment other, bool other_wrote, bool atomic);
  bool already_told(unsigned site, unsigned other);
  std::string place_in(const Region& region, uintptr_t address) const;
  std::string who_of(Moment moment) const;

  BlockRunner& block_;
  const Launch* launch_ = nullptr;
  HappensBefore order_;
  uint64_t launch_floor_ = 0;                     // moments below this one are of earlier launches
  int me_ = 0;                                    // the running thread
  unsigned turn_ = 0;                             // so many accesses until others get a turn
  std::vector<unsigned> lanes_of_warp_;           // masks
  std::vector<std::vector<Site*>> open_streams_;  // by warp: sites that it has touched since its lanes last met

  std::vector<Site*> pending_;  // whose runs are put off

  static constexpr size_t kRecentSites = 4096;
  Site nowhere_;                            // fills recent_ at first
  std::array<Site*, kRecentSites> recent_;  // by the low bits of the code address
  std::unordered_map<uintptr_t, std::unique_ptr<Site>> sites_;
  std::set<std::pair<unsigned, unsigned>> told_;  // findings of this launch, by sites

  ThreadStorage statics_;                                               // this OS thread's static shared variables
  std::unordered_map<size_t, std::unique_ptr<Region>> static_regions_;  // by place
  std::vector<Region*> touched_;                                        // by this launch
  Region dynamic_;

  // Clocks of each thread's fences between its own accesses and those of TMA and wgmma, in order, and what it knew at
  // the last one; the same for fences that make initialised mbarriers visible.
  struct Fences {
    std::vector<unsigned> clocks;
    View view;
  };
  std::vector<Fences> proxy_fences_, mbarrier_fences_;  // by thread

  // By 16 bytes of dynamic shared memory: the last product of each warpgroup that has read them.
  std::vector<std::array<uint64_t, kMaxWarpgroups>> product_reads_;
  int product_groups_ = 0;  // of this block, that have read any

  std::vector<bool> fenced_;        // by thread: whether it has called __threadfence
  std::vector<Acquired> acquired_;  // from other blocks
};

// The observer of this OS thread while observed kernel code runs on it, else null.
extern constinit thread_local Observer* observing;

// The observer of the present launch, up to date; null if it is not observed.
inline Observer* observer() {
  if (!runner->observed) return nullptr;
  runner->observer->settle();
  return runner->observer.get();
}

// While the executor does something for a kernel nothing is observed. The observed kernel files bring instrumented
// copies of the standard library's templates along, and the linker may have chosen those for the executor too.
class ObservationPause {
 public:
  ObservationPause() : paused_(std::exchange(observing, nullptr)) {}
  ~ObservationPause() { observing = paused_; }
  ObservationPause(const ObservationPause&) = delete;

 private:
  Observer* paused_;
};

// Gives the blocks of a launch numbers of their own, and begins a list of sites. Throws flash::Error if there are not
// as many numbers. Returns whether numbers began anew: then what is known of earlier accesses must be forgotten.
bool number_blocks(uint64_t count);
uint64_t first_block_of_launch();

// The code address of a site of this launch.
const void* code_of_site(unsigned number);

}  // namespace simt
