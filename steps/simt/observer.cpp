// The rarer parts of the observer: places in the code, regions of memory, beginnings and ends.
#include "simt/observer.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "harness/error.h"

extern "C" char __ehdr_start, _end;  // the program's image, by the linker

namespace simt {
namespace {

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

}  // namespace

const void* code_of_site(unsigned number) {
  std::lock_guard lock(sites_mutex);
  return site_codes[number];
}

uint64_t first_block_of_launch() { return first_block; }

bool number_blocks(uint64_t count) {
  if (count >= kMostBlocks)
    throw flash::Error("launch: " + std::to_string(count) + " blocks; an observed grid has at most " +
                       std::to_string(kMostBlocks - 1) +
                       "; choose a smaller problem, or check it unobserved (check --no-observe)");
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
  pending_.clear();
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
  settle();
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
    const bool is_image = address - uintptr_t(&__ehdr_start) < uintptr_t(&_end - &__ehdr_start);
    const bool is_argument = address - uintptr_t(launch_->arguments) < launch_->argument_bytes;
    if (!region && (is_image || is_argument)) return nullptr;
  }
  if (!region || !region->contains(address, size)) out_of_bounds(address, size, write, code);
  Site& site = find_or_add_site(code, region->space == Space::shared, write, size);
  if (site.region != region) settle_run(site);
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
    for (const unsigned lanes : lanes_of_warp_) site->streams.emplace_back(lanes);
    site->traffic = {code, shared, write, {}};
    if (site->number >= kMostSites)
      block_.fail(Kind::limit, code,
                  {{"more than " + std::to_string(kMostSites) + " places in the kernel touch memory"}});
  }
  return *site;
}

// ---- Traffic

// What count() leaves over: beginnings and ends of requests, and lanes that are not in line.
void Observer::count_unexpected(Site& site, uintptr_t address) {
  const int warp = me_ / kWarpSize;
  RequestStream& stream = site.streams[size_t(warp)];
  if (!stream.in_use()) open_streams_[size_t(warp)].push_back(&site);
  stream.add(unsigned(me_ % kWarpSize), uint32_t(address),
             [&](const Request& request, const Addresses* list) { retire(site, request, list); });
}

void Observer::retire(Site& site, const Request& request, const Addresses* list) {
  Traffic& traffic = site.traffic.traffic;
  const unsigned bytes = unsigned(__builtin_popcount(request.mask)) * site.size;
  (site.traffic.write ? traffic.write_bytes : traffic.read_bytes) += bytes;
  ++traffic.requests;
  const Transactions transactions = (site.traffic.shared ? wavefronts : sectors)(request, list, site.size);
  traffic.transactions += transactions.taken;
  traffic.ideal_transactions += transactions.ideal;
}

void Observer::flush(int warp) {
  for (Site* site : open_streams_[warp])
    site->streams[warp].flush([&](const Request& request, const Addresses* list) { retire(*site, request, list); });
  open_streams_[warp].clear();
}

}  // namespace simt
