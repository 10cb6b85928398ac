// The rarer parts of the observer: places in the code, regions of memory, beginnings and ends, findings.
#include "simt/observer.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "harness/error.h"

extern "C" char __executable_start, _end;  // the program's image, by the linker

namespace simt {
namespace {

constexpr size_t kMostSites = size_t(1) << Moment::kSiteBits;
constexpr uint64_t kMostBlocks = uint64_t(1) << Moment::kBlockBits;

uint64_t first_block = 1;  // of this launch
uint64_t next_launch = 1;  // the number after its last block

// The code addresses of this launch's sites, by number.
std::mutex sites_mutex;
std::vector<const void*> site_codes;

unsigned number_of_site(const void* code) {
  std::lock_guard lock(sites_mutex);
  const auto known = std::find(site_codes.begin(), site_codes.end(), code);
  if (known != site_codes.end()) return unsigned(known - site_codes.begin());
  site_codes.push_back(code);
  return unsigned(site_codes.size() - 1);
}

const void* code_of_site(unsigned number) {
  std::lock_guard lock(sites_mutex);
  return site_codes[number];
}

std::string bytes_text(unsigned size) { return std::to_string(size) + (size == 1 ? " byte" : " bytes"); }

}  // namespace

bool number_blocks(uint64_t count) {
  if (count >= kMostBlocks)
    throw flash::Error("launch: " + std::to_string(count) + " blocks; an observed grid has at most " +
                       std::to_string(kMostBlocks - 1) + "; choose a smaller problem, or --no-observe");
  const bool anew = next_launch + count > kMostBlocks;
  first_block = anew ? 1 : next_launch;
  next_launch = first_block + count;
  site_codes.clear();
  return anew;
}

// ---- Beginnings and ends

Observer::Observer(BlockRunner& block)
    : block_(block),
      statics_(thread_storage()),
      dynamic_(Space::shared, uintptr_t(block.shared), kMaxSharedBytes, "dynamic_shared") {
  dynamic_.observe();
}

void Observer::begin_launch(const Launch& launch) {
  launch_ = &launch;
  launch_floor_ = Moment::stamp(first_block, 0, 0);
  recent_.fill(&nowhere_);
  sites_.clear();
  told_.clear();
  touched_.clear();
  lanes_of_warp_.clear();
  for (int first = 0; first < block_.threads; first += kWarpSize) {
    const int lanes = block_.lanes_in(first / kWarpSize);
    lanes_of_warp_.push_back(lanes == kWarpSize ? ~0u : (1u << lanes) - 1);
  }
  open_streams_.assign(lanes_of_warp_.size(), {});
  dynamic_.bytes = launch.smem_bytes;
}

void Observer::begin_block(uint64_t number) {
  for (size_t warp = 0; warp < lanes_of_warp_.size(); ++warp) flush(int(warp));
  order_.begin_block(first_block + number, block_.threads);
  proxy_fences_.assign(size_t(block_.threads), {});
  mbarrier_fences_.assign(size_t(block_.threads), {});
  fenced_.assign(size_t(block_.threads), false);
  acquired_.clear();
  product_groups_ = 0;
  dynamic_.mark(dynamic_.begin, dynamic_.bytes, kUnwritten);
  dynamic_.has_copies = false;
  for (Region* region : touched_) {
    region->mark(region->begin, region->bytes, kUnwritten);
    region->has_copies = false;
  }
}

void Observer::end_launch(Counters& counters) {
  for (size_t warp = 0; warp < lanes_of_warp_.size(); ++warp) flush(int(warp));
  for (const auto& [key, site] : sites_) {
    if (site->traffic.traffic.requests == 0) continue;
    (site->traffic.shared ? counters.shared : counters.global) += site->traffic.traffic;
    counters.sites.push_back(site->traffic);
  }
}

void Observer::forget_accesses() {
  dynamic_.forget_accesses();
  product_reads_.clear();
  for (auto& [place, region] : static_regions_) region->forget_accesses();
}

void Observer::met(const std::vector<int>& members, bool orders_memory) {
  complete_requests(members);
  if (!orders_memory) return;
  order_.join(members);
  check_moments();
}

// The requests of warps that have met as a whole are complete.
void Observer::complete_requests(const std::vector<int>& members) {
  for (size_t i = 0; i < members.size();) {
    const int warp = members[i] / kWarpSize;
    size_t next = i;
    while (next < members.size() && members[next] / kWarpSize == warp) ++next;
    if (int(next - i) == block_.lanes_in(warp)) flush(warp);
    i = next;
  }
}

void Observer::check_moments() {
  if (order_.exhausted())
    block_.fail(Kind::limit, nullptr,
                {{"more barriers in one block than the observer can count; try a smaller problem"}});
}

// ---- Places in the code, regions of memory

// The static shared variable at an address in this OS thread's storage, null if there is none that the kernel may
// touch.
Region* Observer::static_region_at(uintptr_t address) {
  for (Region* region : touched_)
    if (region->contains(address, 1)) return region;
  const SharedVariable* variable = shared_variable_at(address - uintptr_t(statics_.begin));
  if (!variable || is_of_another_kernel(*variable, launch_->kernel)) return nullptr;
  auto& region = static_regions_[variable->begin];
  if (!region) {
    region = std::make_unique<Region>(Space::shared, uintptr_t(statics_.begin) + variable->begin,
                                      variable->end - variable->begin, variable->name);
    region->observe();
  }
  touched_.push_back(region.get());
  region->mark(region->begin, region->bytes, kUnwritten);
  return region.get();
}

// The site of an access, with the region that it touches; null if that is not to be watched. Ends the block if it is
// nothing that a kernel may touch.
Site* Observer::site_of(uintptr_t address, unsigned size, bool write, const void* code) {
  Region* region = nullptr;
  if (address - uintptr_t(statics_.begin) < statics_.bytes) {
    if (is_index(address)) return nullptr;
    region = static_region_at(address);
    if (!region && is_other_variable(address - uintptr_t(statics_.begin))) return nullptr;
  } else if (address - uintptr_t(block_.shared) < kSharedArenaBytes) {
    region = &dynamic_;
  } else {
    region = device_region_at(address);
    const bool is_image = address - uintptr_t(&__executable_start) < uintptr_t(&_end - &__executable_start);
    const bool is_argument = address - uintptr_t(launch_->arguments) < launch_->argument_bytes;
    if (!region && (is_image || is_argument)) return nullptr;
  }
  if (!region || !region->contains(address, size)) out_of_bounds(address, size, write, code);
  Site& site = find_or_add_site(code, region->space == Space::shared, write, size);
  site.region = region;
  return &site;
}

Site& Observer::find_or_add_site(const void* code, bool shared, bool write, unsigned size) {
  std::unique_ptr<Site>& site = sites_[uintptr_t(code) * 2 + shared];
  if (!site) {
    site = std::make_unique<Site>();
    site->code = code;
    site->number = number_of_site(code);
    site->size = size;
    site->streams.resize(lanes_of_warp_.size());
    site->traffic = {code, shared, write, {}};
    if (site->number >= kMostSites)
      block_.fail(Kind::limit, code,
                  {{"more than " + std::to_string(kMostSites) + " places in the kernel touch memory"}});
  }
  return *site;
}

// ---- Traffic

void Observer::retire(Site& site, const Request& request) {
  Traffic& traffic = site.traffic.traffic;
  const unsigned bytes = unsigned(__builtin_popcount(request.mask)) * site.size;
  (site.traffic.write ? traffic.write_bytes : traffic.read_bytes) += bytes;
  ++traffic.requests;
  const Transactions transactions = (site.traffic.shared ? wavefronts : sectors)(request, site.size);
  traffic.transactions += transactions.taken;
  traffic.ideal_transactions += transactions.ideal;
}

void Observer::flush(int warp) {
  for (Site* site : open_streams_[warp])
    site->streams[warp].flush([&](const Request& request) { retire(*site, request); });
  open_streams_[warp].clear();
}

// ---- Findings

std::string Observer::place_in(const Region& region, uintptr_t address) const {
  const std::string place = " at byte " + std::to_string(address - region.begin);
  if (region.space == Space::global) return "global memory" + place + " of an array of " + std::to_string(region.bytes);
  return "shared memory '" + region.name + "'" + place;
}

bool Observer::already_told(unsigned site, unsigned other) {
  return !told_.insert({std::min(site, other), std::max(site, other)}).second;
}

void Observer::out_of_bounds(uintptr_t address, unsigned size, bool write, const void* code) {
  const ObservationPause pause;
  const std::string verb = std::string(write ? "writes " : "reads ") + bytes_text(size);
  if (address - dynamic_.begin < kSharedArenaBytes)
    block_.fail(Kind::out_of_bounds, code,
                {{verb + " at byte " + std::to_string(address - dynamic_.begin) + " of " +
                  std::to_string(dynamic_.bytes) + " bytes of dynamic shared memory"}});
  if (address - uintptr_t(statics_.begin) < statics_.bytes)
    block_.fail(Kind::out_of_bounds, code, {{verb + " of shared memory outside every variable of this kernel"}});
  const Region* region = device_region_near(address);
  if (!region) block_.fail(Kind::out_of_bounds, code, {{verb + " at an address that is not of device memory"}});
  const std::string array = " an array of " + std::to_string(region->bytes) + " bytes in global memory";
  if (address < region->begin)
    block_.fail(Kind::out_of_bounds, code,
                {{verb + ", " + std::to_string(region->begin - address) + " bytes before" + array}});
  block_.fail(Kind::out_of_bounds, code,
              {{verb + " at byte " + std::to_string(address - region->begin) + " of" + array}});
}

void Observer::misaligned(const Site& site, uintptr_t address) {
  const ObservationPause pause;
  block_.fail(Kind::misaligned, site.code,
              {{std::string(site.traffic.write ? "writes " : "reads ") + bytes_text(site.size) + " of " +
                place_in(*site.region, address)}});
}

void Observer::uninitialised(const Site& site, uintptr_t address) {
  const ObservationPause pause;
  if (already_told(site.number, kMostSites)) return;
  add_note({Kind::uninitialised,
            site.code,
            block_.who(),
            {{"reads " + place_in(*site.region, address) + ", which nobody has written"}}});
}

void Observer::unfinished(const Site& site, uintptr_t address) {
  const ObservationPause pause;
  const Moment copy(site.region->words(address)->write.load(std::memory_order_relaxed));
  if (already_told(site.number, copy.site())) return;
  add_note({Kind::unfinished_copy,
            site.code,
            block_.who(),
            {{std::string(site.traffic.write ? "writes " : "reads ") + place_in(*site.region, address) +
                  ", which a copy has still to fill: it was started at ",
              code_of_site(copy.site())},
             {" by " + block_.describe_thread(int(copy.thread())) + ", and is not waited for"}}});
}

// Whose access a moment is of, in words.
std::string Observer::who_of(Moment moment) const {
  if (moment.is_agent()) return "an asynchronous operation";
  std::string whose = block_.describe_thread(int(moment.thread()));
  if (moment.block() == order_.block()) return whose;
  const uint64_t number = moment.block() - first_block;
  const dim3 grid = launch_->grid;
  return whose + " of block (" + std::to_string(number % grid.x) + "," + std::to_string(number / grid.x % grid.y) +
         "," + std::to_string(number / grid.x / grid.y) + ")";
}

void Observer::race(const Site& site, uintptr_t address, Moment other, bool other_wrote, bool atomic) {
  const ObservationPause pause;
  if (already_told(site.number, other.site())) return;
  const bool mine = !other.is_agent() && int(other.thread()) == block_.running->id && other.block() == order_.block();
  const std::string whose = mine ? "another thread" : who_of(other);
  add_note({Kind::race,
            site.code,
            block_.who(),
            {{std::string(atomic && site.traffic.write ? "atomically changes "
                          : site.traffic.write         ? "writes "
                                                       : "reads ") +
                  place_in(*site.region, address) + ", which " + whose + (other_wrote ? " writes" : " reads") + " at ",
              code_of_site(other.site())},
             {", and nothing orders the two"}}});
}

void Observer::overtaken(const Site& site, uintptr_t address, Moment write) {
  const ObservationPause pause;
  if (already_told(site.number, write.site())) return;
  add_note({Kind::race,
            site.code,
            block_.who(),
            {{"reads " + place_in(*site.region, address) + " until it is waited for, and before that " + who_of(write) +
                  " writes there at ",
              code_of_site(write.site())}}});
}

void Observer::unfenced(const Site& site, uintptr_t address, Moment write) {
  const ObservationPause pause;
  if (already_told(site.number, write.site())) return;
  add_note({Kind::missing_fence,
            site.code,
            block_.who(),
            {{"reads " + place_in(*site.region, address) + " asynchronously, which " + who_of(write) + " writes at ",
              code_of_site(write.site())},
             {", without a fence_proxy_async in between"}}});
}

}  // namespace simt
