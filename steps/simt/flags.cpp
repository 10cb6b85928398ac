// load_acquire, store_release and __threadfence, and how blocks wait for each other.
#include "simt/flags.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <unordered_map>

#include "simt/findings.h"
#include "simt/hopper.h"
#include "simt/observer.h"

namespace simt {

// ---- What is known of other blocks

void KnownBlocks::add(const std::shared_ptr<const View>& view) {
  const auto before = [](const auto& a, const auto& b) {
    return std::pair(a->block, a->thread) < std::pair(b->block, b->thread);
  };
  const auto place = std::lower_bound(views_.begin(), views_.end(), view, before);
  if (place == views_.end() || before(view, *place)) {
    views_.insert(place, view);
  } else if ((*place)->clock < view->clock) {  // a thread knows what it has known
    *place = view;
  }
}

void KnownBlocks::add(const KnownBlocks& other) {
  for (const auto& view : other.views_) add(view);
}

bool KnownBlocks::covers(Moment earlier) const {
  auto it = std::lower_bound(views_.begin(), views_.end(), earlier.block(),
                             [](const auto& view, unsigned block) { return view->block < block; });
  for (; it != views_.end() && (*it)->block == earlier.block(); ++it)
    if ((*it)->covers(earlier)) return true;
  return false;
}

// ---- Flags

namespace {

std::mutex mutex;
std::unordered_map<const void*, SharedKnowledge> flags;
std::atomic<bool> tells = false;

}  // namespace

std::mutex& flags_mutex() { return mutex; }
SharedKnowledge& told_by_flag(const void* address) {
  tells = true;
  return flags[address];
}
bool any_flag_tells() { return tells; }
void forget_flags() {
  flags.clear();
  tells = false;
}

int read_flag(const int* flag) {
  const ObservationPause pause;
  const void* code = SIMT_CALLER;
  // Asked again and again it counts once: how often is a matter of time.
  if (observer() && !runner->has_just_asked(flag)) observer()->access<4, false>(uintptr_t(flag), code, /*atomic=*/true);
  const auto read = [&] {
    if (!observer()) return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    std::lock_guard lock(mutex);
    if (any_flag_tells()) observer()->acquire_flag(told_by_flag(flag));
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
  };
  const int value = read();
  return runner->polled(flag, uint64_t(value), "load_acquire", code) ? read() : value;
}

void write_flag(int* flag, int value) {
  const ObservationPause pause;
  const void* code = SIMT_CALLER;
  if (observer()) {
    observer()->write_flag(uintptr_t(flag), code);
    std::lock_guard lock(mutex);
    told_by_flag(flag) = observer()->knowledge(nullptr);
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
  } else {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
  }
  grid_progress::changed();
}

void fence_memory() {
  const ObservationPause pause;
  if (observer()) observer()->fence_memory();
}

// ---- What the observer makes of flags

// Whether the running thread knows of it.
bool Observer::knows(const Acquired& acquired) const {
  return order_.ordered(Moment(Moment::stamp(order_.block(), acquired.clock, uint64_t(acquired.thread))), me_);
}

bool Observer::flags_cover(Moment earlier) const {
  return std::any_of(acquired_.rbegin(), acquired_.rend(),
                     [&](const Acquired& acquired) { return knows(acquired) && acquired.blocks->covers(earlier); });
}

void Observer::acquire_flag(const SharedKnowledge& told) {
  if (!told) return;
  for (const Acquired& known : acquired_)
    if (known.blocks == told && known.thread == me_) return;
  acquired_.push_back({me_, order_.clock(me_), told});
}

SharedKnowledge Observer::knowledge(const SharedKnowledge& before) {
  auto blocks = std::make_shared<KnownBlocks>();
  if (before) blocks->add(*before);
  for (const Acquired& acquired : acquired_)
    if (knows(acquired)) blocks->add(*acquired.blocks);
  blocks->add(std::make_shared<const View>(order_.take_view(me_)));
  check_moments();
  return blocks;
}

void Observer::write_flag(uintptr_t address, const void* code) {
  if (Region* region = device_region_at(address))
    region->mark(address, std::min<size_t>(4, region->begin + region->bytes - address), kWritten);
  access<4, true>(address, code, /*atomic=*/true);
}

// ---- Workers that wait for each other

namespace grid_progress {
namespace {

std::mutex progress_mutex;  // guards the rest
std::condition_variable something_new;
std::atomic<uint64_t> change_count = 0;
int working = 0;
int waiting = 0;  // of these, since the last change

}  // namespace

void begin(int workers) {
  std::lock_guard lock(progress_mutex);
  working = workers;
  waiting = 0;
}

void worker_ends() {
  std::lock_guard lock(progress_mutex);
  --working;
  something_new.notify_all();
}

uint64_t changes() { return change_count; }

void changed() {
  std::lock_guard lock(progress_mutex);
  ++change_count;
  if (waiting > 0) something_new.notify_all();
  waiting = 0;
}

bool wait(uint64_t seen) {
  std::unique_lock lock(progress_mutex);
  if (change_count != seen) return true;
  ++waiting;
  // Every now and then it looks whether the grid is to stop.
  while (change_count == seen && waiting < working && !enough_found())
    something_new.wait_for(lock, std::chrono::milliseconds(50));
  if (change_count != seen) return true;  // and is not counted any more
  --waiting;
  something_new.notify_all();
  return false;
}

}  // namespace grid_progress
}  // namespace simt
