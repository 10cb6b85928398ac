// Mistakes with asynchronous instructions are found: each planted one as what it is, at its line, and nothing in the
// same kernels without it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "harness/error.h"
#include "simt/executor.h"
#include "simt_kernels/async_kernels.h"
#include "simt_tools.h"

using flash::Target;
using simt::Kind;
using simt_kernels::AsyncFault;
using simt_kernels::AsyncKernels;
using simt_tools::Array;
using simt_tools::KeepOptions;
using simt_tools::ramp;

namespace {

using enum AsyncFault;

struct Planted {
  AsyncFault fault;
  Kind kind;         // in a forward run on one worker
  const char* says;  // likewise
  bool in_any_build = false;
};

constexpr Planted kAmpere[] = {
    {no_copy_wait, Kind::unfinished_copy, "thread (0,0,0): unfinished copy: reads shared memory 'tile'"},
    {no_copy_commit, Kind::unfinished_copy, "a copy has still to fill"},
    {copy_wait_pending, Kind::unfinished_copy, "a copy has still to fill"},
    {no_barrier_after_copy_wait, Kind::race, "thread (35,0,0) writes"},
    {tile_reused_too_early, Kind::race, "thread (15,0,0) reads"},
    {named_barrier_too_many, Kind::deadlock, "in named barrier 3 (64 of 96 threads have come)", true},
    {named_barrier_counts_differ, Kind::barrier_misuse,
     "named barrier 3 of 96 threads, which thread (0,0,0) takes for one of 64", true},
    {no_named_barrier, Kind::race, "nothing orders the two"},
    {named_barrier_number, Kind::barrier_misuse, "named barrier 16", true},
    {misaligned_row, Kind::misaligned, "misaligned", true},
    {copy_past_shared, Kind::out_of_bounds, "shared memory", true},
};

constexpr Planted kHopper[] = {
    {no_mbarrier_wait, Kind::unfinished_copy, "thread (0,0,0): unfinished copy: reads shared memory 'dynamic_shared'"},
    {wrong_parity, Kind::unfinished_copy, "a copy has still to fill"},
    {no_arrive, Kind::deadlock, "thread (32,0,0) in mbarrier_wait for phase 0 (32 of 32 arrivals", true},
    {arrival_too_many, Kind::barrier_misuse, "one arrival too many at an mbarrier made for 1", true},
    {wrong_bytes, Kind::deadlock, "thread (31,0,0) in mbarrier_wait for phase 0 (0 of 1 arrivals and 16 bytes", true},
    {uninitialised_mbarrier, Kind::uninitialised, "an mbarrier that nobody has initialised", true},
    {no_mbarrier_fence, Kind::missing_fence, "fence_mbarrier_init"},
    {no_barrier_after_init, Kind::race, "'full'"},
    {no_wait_for_empty, Kind::race, "nothing orders the two"},
    {no_fence_before_store, Kind::missing_fence, "without a fence_proxy_async"},
    {no_barrier_before_store, Kind::race, "thread (32,0,0): race: reads shared memory"},
    {no_bulk_commit, Kind::unfinished_copy, "without a wait for this store", true},
    {no_bulk_wait_read, Kind::race, "until it is waited for, and before that thread (0,0,0) writes"},
    {no_bulk_wait, Kind::unfinished_copy, "without a wait for this store", true},
    {misaligned_box, Kind::misaligned, "1024", true},
    {box_past_shared, Kind::out_of_bounds, "1024 bytes", true},
    {box_past_tensor, Kind::out_of_bounds, "global memory"},
    {no_release, Kind::race, "of block (0,0,0) writes"},
    {flag_never_set, Kind::deadlock, "thread (0,0,0) in load_acquire of a flag that no earlier block has set", true},
};

constexpr Planted kWgmma[] = {
    {wgmma_wait_pending, Kind::barrier_misuse, "may still run: it leaves 1 pending", true},
    {no_wgmma_commit, Kind::barrier_misuse, "nobody has committed", true},
    {registers_reused, Kind::barrier_misuse, "used for something else", true},
    {no_fence_before_wgmma, Kind::missing_fence, "without a fence_proxy_async"},
    {no_barrier_before_wgmma, Kind::race, "nothing orders the two"},
    {no_wgmma_fence, Kind::missing_fence, "wgmma_fence", true},
    {tile_overwritten, Kind::race, "until it is waited for, and before that thread (64,0,0) writes"},
    {tile_overwritten_after_barrier, Kind::race, "before that thread (64,0,0) writes"},
    {operand_past_shared, Kind::out_of_bounds, "up to byte 17408 of 16384", true},
    {operands_differ, Kind::divergence, "operands that differ", true},
    {stage_released_early, Kind::race, "until it is waited for, and before that thread (0,0,0) writes"},
    {too_many_registers, Kind::deadlock, "in setmaxnreg_inc, for registers that nobody gives back", true},
    {stage_released_by_one, Kind::race, "an asynchronous operation reads"},
};

// Runs a faulty kernel and returns the message.
using Run = void (*)(AsyncFault, const float*, float*);
std::string message_of(Run run, AsyncFault fault, std::vector<float>* result = nullptr) {
  Array<float> in(ramp(4096)), out(std::vector<float>(4096, 0.0f));
  try {
    run(fault, in.get(), out.get());
  } catch (const flash::KernelFault& found) {
    return found.what();
  }
  if (result) *result = out.download();
  return "";
}

void check_planted(const Planted& planted, Run run, int (*line)(), const std::string& file) {
  const std::string message = message_of(run, planted.fault);
  INFO(int(planted.fault), ": ", message);
  REQUIRE(!simt::findings().empty());
  for (const simt::Finding& finding : simt::findings()) CHECK(finding.kind == planted.kind);
  CHECK(message.find(file + ".cu:" + std::to_string(line())) != std::string::npos);
  CHECK(message.find(planted.says) != std::string::npos);
}

// Every planted mistake in both builds, then in both orders, which may see it otherwise.
template <size_t kCount>
void check_all(const Planted (&planted)[kCount], Run observed, int (*observed_line)(), Run plain, int (*plain_line)(),
               const std::string& file) {
  KeepOptions keep;
  simt::options() = {1, simt::Order::forward};
  for (const Planted& one : planted) {
    check_planted(one, observed, observed_line, file);
    if (one.in_any_build) check_planted(one, plain, plain_line, file);
  }
  for (auto order : {simt::Order::forward, simt::Order::backward}) {
    simt::options() = {2, order};
    CHECK(message_of(observed, none) == "");
    CHECK(message_of(plain, none) == "");
    for (const Planted& one : planted) {
      CAPTURE(int(one.fault));
      CHECK(message_of(observed, one.fault) != "");
    }
  }
}

using Plain = AsyncKernels<Target::cpu>;
using Observed = AsyncKernels<Target::cpu_observed>;

}  // namespace

