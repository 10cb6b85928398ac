// `flashsteps profile`: what the executor counts is what the pages derive, by kernel and by line.
#include <doctest/doctest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "cli/verify.h"
#include "command.h"
#include "harness/closed_forms.h"
#include "harness/inputs.h"
#include "harness/registry.h"
#include "simt/executor.h"

TEST_SUITE_BEGIN("profile");

namespace {
using namespace flash;
using namespace flash::tests;

Problem problem(int B, int Hq, int Hkv, int Nq, int Nk, int D, bool causal) {
  Problem p;
  p.B = B, p.Hq = Hq, p.Hkv = Hkv, p.Nq = Nq, p.Nk = Nk, p.D = D, p.scale = default_scale(D), p.causal = causal;
  return p;
}

// Counters of one pass, by the name of the kernel.
std::map<std::string, simt::Counters> counted(const RegisteredStep& step, Pass pass, const Problem& p) {
  HostTensors tensors = random_tensors(p, 7);
  if (pass == Pass::backward) tensors.O = tensors.dO, tensors.LSE.assign(p.query_rows(), 1.0);
  run_step(cpu_device(), Target::cpu_observed, step, pass, p, tensors);
  std::map<std::string, simt::Counters> kernels;
  for (const auto& [name, counters] : simt::counters_by_kernel()) kernels[name.substr(0, name.find('<'))] += counters;
  return kernels;
}

}  // namespace

TEST_CASE("bytes of global memory are those of the pages' closed forms") {
  int compared = 0;
  for (const RegisteredStep& step : all_steps())
    for (Pass pass : {Pass::forward, Pass::backward})
      for (int D : {32, 64, 128, 256})
        for (Problem p : {problem(1, 2, 1, 140, 200, D, true), problem(1, 2, 2, 256, 256, D, false),
                          problem(2, 1, 1, 200, 140, D, true), problem(1, 1, 1, 70, 45, D, false)}) {
          if (D != 64 && p.B * p.Hq != 2) continue;  // other head dims: two of the shapes
          p.dtype = step.info().dtypes.front();
          if (!step.info().kv_heads) p.Hkv = p.Hq;
          p.deterministic = pass == Pass::backward && p.B == 2;
          if (step.id.substr(0, 2) == "02" && D > 64) continue;  // any D: two are enough
          if (!step.builds.count(Target::cpu_observed) || !step.has(pass) || why_unsupported(step, p, pass)) continue;
          const std::vector<KernelBytes> expected = closed_form(step, pass, p);
          INFO(step.id << ", " << describe(p));
          CHECK_MESSAGE(!expected.empty(), "no closed form: add it to closed_forms.cpp of the chapter");
          const auto kernels = counted(step, pass, p);
          CHECK(kernels.size() == expected.size());
          for (const KernelBytes& k : expected) {
            INFO(k.kernel);
            REQUIRE(kernels.count(k.kernel) == 1);
            const simt::Traffic& global = kernels.at(k.kernel).global;
            // Flags are asked as often as they must be: a few bytes, not always as many.
            CHECK(double(global.read_bytes) >= k.read);
            CHECK(double(global.write_bytes) >= k.written);
            CHECK(double(global.read_bytes) <= (k.beside_flags ? 1.01 : 1.0) * k.read);
            CHECK(double(global.write_bytes) <= (k.beside_flags ? 1.01 : 1.0) * k.written);
            compared++;
          }
        }
  CHECK(compared > 60);
}

TEST_CASE("with dropout they are met on the average") {
  Problem p = problem(1, 2, 2, 128, 128, 64, true);
  p.dropout = 0.25;
  const RegisteredStep& step = *select_steps({"02/forward"}).front();
  const auto kernels = counted(step, Pass::forward, p);
  for (const KernelBytes& k : closed_form(step, Pass::forward, p))
    CHECK(double(kernels.at(k.kernel).global.read_bytes) == doctest::Approx(k.read).epsilon(0.02));
}

