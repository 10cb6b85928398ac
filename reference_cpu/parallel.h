// Independent pieces of work on all cores.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "harness/interrupt.h"

namespace flash::reference {

// Calls work(0), …, work(count − 1), each once, on `threads` threads (0: as many as there are cores). The first
// exception of any of them is thrown again here. Throws Interrupted between two pieces when the user wants an end.
template <class Work>
void parallel_for(size_t count, int threads, const Work& work) {
  const size_t wanted = threads > 0 ? size_t(threads) : std::max(1u, std::thread::hardware_concurrency());
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_lock;
  const auto take_turns = [&] {
    try {
      for (size_t i = next++; i < count && !interrupt_requested; i = next++) work(i);
    } catch (...) {
      const std::lock_guard lock(failure_lock);
      if (!failure) failure = std::current_exception();
      next = count;  // nobody needs the rest
    }
  };
  std::vector<std::jthread> helpers;
  for (size_t t = 1; t < std::min(wanted, count); ++t) helpers.emplace_back(take_turns);
  take_turns();
  helpers.clear();  // waits for them
  if (failure) std::rethrow_exception(failure);
  throw_if_interrupted();
}

}  // namespace flash::reference
