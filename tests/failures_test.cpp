// When things go wrong around the program: Ctrl-C, memory that is not there, a disk that is full, a driver that is
// missing. One clear line, the right exit code, nothing half-written, everything given back.
#include <doctest/doctest.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "cli/files.h"
#include "cli/npy.h"
#include "cli/values.h"
#include "cli/verify.h"
#include "command.h"
#include "harness/device.h"
#include "harness/error.h"
#include "harness/inputs.h"
#include "harness/interrupt.h"
#include "harness/runner.h"
#include "message_of.h"

TEST_SUITE_BEGIN("failures");

namespace {
using namespace flash;
using namespace flash::tests;
using namespace std::string_literals;

// The CPU device, which fails when it is told to, and remembers what was not given back.
class FailingDevice final : public Device {
 public:
  int allocations_left = 1000000;
  bool fails_to_run = false;
  std::map<void*, size_t> held;
  double most_held = 0;  // at a time, of what its memory takes

  DeviceKind kind() const override { return DeviceKind::cpu; }
  std::string name() const override { return "failing"; }
  size_t free_bytes() const override { return cpu_device().free_bytes(); }
  void* allocate(size_t bytes) override {
    if (allocations_left-- <= 0) throw Error("needs 7 MB of GPU memory, 3 MB are free; choose a smaller problem");
    void* memory = cpu_device().allocate(bytes);
    held[memory] = bytes;
    double all = 0;
    for (const auto& [array, size] : held) all += taken_bytes(double(size), false);
    most_held = std::max(most_held, all);
    return memory;
  }
  void release(void* memory) noexcept override {
    held.erase(memory);
    cpu_device().release(memory);
  }
  bool guards_intact(const void* memory) override { return cpu_device().guards_intact(memory); }
  void upload(void* to, const void* from, size_t bytes) override { cpu_device().upload(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { cpu_device().download(to, from, bytes); }
  void poison(void* memory, size_t bytes) override { cpu_device().poison(memory, bytes); }
  void synchronize() override {
    if (fails_to_run) throw KernelFault("running a kernel: unspecified launch failure");
  }
  std::vector<double> times_ms(int count, const std::function<void(int)>& work) override {
    return cpu_device().times_ms(count, work);
  }
};

Problem small() {
  Problem p;
  p.Hq = p.Hkv = 2, p.Nq = p.Nk = 20, p.D = 32, p.scale = default_scale(32);
  return p;
}

int lines(const std::string& text) { return int(std::count(text.begin(), text.end(), '\n')); }

}  // namespace

TEST_CASE("device memory that runs out at any allocation: the array is named, and all that was taken is given back") {
  for (const char* prefix : {"02/forward", "02/backward", "06/backward"}) {
    const RegisteredStep& step = *select_steps({prefix}).front();
    const Pass pass = step.has(Pass::forward) ? Pass::forward : Pass::backward;
    HostTensors inputs = random_tensors(small(), 1);
    inputs.O = inputs.dO, inputs.LSE.assign(small().query_rows(), 3.0);
    FailingDevice device;
    const int before = device.allocations_left;
    run_step(device, Target::cpu, step, pass, small(), inputs);
    const int needed = before - device.allocations_left;
    CHECK(needed >= 7);
    CHECK(device.held.empty());
    for (int allowed = 0; allowed < needed; allowed++) {
      device.allocations_left = allowed;
      std::string message;
      try {
        run_step(device, Target::cpu, step, pass, small(), inputs);
      } catch (const Error& e) {
        message = e.what();
      }
      CHECK(contains(message, ": needs 7 MB of GPU memory, 3 MB are free"));
      CHECK(device.held.empty());
    }
  }
}

TEST_CASE("what a pass is said to need of a device's memory is what it holds") {
  for (const char* prefix :
       {"01", "02/forward", "02/backward", "04/three", "05/algo", "06/backward", "07/split_q", "07/backward", "08/fp8"})
    for (const RegisteredStep* step : select_steps({prefix}))
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        Problem p = small();
        p.D = 64;
        p.dtype = step->info().dtypes.front();
        if (!step->has(pass)) continue;
        INFO(step->id << " " << int(pass));
        HostTensors inputs = random_tensors(p, 1);
        inputs.O = inputs.dO, inputs.LSE.assign(p.query_rows(), 3.0);
        FailingDevice device;
        const Target target = *target_for(*step, DeviceKind::cpu, false);
        run_step(device, target, *step, pass, p, inputs);
        CHECK(device.most_held == memory_needed(device, target, *step, pass, p));
      }
}

TEST_CASE("a kernel that ends the device's work is a failure with its reason, and memory is given back") {
  const RegisteredStep& step = *select_steps({"05/forward"}).front();
  FailingDevice device;
  device.fails_to_run = true;
  const cli::Outcome outcome = cli::verify(device, Target::cpu, step, Pass::forward, cli::Question(small(), false));
  CHECK(!outcome.pass);
  CHECK(contains(outcome.fault, "unspecified launch failure"));
  CHECK(device.held.empty());
}

TEST_CASE("work that is interrupted ends, wherever it is, and gives memory back") {
  const RegisteredStep& step = *select_steps({"05/forward"}).front();
  FailingDevice device;
  interrupt_requested = true;
  CHECK_THROWS_AS(run_step(device, Target::cpu, step, Pass::forward, small(), random_tensors(small(), 1)), Interrupted);
  CHECK(device.held.empty());
  CHECK_THROWS_AS(cli::Question(small(), true), Interrupted);
  interrupt_requested = false;
  CHECK(cli::verify(device, Target::cpu, step, Pass::forward, cli::Question(small(), false)).pass);
}

#ifdef FLASHSTEPS_FAKE_DRIVER
TEST_CASE("a driver that is too old, finds no GPU, or is not ready: a line each, and the CPU is offered") {
  const auto refused = [](const std::string& driver, const std::vector<std::string>& words) {
    INFO(driver);
    const Ran ran =
        flashsteps("check 05 --device gpu --seq 5", driver + " LD_LIBRARY_PATH='" FLASHSTEPS_FAKE_DRIVER "' ");
    CHECK(ran.code == 2);
    CHECK(ran.out == "");
    CHECK(lines(ran.err) == 1);
    for (const std::string& word : words) CHECK_MESSAGE(contains(ran.err, word), word << " in " << ran.err);
    CHECK(contains(ran.err, "--device cpu runs the same kernels"));
  };
  refused("FAKE_DRIVER_VERSION=9020", {"driver is for CUDA 9.2", "update the driver"});
  refused("FAKE_DRIVER_INIT=100", {"there is no NVIDIA GPU here"});
  refused("FAKE_DRIVER_INIT=802", {"the GPU cannot be used", "not yet initialized"});
  const Ran automatic =
      flashsteps("check 05/forward --seq 5", "FAKE_DRIVER_INIT=100 LD_LIBRARY_PATH='" FLASHSTEPS_FAKE_DRIVER "' ");
  CHECK(automatic.code == 0);
  CHECK(contains(automatic.out, "CPU executor"));
}
#endif

TEST_CASE("Ctrl-C: one line, exit code 130, nothing written") {
  const Folder folder;
  const std::vector<std::vector<std::string>> commands = {
      {"check", "--random", "1000000", "--device", "cpu"},
      {"check", "02", "--device", "cpu", "--seq", "3000"},  // in the middle of one problem
      {"check", "01", "--seq", "20000"},                    // in the oracle
      {"profile", "05/forward", "--seq", "3000", "--plot", folder / "plot.svg"},
  };
  for (const auto& arguments : commands) {
    INFO(arguments[0] << " " << arguments[1]);
    const Ran ran = interrupted(arguments, 1.5);
    CHECK(ran.code == 130);
    CHECK(ran.out == "");
    CHECK(ran.err == "flashsteps: interrupted; nothing was written\n");
  }
  CHECK(fs::is_empty(folder.path));
}

TEST_CASE("Ctrl-C is answered in every phase: inputs, device memory, their formats, the reference, verdicts") {
  Problem p = small();
  p.Nq = p.Nk = 3000;
  const HostTensors inputs = random_tensors(p, 1);
  const std::vector<std::byte> bytes = encode(DType::bf16, inputs.Q);
  const reference::Oracle oracle(small(), random_tensors(small(), 1));
  const std::vector<double> O = oracle.O();
  void* memory = cpu_device().allocate(bytes.size());
  std::vector<std::byte> fetched(bytes.size());
  interrupt_requested = true;
  CHECK_THROWS_AS(normal_numbers(1000, 1, 1, DType::fp32), Interrupted);
  CHECK_THROWS_AS(cli::tensors_of(p, 1, cli::Values::huge), Interrupted);
  CHECK_THROWS_AS(encode(DType::bf16, inputs.Q), Interrupted);
  CHECK_THROWS_AS(decode(DType::bf16, bytes), Interrupted);
  CHECK_THROWS_AS(cpu_device().allocate(1000), Interrupted);
  CHECK_THROWS_AS(cpu_device().upload(memory, bytes.data(), bytes.size()), Interrupted);
  CHECK_THROWS_AS(cpu_device().download(fetched.data(), memory, bytes.size()), Interrupted);
  CHECK_THROWS_AS(cpu_device().poison(memory, bytes.size()), Interrupted);
  CHECK_THROWS_AS(reference::attention<double>(p, inputs), Interrupted);
  CHECK_THROWS_AS(oracle.O(), Interrupted);
  CHECK_THROWS_AS(oracle.judge_O(O), Interrupted);
  interrupt_requested = false;
  CHECK(oracle.judge_O(O).pass);
  cpu_device().release(memory);
}

TEST_CASE("Ctrl-C ends long work, whatever it is at") {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"accuracy", "--device", "cpu", "--seq", "400000"},
        std::vector<std::string>{"check", "05/forward", "--device", "cpu", "--seq", "400000", "--sample", "2"},
        std::vector<std::string>{"profile", "02/forward", "--seq", "6000"}})
    for (const double seconds : {0.3, 2.5}) {
      INFO(arguments[0] << " after " << seconds);
      const Ran ran = interrupted(arguments, seconds);
      CHECK(ran.code == 130);
    }
}

