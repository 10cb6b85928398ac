#include "fuzz/targets.h"

#include <CLI/CLI.hpp>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "cli/npy.h"
#include "cli/options.h"
#include "cli/values.h"
#include "harness/error.h"

namespace flash::tests {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

// One line that a user can be shown.
void require_line(const std::string& message) {
  require(!message.empty() && message.size() < 2000 + 100000, "a message");
}

}  // namespace

void read_any_npy(const std::string& bytes) {
  cli::Array4 array;
  try {
    array = cli::parse_npy("input.npy", bytes);
  } catch (const Error& e) {
    require_line(e.what());
    return;
  }
  const auto& n = array.shape;
  require(array.values.size() == n[0] * n[1] * n[2] * n[3], "as many values as the shape says");
  require(array.values.size() * 4 <= bytes.size(), "no more values than bytes");
  const cli::Array4 again = cli::parse_npy("again.npy", cli::npy_bytes({n[0], n[1], n[2], n[3]}, array.values));
  require(again.shape == n, "the same shape after writing and reading");
  for (size_t i = 0; i < array.values.size(); i++) {
    const float expected = float(array.values[i]), found = float(again.values[i]);
    require(expected == found || (expected != expected && found != found), "the same values after writing and reading");
  }
}

void parse_any_options(const std::string& bytes) {
  CLI::App app{"fuzz"};
  app.name("flashsteps");
  cli::StepOption steps;
  cli::ProblemOptions problem;
  cli::PassOption pass;
  cli::DeviceOption device;
  cli::FormatOption format;
  std::optional<std::string> values;
  CLI::App& check = *app.add_subcommand("check", "");
  steps.add_to(check);
  problem.add_shape_to(check);
  problem.add_rest_to(check);
  pass.add_to(check);
  device.add_to(check);
  format.add_to(check);
  check.add_option("--values", values, "");

  std::vector<std::string> words = {"flashsteps", "check"};
  std::istringstream lines(bytes);
  for (std::string line; words.size() < 40 && std::getline(lines, line);) words.push_back(line.c_str());
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  try {
    app.parse(int(argv.size()), argv.data());
    if (values) cli::values_named(*values);
    Problem start;
    const Problem p = problem.apply(start);
    validate(p);
    require(p.seed == problem.seed, "the seed");
    require(!pass.passes().empty(), "some pass");
    require(describe(p).size() < 1000, "a description");
    require(p.q_elements() <= uint64_t(1) << 50 && p.kv_elements() <= uint64_t(1) << 50, "sizes that can be counted");
    require(flops(p, Pass::backward) >= 0, "FLOPs");
    select_steps(steps.prefixes);
  } catch (const Error& e) {
    require_line(e.what());
  } catch (const CLI::Error& e) {
    require_line(std::string("?") + e.what());
  }
}

}  // namespace flash::tests
