#include "command.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

namespace flash::tests {

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

Folder::Folder() {
  std::string name = (fs::temp_directory_path() / "flashsteps_XXXXXX").string();
  REQUIRE(mkdtemp(name.data()) != nullptr);
  path = name;
}

Folder::~Folder() { fs::remove_all(path); }

Ran flashsteps(const std::string& arguments, const std::string& before) {
  const Folder folder;
  const std::string line = before + "'" + FLASHSTEPS_COMMAND + "' " + arguments + " >'" + (folder / "out") + "' 2>'" +
                           (folder / "err") + "' </dev/null";
  const int status = std::system(line.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents(folder / "out"), contents(folder / "err")};
}

Ran interrupted(const std::vector<std::string>& arguments, double seconds, int signal) {
  const Folder folder;
  const std::string out = folder / "out", err = folder / "err";
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::vector<const char*> argv = {FLASHSTEPS_COMMAND};
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    argv.push_back(nullptr);
    std::signal(signal, SIG_DFL);
    if (!std::freopen(out.c_str(), "w", stdout) || !std::freopen(err.c_str(), "w", stderr)) _exit(99);
    execv(argv[0], const_cast<char**>(argv.data()));
    _exit(99);
  }
  usleep(useconds_t(seconds * 1e6));
  kill(child, signal);
  int status = 0;
  for (int tenths = 0; waitpid(child, &status, WNOHANG) == 0; tenths++) {
    if (tenths == 600) kill(child, SIGKILL);  // a minute is more than it may take
    usleep(100000);
  }
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents(out), contents(err)};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void expect_refused(const std::string& arguments, const std::vector<std::string>& words, const std::string& before) {
  INFO("flashsteps " << arguments);
  const Ran ran = flashsteps(arguments, before);
  CHECK(ran.code == 2);
  CHECK(ran.out == "");
  INFO(ran.err);
  CHECK(std::count(ran.err.begin(), ran.err.end(), '\n') == 1);
  for (const std::string& word : words) CHECK_MESSAGE(contains(ran.err, word), word);
}

}  // namespace flash::tests
