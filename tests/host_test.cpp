// The command without its kernels: what a build with sanitizers runs, since they do not follow the executor's fibers.
#include <doctest/doctest.h>

#include <cstring>

#include "cli/npy.h"
#include "command.h"

TEST_SUITE_BEGIN("host");

namespace {
using namespace flash;
using namespace flash::tests;

void write_array(const std::string& path, const std::vector<size_t>& shape) {
  size_t count = 1;
  for (size_t n : shape) count *= n;
  std::vector<double> values;
  for (size_t i = 0; i < count; i++) values.push_back(double(i % 7) - 3);
  write(path, cli::npy_bytes(shape, values));
}

}  // namespace

TEST_CASE("check, list and bench of chapter 01") {
  CHECK(flashsteps("list 01 --format json").code == 0);
  CHECK(flashsteps("list 01 --format csv").code == 0);
  CHECK(flashsteps("list 01").code == 0);
  CHECK(flashsteps("check 01 --seq 40 --seq-k 30 --causal --format json").code == 0);
  CHECK(flashsteps("check 01 --seq 200 --sample 20 --format csv").code == 0);
  CHECK(flashsteps("check 01 --random 12 --seed 8").code == 0);
  CHECK(flashsteps("--help").code == 0);
  expect_refused("bench 01", {"GPU"});
  expect_refused("profile 01", {"no kernels"});
}

TEST_CASE("run: arrays in, arrays out") {
  const Folder folder;
  write_array(folder / "q.npy", {2, 2, 5, 8});
  write_array(folder / "k.npy", {2, 2, 7, 8});
  write_array(folder / "v.npy", {2, 2, 7, 8});
  write_array(folder / "do.npy", {2, 2, 5, 8});
  const std::string command = "run 01 --q '" + (folder / "q.npy") + "' --k '" + (folder / "k.npy") + "' --v '" +
                              (folder / "v.npy") + "' --out '" + (folder / "out") + "' ";
  CHECK(flashsteps(command).code == 0);
  CHECK(flashsteps(command + "--grad-out '" + (folder / "do.npy") + "' --causal --dtype fp64 --scale=-0.5").code == 0);
  const cli::Array4 dK = cli::read_npy(folder / "out/dk.npy");
  CHECK(dK.shape == std::array<size_t, 4>{2, 2, 7, 8});
  const std::string whole = contents(folder / "q.npy");
  for (size_t cut = 0; cut < whole.size(); cut += 60) {
    write(folder / "q.npy", whole.substr(0, cut));
    expect_refused(command, {"q.npy"});
  }
}

TEST_CASE("bad options") {
  for (const char* arguments :
       {"fly", "check 77", "check --seq", "check 01 --seq 5 --dtype fp12", "check 01 --heads 3 --kv-heads 2",
        "check 01 --scale x", "check 01 --format xml", "check 01 --device abacus", "check 01 --values wild",
        "check 01 --random 0", "check 01 --seed -1", "list 77", "run 01"})
    expect_refused(arguments, {});
}

TEST_SUITE_END();
