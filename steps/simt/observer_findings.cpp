// What the observer has found, in words.
#include <algorithm>

#include "simt/findings.h"
#include "simt/observer.h"

namespace simt {
namespace {

std::string bytes_text(unsigned size) { return std::to_string(size) + (size == 1 ? " byte" : " bytes"); }

}  // namespace

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
  const Moment copy(site.region->words(address).writes->load(std::memory_order_relaxed));
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
  const uint64_t number = moment.block() - first_block_of_launch();
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