TEST_CASE("kill and a closed terminal end it as Ctrl-C does, with the signal's exit code and name") {
  for (const auto& [signal, name] : {std::pair(SIGTERM, "SIGTERM"), std::pair(SIGHUP, "SIGHUP")}) {
    const Ran ran = interrupted({"check", "--random", "1000000", "--device", "cpu"}, 1, signal);
    CHECK(ran.code == 128 + signal);
    CHECK(ran.out == "");
    CHECK(ran.err == "flashsteps: interrupted by "s + name + "; nothing was written\n");
  }
  // Not under nohup.
  CHECK(std::system("trap '' HUP; '" FLASHSTEPS_COMMAND "' check 01 --seq 400 --device cpu >/dev/null & "
                    "sleep 0.3; kill -HUP $! && wait $!") == 0);
  // A second one ends it at once, whichever it is: here in the middle of a thread block that takes minutes.
  const int twice = std::system("'" FLASHSTEPS_COMMAND
                                "' check 05/algorithm1 --seq 20000 --sample 2 --no-observe "
                                "--device cpu >/dev/null 2>&1 & "
                                "sleep 1; kill -TERM $!; sleep 0.3; kill -HUP $!; wait $!");
  CHECK((WEXITSTATUS(twice) == 129 || WEXITSTATUS(twice) == 143));  // 143: the first was answered before
}

