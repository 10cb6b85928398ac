// The built command, driven as a user drives it.
#pragma once
#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

namespace flash::tests {
namespace fs = std::filesystem;

std::string contents(const fs::path& path);
void write(const std::string& path, const std::string& bytes);
bool contains(const std::string& text, const std::string& part);

// A folder of the test's own, removed at its end.
struct Folder {
  fs::path path;
  Folder();
  ~Folder();
  std::string operator/(const std::string& name) const { return (path / name).string(); }
};

struct Ran {
  int code;
  std::string out, err;
};

// Runs `flashsteps` with these arguments, as a shell takes them apart; `before`: commands of the shell that come first.
Ran flashsteps(const std::string& arguments, const std::string& before = "");

// The same without a shell, with Ctrl-C (SIGINT) or another signal after so many seconds.
Ran interrupted(const std::vector<std::string>& arguments, double seconds, int signal = SIGINT);

// Refused: exit code 2, one line on stderr with these words in it, nothing on stdout. `before` as above.
void expect_refused(const std::string& arguments, const std::vector<std::string>& words,
                    const std::string& before = "");

}  // namespace flash::tests
