// Runs all kernels, one after the other and again, for some minutes at full rate, and looks at what must not change:
// every result has the same bits as the first time, and memory, the device's and the host's, does not grow.
//
//     build/tests/soak MINUTES [--device gpu|cpu] [--seq N]
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

// All that run on the device: each dtype and pass, causal, the second head dim where there is one.
std::vector<Case> cases(DeviceKind device, int seq) {
  std::vector<Case> all;
  for (const RegisteredStep& step : all_steps())
    for (const Pass pass : {Pass::forward, Pass::backward})
      for (const DType dtype : step.info().dtypes) {
        Problem p;
        p.B = 2, p.Hq = p.Hkv = 4, p.Nq = p.Nk = seq, p.dtype = dtype;
        p.scale = default_scale(p.D);
        p.causal = true, p.deterministic = true;  // atomics may add up in another order each time
        p.dropout = step.info().dropout ? 0.1 : 0;
        if (!step.has(pass) || step.builds.count(Target::host) || !target_for(step, device, false)) continue;
        if (why_unsupported(step, p, pass)) continue;
        all.push_back({&step, pass, p, random_tensors(p, 1)});
      }
  return all;
}

int soak(double minutes, Device& device, int seq, int launches) {
  std::vector<Case> all = cases(device.kind(), seq);
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
  size_t rounds = 0, launched = 0, different = 0, free_at_first = 0, resident_at_first = 0;
  size_t least_free = 0, most_resident = 0;
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
    const size_t free = device.free_bytes(), resident = resident_bytes();
    if (rounds == 2) {  // the first round loads code and fills pools
      free_at_first = least_free = free;
      resident_at_first = most_resident = resident;
    }
    least_free = std::min(least_free, free);
    most_resident = std::max(most_resident, resident);
  } while (elapsed() < minutes || rounds < 3);

  const double device_grew = (double(free_at_first) - double(least_free)) / 1e6;
  const double host_grew = (double(most_resident) - double(resident_at_first)) / 1e6;
  // The CPU device's free memory is the machine's, of which others take and give back.
  const bool flat = host_grew < 64 && (device.kind() == DeviceKind::cpu || device_grew < 4);
  std::printf(
      "%zu kernels, %zu rounds, %zu launches in %.2f minutes; results that differed: %zu; memory grew by %.1f MB "
      "on the device, %.1f MB on the host (%.0f MB resident): %s\n",
      all.size(), rounds, launched, elapsed(), different, device_grew, host_grew, double(most_resident) / 1e6,
      different == 0 && flat ? "ok" : "FAILED");
  return different == 0 && flat ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Runs all kernels for some minutes: results keep their bits, memory does not grow."};
  double minutes = 1;
  cli::DeviceOption device;
  int seq = 0, launches = 0;
  app.add_option("MINUTES", minutes, "How long")->required();
  device.add_to(app);
  app.add_option("--seq", seq, "Sequence length; default 1000 on a GPU, 40 on the CPU");
  app.add_option("--launches", launches, "Launches between two looks at the result; default 40 on a GPU, 1 on the CPU");
  CLI11_PARSE(app, argc, argv);
  try {
    const cli::ChosenDevice chosen = cli::choose_device(device.choice);
    const bool gpu = chosen.device->kind() == DeviceKind::gpu;
    std::cout << chosen.sentence << std::endl;
    return soak(minutes, *chosen.device, seq > 0 ? seq : gpu ? 1000 : 40, launches > 0 ? launches : gpu ? 40 : 1);
  } catch (const std::exception& e) {
    std::cerr << "soak: " << e.what() << "\n";
    return 2;
  }
}