TEST_CASE("an end that is asked for while files are written leaves nothing behind") {
  const Folder folder;
  write(folder / "old", "old");
  interrupt_requested = true;
  CHECK_THROWS_AS(cli::write_files({{folder / "old", "new"}, {folder / "made/in/a", "a"}}, folder / "made/in"),
                  Interrupted);
  interrupt_requested = false;
  CHECK(contents(folder / "old") == "old");
  CHECK(std::distance(fs::directory_iterator(folder.path), fs::directory_iterator{}) == 1);
}

TEST_CASE("of several files all are replaced or none, and folders that were made for them go again") {
  const Folder folder;
  write(folder / "a", "old a");
  fs::permissions(folder.path / "a", fs::perms(0600));
  // A name that no file can have: seen only when the others have been moved to their places.
  const std::string impossible = folder / std::string(300, 'x');
  const auto refused = [&](const std::vector<cli::OutputFile>& files, const fs::path& made = {}) {
    CHECK(contains(message_of([&] { cli::write_files(files, made); }), "cannot be written"));
    CHECK(contents(folder / "a") == "old a");
    CHECK(fs::status(folder.path / "a").permissions() == fs::perms(0600));
    CHECK(std::distance(fs::directory_iterator(folder.path), fs::directory_iterator{}) == 1);
  };
  refused({{folder / "a", "new a"}, {folder / "b", "new b"}, {impossible, "x"}});
  refused({{folder / "a", "new a"}, {impossible, "x"}, {folder / "b", "new b"}});
  refused({{folder / "made/in/b", "b"}, {impossible, "x"}}, folder / "made/in");
  cli::write_files({{folder / "a", "new a"}, {folder / "made/in/b", "b"}}, folder / "made/in");
  CHECK(contents(folder / "a") == "new a");
  CHECK(contents(folder / "made/in/b") == "b");
  CHECK(std::distance(fs::directory_iterator(folder.path), fs::directory_iterator{}) == 2);
}

