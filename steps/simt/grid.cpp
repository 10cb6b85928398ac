// A launch: checks it, hands the blocks of the grid to OS threads, and sums up what they found and counted.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "harness/error.h"
#include "harness/interrupt.h"
#include "simt/block.h"
#include "simt/crashes.h"
#include "simt/findings.h"
#include "simt/flags.h"
#include "simt/observer.h"
#include "simt/symbols.h"

namespace simt {
namespace {

// OS threads that stay for the next launch, each with a block runner whose stacks stay mapped and warm.
class WorkerPool {
 public:
  ~WorkerPool() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Runs `work` on `count` threads at once and waits for all of them.
  void run(int count, const std::function<void(BlockRunner&)>& work) {
    while (int(threads_.size()) < count) {
      runners_.push_back(std::make_unique<BlockRunner>());
      threads_.emplace_back([this, runner = runners_.back().get(), index = int(threads_.size()), round = round_] {
        live(*runner, index, round);
      });
    }
    std::unique_lock lock(mutex_);
    work_ = &work;
    wanted_ = count;
    busy_ = count;
    ++round_;
    wake_.notify_all();
    done_.wait(lock, [&] { return busy_ == 0; });
  }

  const std::vector<std::unique_ptr<BlockRunner>>& runners() const { return runners_; }

 private:
  void live(BlockRunner& runner, int index, uint64_t seen_round) {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return ending_ || round_ != seen_round; });
      if (ending_) return;
      seen_round = round_;
      if (index >= wanted_) continue;
      lock.unlock();
      (*work_)(runner);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::unique_ptr<BlockRunner>> runners_;
  std::vector<std::thread> threads_;
  const std::function<void(BlockRunner&)>* work_ = nullptr;
  uint64_t round_ = 0;
  int wanted_ = 0, busy_ = 0;
  bool ending_ = false;
};

WorkerPool& pool() {
  static WorkerPool pool;
  return pool;
}

Options the_options;
Counters total;
std::map<std::string, Counters> by_kernel;

std::string shape(dim3 size) {
  return "(" + std::to_string(size.x) + "," + std::to_string(size.y) + "," + std::to_string(size.z) + ")";
}

// What a kernel's own __shared__ variables take.
size_t static_shared_bytes(const void* kernel) {
  size_t bytes = 0;
  for (const SharedVariable& variable : shared_variables_of(kernel)) bytes += variable.end - variable.begin;
  return bytes;
}

// Throws flash::LaunchError when no GPU could run this.
void check_launch(const Launch& launch) {
  const std::string name = "launch of " + kernel_name(launch.kernel) + ": ";
  const dim3 grid = launch.grid, block = launch.block;
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    throw flash::LaunchError(name + "grid " + shape(grid) + "; at most (2147483647,65535,65535)");
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.x > 1024 || block.y > 1024 || block.z > 64)
    throw flash::LaunchError(name + "block " + shape(block) + " of " + std::to_string(threads) +
                             " threads; from 1 to 1024, and no axis above (1024,1024,64)");
  const size_t statics = static_shared_bytes(launch.kernel);
  if (statics > 48 << 10)
    throw flash::LaunchError(name + std::to_string(statics) +
                             " bytes of __shared__ variables; at most 49152, more only as dynamic_shared");
  const size_t most = shared_memory_limit();
  if (statics + launch.smem_bytes > most)
    throw flash::LaunchError(name + std::to_string(statics + launch.smem_bytes) + " bytes of shared memory; at most " +
                             std::to_string(most) + " (" + std::to_string(most >> 10) + " KB)");
}

// Makes all shadows ready for observed code.
void begin_observation(uint64_t blocks) {
  if (!has_symbols())
    throw flash::Error(
        "the program has no symbol table, in which the executor looks up shared variables; "
        "do not strip it, or use check --no-observe");
  const bool anew = number_blocks(blocks);
  observe_device_memory();
  if (!anew) return;
  for_each_device_region([](Region& region) { region.forget_accesses(); });
  for (const auto& runner : pool().runners())
    if (runner->observer) runner->observer->forget_accesses();
}

}  // namespace

