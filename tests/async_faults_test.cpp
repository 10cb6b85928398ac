// Mistakes with asynchronous instructions are found: each planted one as what it is, at its line, and nothing in the
// same kernels without it.
#include <doctest/doctest.h>

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

using Plain = AsyncKernels<Target::cpu>;
using Observed = AsyncKernels<Target::cpu_observed>;

struct Planted {
  AsyncFault fault;
  Kind kind;         // in a forward run on one worker
  const char* says;  // likewise
  bool in_any_build = false;
};

using enum AsyncFault;

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

// Runs a faulty kernel and returns the message.
template <class K>
std::string ampere_message(AsyncFault fault) {
  Array<float> in(ramp(64)), out(64);
  try {
    K::ampere_fault(fault, in.get(), out.get());
  } catch (const flash::KernelFault& found) {
    return found.what();
  }
  return "";
}

template <class K>
void check_ampere(const Planted& planted) {
  const std::string message = ampere_message<K>(planted.fault);
  INFO(int(planted.fault), ": ", message);
  REQUIRE(!simt::findings().empty());
  for (const simt::Finding& finding : simt::findings()) CHECK(finding.kind == planted.kind);
  CHECK(message.find("ampere_faults.cu:" + std::to_string(K::ampere_fault_line())) != std::string::npos);
  CHECK(message.find(planted.says) != std::string::npos);
}

}  // namespace

TEST_SUITE_BEGIN("async");

TEST_CASE("mistakes with cp.async, ldmatrix and named barriers") {
  KeepOptions keep;
  simt::options() = {1, simt::Order::forward};
  for (const Planted& planted : kAmpere) {
    check_ampere<Observed>(planted);
    if (planted.in_any_build) check_ampere<Plain>(planted);
  }
  for (auto order : {simt::Order::forward, simt::Order::backward}) {
    simt::options() = {2, order};
    CHECK(ampere_message<Observed>(none) == "");
    for (const Planted& planted : kAmpere) CHECK(ampere_message<Observed>(planted.fault) != "");
  }
}

TEST_SUITE_END();