TEST_SUITE_BEGIN("async");

TEST_CASE("mistakes with cp.async, ldmatrix and named barriers") {
  check_all(kAmpere, Observed::ampere_fault, Observed::ampere_fault_line, Plain::ampere_fault, Plain::ampere_fault_line,
            "ampere_faults");
}

TEST_CASE("mistakes with mbarriers, TMA, bulk copies and flags") {
  check_all(kHopper, Observed::hopper_fault, Observed::hopper_fault_line, Plain::hopper_fault, Plain::hopper_fault_line,
            "hopper_faults");
}

TEST_CASE("mistakes with wgmma") {
  check_all(kWgmma, Observed::wgmma_fault, Observed::wgmma_fault_line, Plain::wgmma_fault, Plain::wgmma_fault_line,
            "wgmma_faults");
}

TEST_CASE("results of wgmma that are not waited for are NaN") {
  const auto some_nan = [](const std::vector<float>& x) {
    return std::any_of(x.begin(), x.end(), [](float f) { return std::isnan(f); });
  };
  for (Run run : {Plain::wgmma_fault, Observed::wgmma_fault}) {
    std::vector<float> out;
    CHECK(message_of(run, none, &out) == "");
    CHECK_FALSE(some_nan(out));
    CHECK(message_of(run, no_wgmma_wait, &out) == "");
    CHECK(some_nan(out));
  }
}

TEST_SUITE_END();
