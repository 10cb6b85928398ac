#include "cli/files.h"

#include <unistd.h>

#include <fstream>
#include <utility>

#include "harness/error.h"

namespace flash::cli {
namespace {

namespace fs = std::filesystem;

// A file on its way: written beside its place under a name that nobody has, moved when all are complete, removed if
// not.
class Pending {
 public:
  explicit Pending(const OutputFile& file) : place_(file.path) {
    std::error_code ignored;
    if (fs::is_symlink(place_, ignored)) place_ = fs::weakly_canonical(place_, ignored);  // the file that it stands for
    if (place_.empty() || (fs::exists(place_, ignored) && !fs::is_regular_file(place_, ignored)))
      throw Error("'" + file.path.string() + "' is no file that could be written; give the name of a file");
    std::string name = place_.string() + ".XXXXXX";
    const int descriptor = mkstemp(name.data());
    if (descriptor < 0) fail();
    ::close(descriptor);
    temporary_ = name;
    std::ofstream out(temporary_, std::ios::binary);
    out << file.bytes;
    out.close();
    if (!out) fail();
    fs::permissions(temporary_,
                    fs::perms::owner_read | fs::perms::owner_write | fs::perms::group_read | fs::perms::others_read,
                    ignored);
  }
  Pending(Pending&& other) noexcept
      : place_(std::move(other.place_)), temporary_(std::exchange(other.temporary_, {})) {}
  ~Pending() { discard(); }

  void move_to_place() {
    std::error_code failed;
    fs::rename(temporary_, place_, failed);
    if (failed) fail();
    temporary_.clear();
  }

 private:
  void discard() {
    std::error_code ignored;
    if (!temporary_.empty()) fs::remove(temporary_, ignored);
    temporary_.clear();
  }
  [[noreturn]] void fail() {
    discard();
    throw Error(place_.string() + ": cannot be written; check that its folder exists, is writable and not full");
  }

  fs::path place_, temporary_;
};

}  // namespace

void write_files(const std::vector<OutputFile>& files) {
  std::vector<Pending> pending;
  for (const OutputFile& file : files) pending.emplace_back(file);
  for (Pending& file : pending) file.move_to_place();
}

}  // namespace flash::cli