Options& options() { return the_options; }

size_t shared_memory_limit() { return std::min(the_options.shared_bytes, kMaxSharedBytes); }

int worker_count() {
  if (the_options.workers > 0) return the_options.workers;
  return std::max(1, int(std::thread::hardware_concurrency()));
}

void run_grid(const Launch& launch) {
  check_launch(launch);
  const uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
  if (launch.observed) {
    begin_observation(blocks);
  } else {  // whatever memory this writes, nobody will have seen it
    for_each_device_region([](Region& region) { region.checks_writing = false; });
  }
  begin_findings(launch.kernel);

  std::atomic<uint64_t> next_block = 0;
  std::mutex counting;
  Counters of_launch;
  of_launch.launches = 1;
  of_launch.shared_memory = static_shared_bytes(launch.kernel) + launch.smem_bytes;
  const int workers = int(std::min<uint64_t>(blocks, uint64_t(worker_count())));
  forget_flags();
  grid_progress::begin(workers);
  pool().run(workers, [&](BlockRunner& runner) {
    runner.begin(launch);
    report_crashes(kernel_name(launch.kernel));
    for (uint64_t number; !enough_found() && !flash::interrupt_requested && (number = next_block++) < blocks;) {
      const unsigned x = unsigned(number % launch.grid.x);
      const unsigned y = unsigned(number / launch.grid.x % launch.grid.y);
      const unsigned z = unsigned(number / launch.grid.x / launch.grid.y);
      runner.run_block({x, y, z}, number);
    }
    grid_progress::worker_ends();
    if (!launch.observed) return;
    std::lock_guard lock(counting);
    runner.observer->end_launch(of_launch);
    of_launch.block_barriers += runner.counts.block_barriers;
    of_launch.warp_barriers += runner.counts.warp_barriers;
    of_launch.shuffles += runner.counts.shuffles;
    of_launch.votes += runner.counts.votes;
    of_launch.atomics += runner.counts.atomics;
    of_launch.named_barriers += runner.counts.named_barriers;
    of_launch.barrier_warps += runner.counts.barrier_warps;
    of_launch.mbarrier_waits += runner.counts.mbarrier_waits;
    of_launch.async_copies += runner.counts.async_copies;
    of_launch.bulk_copies += runner.counts.bulk_copies;
    of_launch.matrix_flops += runner.counts.matrix_flops;
  });
  flash::throw_if_interrupted();
  if (launch.observed) {
    total += of_launch;
    by_kernel[kernel_name(launch.kernel)] += of_launch;
  }
  report_findings();
}

const Counters& counters() { return total; }
const std::map<std::string, Counters>& counters_by_kernel() { return by_kernel; }
void reset_counters() {
  total = {};
  by_kernel.clear();
}

Traffic& Traffic::operator+=(const Traffic& other) {
  read_bytes += other.read_bytes;
  write_bytes += other.write_bytes;
  requests += other.requests;
  transactions += other.transactions;
  ideal_transactions += other.ideal_transactions;
  return *this;
}

Counters& Counters::operator+=(const Counters& other) {
  launches += other.launches;
  global += other.global;
  shared += other.shared;
  block_barriers += other.block_barriers;
  warp_barriers += other.warp_barriers;
  shuffles += other.shuffles;
  votes += other.votes;
  atomics += other.atomics;
  shared_memory = std::max(shared_memory, other.shared_memory);
  named_barriers += other.named_barriers;
  barrier_warps += other.barrier_warps;
  mbarrier_waits += other.mbarrier_waits;
  async_copies += other.async_copies;
  bulk_copies += other.bulk_copies;
  matrix_flops += other.matrix_flops;
  for (const SiteTraffic& site : other.sites) {
    const auto same = [&](const SiteTraffic& s) { return s.code == site.code && s.shared == site.shared; };
    const auto known = std::find_if(sites.begin(), sites.end(), same);
    if (known != sites.end()) {
      known->traffic += site.traffic;
    } else {
      sites.push_back(site);
    }
  }
  return *this;
}

}  // namespace simt
