// What a block says about itself, above all when it cannot go on.
#include <algorithm>

#include "simt/async.h"
#include "simt/observer.h"

namespace simt {

bool BlockRunner::is_shared(const void* address, size_t bytes) const {
  const size_t in_dynamic = uintptr_t(address) - uintptr_t(shared);
  const size_t in_statics = uintptr_t(address) - uintptr_t(statics_.begin);
  return (in_dynamic < launch_->smem_bytes && bytes <= launch_->smem_bytes - in_dynamic) ||
         (in_statics < statics_.bytes && bytes <= statics_.bytes - in_statics);
}

int BlockRunner::lanes_in(int warp) const { return std::min(kWarpSize, threads - warp * kWarpSize); }

std::string BlockRunner::describe_thread(int id) const {
  const uint3 t = fibers[id].thread;
  return "thread (" + std::to_string(t.x) + "," + std::to_string(t.y) + "," + std::to_string(t.z) + ")";
}

std::string BlockRunner::who() const {
  std::string text =
      "block (" + std::to_string(block.x) + "," + std::to_string(block.y) + "," + std::to_string(block.z) + ")";
  return running ? text + " " + describe_thread(running->id) : text;
}

void BlockRunner::fail(Kind kind, const void* code, Text text) {
  if (observed) observer->settle();
  add_note({kind, code, who(), std::move(text)});
  aborted_ = true;
  stop_grid();
  yield();  // for good
  __builtin_unreachable();
}

// No thread can go on: says where each one waits, neighbours in one line.
void BlockRunner::note_deadlock() {
  const auto alike = [](const Fiber& a, const Fiber& b) {
    return a.done == b.done && (a.done || (a.wait_code == b.wait_code && a.wait_word == b.wait_word));
  };
  Text text = {{"no thread can go on:"}};
  const Fiber* waiting = nullptr;
  bool exited = false, waits_differ = false, counts_arrivals = false;
  for (int first = 0, next; first < threads; first = next) {
    const Fiber& fiber = fibers[first];
    for (next = first; next < threads && alike(fiber, fibers[next]);) ++next;
    std::string range = first > 0 ? "; " : " ";
    range += describe_thread(first) + (next - first > 1 ? " to " + describe_thread(next - 1) : "");
    if (fiber.done) {
      exited = true;
      text.push_back({range + " returned"});
    } else {
      if (waiting && waiting->wait_code != fiber.wait_code) waits_differ = true;
      waiting = &fiber;
      const std::string state = describe_wait(*this, fiber);
      counts_arrivals |= !state.empty();
      text.push_back({range + " in " + fiber.wait_what + state + " at ", fiber.wait_code});
    }
  }
  // Where arrivals are counted, those who have come and gone need not be missing.
  const Kind kind = counts_arrivals ? Kind::deadlock
                    : exited        ? Kind::early_exit
                    : waits_differ  ? Kind::divergence
                                    : Kind::deadlock;
  add_note({kind, waiting->wait_code, who(), std::move(text)});
  stop_grid();
}

}  // namespace simt
