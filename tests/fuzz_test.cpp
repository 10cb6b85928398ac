// What the fuzzers found worth keeping, read once more. (tests/fuzz/README.md says how they are run.)
#include <doctest/doctest.h>

#include "command.h"
#include "fuzz/targets.h"

TEST_SUITE_BEGIN("fuzz");

namespace {
using namespace flash::tests;

int replay(const std::string& corpus, void (*target)(const std::string&)) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(FLASHSTEPS_TEST_DATA).parent_path() / "fuzz" / corpus)) {
    INFO(entry.path().string());
    CHECK_NOTHROW(target(contents(entry.path())));
    count++;
  }
  return count;
}

}  // namespace

TEST_CASE("the corpus of the .npy reader") { CHECK(replay("npy", read_any_npy) > 50); }

TEST_CASE("the corpus of the option parser") { CHECK(replay("options", parse_any_options) > 50); }

TEST_SUITE_END();
