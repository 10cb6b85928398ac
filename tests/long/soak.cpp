// Runs all kernels, one after the other and again, for some minutes at full rate, and looks at what must not change:
// every result has the same bits as the first time, and memory, the device's and the host's, does not grow.
//
//     build/tests/soak MINUTES [STEP ...] [--device gpu|cpu] [--seq N] [--launches N] [--rounds N] …
#include <malloc.h>
#include <unistd.h>
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>

#include "cli/options.h"
#include "cli/verify.h"
#include "harness/error.h"
#include "harness/inputs.h"
#include "harness/runner.h"

namespace {
using namespace flash;

// One pass of one step on one problem, with what came of it the first time.
struct Case {
  const RegisteredStep* step;
  Pass pass;
  Problem problem;
  HostTensors inputs;
  uint64_t first = 0;
  bool known = false;
};

// A number that changes with any bit of any result. (FNV-1a over 64-bit words)
uint64_t fingerprint(const HostTensors& t) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const auto* x : {&t.O, &t.LSE, &t.dQ, &t.dK, &t.dV})
    for (const double value : *x) {
      uint64_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      hash = (hash ^ bits) * 0x100000001b3;
    }
  return hash;
}

size_t resident_bytes() {
  size_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * size_t(sysconf(_SC_PAGESIZE));
}

// What the program holds on the heap, to the byte.
size_t heap_bytes() {
#if __GLIBC_PREREQ(2, 33)
  const struct mallinfo2 heap = mallinfo2();
  return heap.uordblks + heap.hblkhd;
#else
  const struct mallinfo heap = mallinfo();  // counts to 2³²
  return size_t(unsigned(heap.uordblks)) + unsigned(heap.hblkhd);
#endif
}

// What is taken of the device's memory, up to a constant. The CPU device's is on the heap: its free bytes are the
// machine's, of which others take and give back.
double taken_bytes(const Device& device) {
  return device.kind() == DeviceKind::gpu ? -double(device.free_bytes()) : double(heap_bytes());
}

struct Options {
  std::optional<double> given_minutes;
  cli::StepOption steps;
  cli::ProblemOptions problem;
  cli::PassOption pass;
  cli::DeviceOption device;
  std::optional<int> launches, rounds;
};

// All that run on the device: each pass in each precision, causal, with dropout where there is any.
std::vector<Case> cases(DeviceKind device, const Options& o) {
  std::vector<Case> all;
  for (const RegisteredStep* step : select_steps(o.steps.prefixes))
    for (const Pass pass : o.pass.passes())
      for (const DType dtype : step->info().dtypes) {
        Problem p;
        p.B = 2, p.Hq = p.Hkv = 4, p.Nq = p.Nk = device == DeviceKind::gpu ? 1000 : 40, p.dtype = dtype;
        p.scale = default_scale(p.D);
        p.causal = true, p.deterministic = true;  // atomics may add up in another order each time
        p.dropout = step->info().dropout ? 0.1 : 0;
        p = o.problem.apply(p);
        if (p.dtype != dtype || !step->has(pass) || step->builds.count(Target::host)) continue;
        if (!target_for(*step, device, false) || why_unsupported(*step, p, pass)) continue;
        all.push_back({step, pass, p, random_tensors(p, 1)});
      }
  if (all.empty()) throw Error("no step runs such a problem on this device");
  return all;
}

int soak(const Options& o, Device& device) {
  const int launches = o.launches.value_or(device.kind() == DeviceKind::gpu ? 40 : 1);
  const size_t least_rounds = size_t(o.rounds.value_or(3));
  std::vector<Case> all = cases(device.kind(), o);
  for (Case& one : all) {
    if (one.pass == Pass::forward || forward_of(*one.step)) continue;
    const RegisteredStep& forward = cli::forward_before(*one.step, one.problem, device.kind());
    const HostTensors made =
        run_step(device, *target_for(forward, device.kind(), false), forward, Pass::forward, one.problem, one.inputs)
            .tensors;
    one.inputs.O = made.O, one.inputs.LSE = made.LSE;
  }

  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / 60;
  };
  size_t rounds = 0, launched = 0, different = 0, resident_at_first = 0, most_resident = 0;
  double taken_at_first = 0, most_taken = 0;
  do {
    for (Case& one : all) {
      const PreparedStep prepared(device, *target_for(*one.step, device.kind(), false), *one.step, one.pass,
                                  one.problem, one.inputs);
      for (int i = 0; i < launches; i++) prepared.launch();
      launched += size_t(launches);
      const uint64_t now = fingerprint(prepared.finish());
      if (!one.known) one.first = now, one.known = true;
      if (one.first == now) continue;
      if (different++ < 10)
        std::cout << "DIFFERENT in round " << rounds << ": " << one.step->id << ", " << describe(one.problem) << "\n";
    }
    rounds++;
    const double taken = taken_bytes(device);
    const size_t resident = resident_bytes();
    if (rounds == 2) {  // the first round loads code and fills pools
      taken_at_first = most_taken = taken;
      resident_at_first = most_resident = resident;
    }
    most_taken = std::max(most_taken, taken);
    most_resident = std::max(most_resident, resident);
  } while (elapsed() < *o.given_minutes || rounds < least_rounds);

  const double device_grew = (most_taken - taken_at_first) / 1e6;
  const double host_grew = (double(most_resident) - double(resident_at_first)) / 1e6;
  const bool flat = host_grew < 64 && device_grew < (device.kind() == DeviceKind::gpu ? 4 : 0.5);
  std::printf(
      "%zu kernels, %zu rounds, %zu launches in %.2f minutes; results that differed: %zu; memory grew by %.2f MB "
      "on the device, %.1f MB on the host (%.0f MB resident): %s\n",
      all.size(), rounds, launched, elapsed(), different, device_grew, host_grew, double(most_resident) / 1e6,
      different == 0 && flat ? "ok" : "FAILED");
  return different == 0 && flat ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Runs all kernels for some minutes: results keep their bits, memory does not grow."};
  Options o;
  cli::add_number(app, "MINUTES", o.given_minutes, "How long", cli::Bounds<double>{0, 24 * 60})->required();
  o.steps.add_to(app);
  o.device.add_to(app);
  o.problem.add_shape_to(app);
  o.problem.add_rest_to(app);
  o.pass.add_to(app);
  cli::add_number(app, "--launches", o.launches, "Launches between two looks at a result; 40 on a GPU, 1 on the CPU",
                  cli::Bounds<int>{1, 1000000});
  cli::add_number(app, "--rounds", o.rounds, "Rounds over all kernels at least; 3", cli::Bounds<int>{3, 1000000});
  try {
    app.parse(argc, argv);
    const cli::ChosenDevice chosen = cli::choose_device(o.device.choice);
    std::cout << chosen.sentence << std::endl;
    return soak(o, *chosen.device);
  } catch (const CLI::CallForHelp& e) {
    return app.exit(e);
  } catch (const KernelFault& e) {
    std::cerr << "soak: " << e.what() << "\n";
    return 1;
  } catch (const std::exception& e) {
    std::cerr << "soak: " << e.what() << "\n";
    return 2;
  }
}