TEST_CASE("shared memory is read and written without bank conflicts") {
  for (const RegisteredStep& step : all_steps())
    for (Pass pass : {Pass::forward, Pass::backward})
      for (int D : step.info().head_dims) {
        Problem p = problem(1, 1, 1, 128, 160, D, false);
        p.dtype = step.info().dtypes.front();
        if (step.id.substr(0, 2) < "03" || !step.builds.count(Target::cpu_observed) || !step.has(pass)) continue;
        for (const auto& [name, counters] : counted(step, pass, p)) {
          INFO(step.id << " " << name << ", " << describe(p));
          CHECK(counters.shared.transactions == counters.shared.ideal_transactions);
        }
      }
}

TEST_CASE("the command prints the counters by kernel and by line, and draws them") {
  const auto rows = nlohmann::json::parse(flashsteps("profile 03/shared --seq 64 --format json").out);
  REQUIRE(rows.size() == 3);
  const auto& scores = rows[0];
  CHECK(scores["kernel"] == "scores");
  // 2 heads of 64 x 64: 8 tiles, each 2 pieces of 2 x 32 x 32 floats; S is written once.
  CHECK(scores["global_read_bytes"] == 8 * 2 * 2 * 32 * 32 * 4);
  CHECK(scores["global_write_bytes"] == 2 * 64 * 64 * 4);
  CHECK(scores["ratio"] == 1.0);
  CHECK(scores["global_load_sectors"] == 8 * 2 * 2 * 32 * 4);  // 32 rows of 128 bytes a tile
  CHECK(scores["global_store_sectors"] == 8 * 32 * 4);
  CHECK(int(scores["global_load_sectors"]) + int(scores["global_store_sectors"]) == scores["global_ideal_sectors"]);
  CHECK(scores["block_barriers"] == 8 * 2 * 2);
  CHECK(scores["shared_memory_bytes"] == 4 * 32 * (32 + 33));
  CHECK(rows[1]["kernel"] == "softmax");
  CHECK(rows[1]["global_load_sectors"] > 2 * int(rows[1]["global_ideal_sectors"]));  // a thread a row
  CHECK(rows[0]["scratch_bytes"] == 2 * 2 * 64 * 64 * 4);

  const auto lines = nlohmann::json::parse(flashsteps("profile 02/forward --seq 64 --lines --format json").out);
  std::map<std::string, nlohmann::json> worst;  // of each kernel: its first row
  for (const auto& line : lines) worst.try_emplace(line["kernel"], line);
  CHECK(std::string(worst.at("scores")["text"]).find("dot +=") != std::string::npos);
  CHECK(worst.at("softmax")["memory"] == "global");
  CHECK(double(worst.at("softmax")["transactions"]) == 32 * double(worst.at("softmax")["requests"]));

  const Ran table = flashsteps("profile 05/forward --seq 64");
  CHECK(table.code == 0);
  CHECK(table.out.find("page MB") != std::string::npos);

  const Folder folder;
  CHECK(flashsteps("profile 03 --seq 64 --plot '" + (folder / "profile.svg") + "'").code == 0);
  const std::string drawn = contents(folder / "profile.svg");
  CHECK(drawn.find("<svg") == 0);
  CHECK(drawn.find("03_tiling/register_tiles, forward") != std::string::npos);
}

TEST_CASE("the command refuses what cannot be profiled, in one line") {
  expect_refused("profile 01", {"01_cpu_attention/attention", "plain C++"});
  expect_refused("profile 99", {"99"});
  expect_refused("profile 05/forward --head-dim 48", {"48", "32, 64, 128"});
  expect_refused("profile 05/forward --pass backward", {"pass"});
  expect_refused("profile 05 --format xml", {"xml", "table"});
  expect_refused("profile 05/forward --seq 8 --plot /nowhere/at/all.svg", {"/nowhere"});
}

TEST_SUITE_END();
