// A kernel that brings the program down says so in a line. Each crash is another process: this program once more, which
// a variable of the environment tells to crash.
#include <doctest/doctest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "command.h"
#include "simt_kernels/simt_kernels.h"

namespace {
using flash::Target;
using flash::tests::Folder;

constexpr char kWhat[] = "FLASHSTEPS_TEST_CRASH";

// Exit code and stderr of a process of its own that crashes in this way.
flash::tests::Ran crash(const std::string& what) {
  const Folder folder;
  const std::string command = std::string(kWhat) + "=" + what + " '" +
                              std::filesystem::read_symlink("/proc/self/exe").string() +
                              "' --no-skip -tc='a process that crashes' >" + folder / "out" + " 2>" + folder / "err";
  const int status = std::system(("exec env " + command).c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), "", flash::tests::contents(folder / "err")};
}

}  // namespace

TEST_SUITE_BEGIN("simt");

TEST_CASE("a process that crashes") {
  const char* given = std::getenv(kWhat);
  if (!given) return;
  const std::string what = given;
  int result = 0;
  if (what == "divide") simt_kernels::Kernels<Target::cpu>::divide(0, &result);
  if (what == "write") simt_kernels::Kernels<Target::cpu>::write_to(reinterpret_cast<int*>(64));
  volatile uintptr_t nowhere = 64;
  if (what == "outside") *reinterpret_cast<int*>(nowhere) = 1;
}

TEST_CASE(
    "an integer divided by zero, an access where no memory is: kernel, block and thread in one line, exit code 1") {
  const auto divided = crash("divide");
  CHECK(divided.code == 1);
  const std::string line = "flashsteps: dividing: block (";
  CHECK(divided.err.substr(0, line.size()) == line);
  CHECK(flash::tests::contains(divided.err, ",0,0), thread (37,0,0): an integer divided by zero\n"));
  const auto wrote = crash("write");
  CHECK(wrote.code == 1);
  CHECK(wrote.err ==
        "flashsteps: writing: block (0,0,0), thread (5,0,0): an access where no memory is; without --no-observe "
        "its line is found\n");
}

TEST_CASE("a crash outside of kernels is no kernel's") {
  const auto crashed = crash("outside");
  CHECK(crashed.code != 0);
  CHECK_FALSE(flash::tests::contains(crashed.err, "flashsteps: "));
}

TEST_SUITE_END();