TEST_CASE("a new file has the permissions that the umask leaves, another's place keeps that one's") {
  const Folder folder;
  const auto mode = [&](const char* name) { return int(fs::status(folder.path / name).permissions()); };
  const auto plot = [&](const char* before, const char* name) {
    CHECK(flashsteps("profile 05/forward --seq 8 --plot '" + (folder / name) + "'", before).code == 0);
    return mode(name);
  };
  CHECK(plot("umask 077; ", "private.svg") == 0600);
  CHECK(plot("umask 002; ", "group.svg") == 0664);
  fs::permissions(folder.path / "group.svg", fs::perms(0640));
  CHECK(plot("umask 000; ", "group.svg") == 0640);
}

TEST_CASE("host memory that is not there is refused with figures, before it is asked for") {
  expect_refused("profile 05 --seq 100000000", {"GB of memory", "GB are free"});
  const size_t rows = cpu_device().free_bytes() / 80 / 128;  // their arrays have room, the oracle's answers have not
  expect_refused("check 05/forward --device cpu --no-observe --seq " + std::to_string(rows),
                 {"checking B 1, heads 2", "GB of host memory", "GB are free", "--sample"});
  // Before the oracle has worked for minutes, which would end the command, and with a way out.
  const std::string seconds_of_work = "ulimit -t 10; ";
  for (const char* step : {"02/forward", "02/backward", "03/shared", "04/three", "01"})
    for (const char* how : {"", " --sample 2"})
      expect_refused(std::string("check --device cpu --heads 8 --seq 200000 ") + step + how,
                     {"GB of memory for B 1, heads 8, seq 200000", "GB are free; choose a smaller problem",
                      "or a step whose memory grows with N, not N x N (05 and later"},
                     seconds_of_work);
  expect_refused("profile 02/forward --seq 200000",
                 {"GB of memory", "GB are free; choose a smaller problem, or a step"}, seconds_of_work);
  expect_refused("check 05/forward --device cpu --seq 20000000 --sample 2", {"GB are free; choose a smaller problem\n"},
                 seconds_of_work);
  // More bytes than 64 bits can count.
  for (const char* step : {"01", "02/forward", "02/backward", "03/shared", "04/three"})
    expect_refused(
        std::string("check --device cpu --heads 4 --seq 1073741824 --head-dim 32 --sample 2 ") + step,
        {"S and P may have at most 2^59 elements; choose a smaller problem, or a step whose memory grows with N"});
}

TEST_CASE("accuracy and run count what they hold, and refuse it before they begin") {
  expect_refused("accuracy --device cpu --seq 8000000",
                 {"accuracy of B 1, heads 2, seq 8000000, head dim 128 needs about", "GB of host memory, "});
  // Files without their data, and a Q that could be held seven times but not nine.
  const Folder folder;
  for (const char* name : {"q.npy", "k.npy", "v.npy"}) {
    const size_t rows = name == "q.npy"s ? cpu_device().free_bytes() * 2 / 15 / 256 : 7;
    const std::string header = cli::npy_bytes({1, 1, rows, 64}, {});
    write(folder / name, header);
    fs::resize_file(folder / name, header.size() + rows * 64 * 4);
  }
  expect_refused("run 05/forward --device cpu --q '" + (folder / "q.npy") + "' --k '" + (folder / "k.npy") + "' --v '" +
                     (folder / "v.npy") + "' --out '" + (folder / "out") + "'",
                 {"05_kernel_fusion/forward on these files", "GB of host memory", "GB are free; use smaller ones"});
}

TEST_CASE("under a limit of the address space a command works or says in a line that memory is out") {
  int refused = 0, worked = 0;
  const auto least = 2 * fs::file_size(FLASHSTEPS_COMMAND) >> 20;  // with less the system cannot start the program
  for (const unsigned megabytes : {60, 120, 200, 300, 500, 900, 1500, 8000}) {
    if (megabytes < least) continue;
    const Ran ran = flashsteps("check 02 05/forward --device cpu --seq 600 --no-observe",
                               "ulimit -v " + std::to_string(megabytes * 1024) + "; ");
    INFO(megabytes << " MB: exit code " << ran.code << ", " << ran.err);
    if (ran.code == 0) {
      worked++;
      continue;
    }
    if (ran.code == 127) continue;  // the program itself did not fit
    CHECK(ran.code == 2);
    CHECK(lines(ran.err) == 1);
    CHECK(contains(ran.err, "memory"));
    CHECK(ran.out == "");
    refused++;
  }
  CHECK(worked > 0);
  CHECK(refused > 0);
}

TEST_CASE("a full disk: what was there before stays, and nothing half-written lies about") {
  const Folder folder;
  const std::string plot = folder / "plot.svg";
  const auto profile = [&](const char* before, const char* steps) {
    const std::string line = std::string(before) + "'" FLASHSTEPS_COMMAND "' profile " + steps + " --seq 8 --plot '" +
                             plot + "' >/dev/null 2>/dev/null";
    const int status = std::system(line.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  REQUIRE(profile("", "02 03 04 05 06") == 0);
  const std::string before = contents(plot);
  REQUIRE(before.size() > 1024);
  // As if the disk were full after a block; the program is not told to ignore the signal that comes with it.
  CHECK(profile("ulimit -f 1; ", "02 03 04 06 05") == 2);
  CHECK(contents(plot) == before);
  CHECK(std::distance(fs::directory_iterator(folder.path), fs::directory_iterator{}) == 1);
}

TEST_CASE("every command says so when its standard output is full") {
  if (!fs::exists("/dev/full")) return;
  for (const char* arguments : {"list", "tour --device cpu", "check 05/forward --device cpu --seq 8",
                                "profile 05/forward --seq 8 --format csv", "--help"}) {
    INFO(std::string(arguments));
    const int status =
        std::system((std::string("'" FLASHSTEPS_COMMAND "' ") + arguments + " >/dev/full 2>/dev/null").c_str());
    CHECK(WEXITSTATUS(status) == 2);
  }
}

TEST_CASE("empty and half numbers are no numbers") {
  for (const char* option : {"--seq", "--seq-k", "--heads", "--kv-heads", "--batch", "--head-dim", "--scale",
                             "--dropout", "--seed", "--sample", "--random"})
    for (const char* value : {"''", "5x", "' 5'", "0x10", "--", "1e"}) {
      const std::string arguments = std::string("check 02 --device cpu ") + option + "=" + value;
      INFO(arguments);
      const Ran ran = flashsteps(arguments);
      CHECK(ran.code == 2);
      CHECK(contains(ran.err, option));
      CHECK(lines(ran.err) == 1);
    }
  for (const char* option : {"--seq", "--scale"}) expect_refused(std::string("check 02 ") + option + " ''", {option});
  expect_refused("check 02 --dtype ''", {"--dtype"});
  expect_refused("check 02 --values ''", {"--values"});
  CHECK(flashsteps("check 02 --device cpu --seq +9 --scale +1.5").code == 0);
}

TEST_CASE("profile: a problem that launches nothing has a row, too") {
  const Ran csv = flashsteps("profile 05/forward --seq 0 --format csv");
  CHECK(csv.code == 0);
  CHECK(lines(csv.out) == 2);
  CHECK(contains(csv.out, "nothing to do"));
  CHECK(contains(flashsteps("profile 02 --seq 0").out, "nothing to do"));
  CHECK(flashsteps("profile 02 --seq 0 --lines").code == 0);
}

TEST_CASE("a program that was stripped of its symbols is not observed, and runs") {
  const Folder folder;
  const std::string stripped = folder / "flashsteps";
  // In the place of the command as built, which becomes the shell's $0.
  const std::string before =
      "strip -o '"s + stripped + "' '" + FLASHSTEPS_COMMAND + "' && sh -c '\"" + stripped + "\" \"$@\"' ";
  expect_refused("check 03/shared_tiles --seq 20 --device cpu", {"no symbol table", "do not strip it"}, before);
  expect_refused("profile 03/shared_tiles --seq 20", {"no symbol table"}, before);
  CHECK(flashsteps("check 03/shared_tiles --seq 20 --device cpu --no-observe", before).code == 0);
}

TEST_SUITE_END();
