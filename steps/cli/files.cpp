#include "cli/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <optional>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "harness/error.h"
#include "harness/interrupt.h"

namespace flash::cli {
namespace {

namespace fs = std::filesystem;

// The folder that a path lies in; a path may end in a slash.
fs::path folder_of(const fs::path& path) {
  const fs::path above = (path.has_filename() ? path : path.parent_path()).parent_path();
  return above.empty() ? "." : above;
}

// False for a file of another user in a folder that lets everybody take away only what is his own, as /tmp does.
bool may_replace(const fs::path& place) {
  struct stat file, folder;
  if (stat(place.c_str(), &file) != 0 || stat(folder_of(place).c_str(), &folder) != 0) return true;
  const uid_t user = geteuid();
  return !(folder.st_mode & S_ISVTX) || user == 0 || user == file.st_uid || user == folder.st_uid;
}

// The file that a link stands for, though it may not be there yet, or the path itself; throws Error where something is
// that is no file.
fs::path place_of(const fs::path& path) {
  std::error_code ignored;
  fs::path place = path;
  for (int links = 0; fs::is_symlink(place, ignored) && links < 40; links++)  // as many as Linux follows
    place = folder_of(place) / fs::read_symlink(place, ignored);
  if (fs::is_symlink(place, ignored)) place.clear();
  if (place.empty() || !place.has_filename() || (fs::exists(place, ignored) && !fs::is_regular_file(place, ignored)))
    throw Error("'" + path.string() + "' is no file that could be written; give the name of a file");
  return place;
}

[[noreturn]] void cannot_write(const fs::path& path) {
  throw Error(path.string() + ": cannot be written; check that its folder exists, is writable and not full");
}

[[noreturn]] void cannot_make(const fs::path& folder, const std::string& why) {
  throw Error(folder.string() + ": the folder cannot be made: " + why + "; choose another one");
}

void discard(const fs::path& path) {
  std::error_code ignored;
  if (!path.empty()) fs::remove(path, ignored);
}

// A new file beside `place`, under a name that nobody has, with the permissions that the umask leaves.
std::pair<int, fs::path> new_file_beside(const fs::path& place) {
  for (int number = 0;; number++) {
    const fs::path name =
        folder_of(place) / ("flashsteps-" + std::to_string(getpid()) + "-" + std::to_string(number) + ".tmp");
    const int descriptor = open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor >= 0) return {descriptor, name};
    if (errno != EEXIST) cannot_write(place);
  }
}

// A file on its way: written under a name of its own, moved to its place when all are complete, removed if not.
class Pending {
 public:
  explicit Pending(const OutputFile& file) : place_(place_of(file.path)) {
    int descriptor;
    std::tie(descriptor, temporary_) = new_file_beside(place_);
    try {
      write_to(descriptor, file.bytes);
    } catch (...) {
      close(descriptor);
      discard(temporary_);
      throw;
    }
    if (close(descriptor) == 0) return;
    discard(temporary_);
    cannot_write(place_);
  }
  Pending(const Pending&) = delete;

  // What was not kept is as it was before.
  ~Pending() {
    std::error_code ignored;
    if (!old_.empty())
      fs::rename(old_, place_, ignored);
    else if (moved_)
      discard(place_);
    discard(temporary_);
  }

  // `keep_old`: for as long as this can be undone, what was there before is kept aside.
  void move_to_place(bool keep_old) {
    std::error_code failed;
    if (keep_old && fs::exists(place_, failed)) {
      const auto [descriptor, aside] = new_file_beside(place_);
      close(descriptor);
      fs::rename(place_, aside, failed);
      if (failed) {
        discard(aside);
        cannot_write(place_);
      }
      old_ = aside;
    }
    fs::rename(temporary_, place_, failed);
    if (failed) cannot_write(place_);
    temporary_.clear();
    moved_ = true;
  }

  void keep() {
    discard(old_);
    old_.clear();
    moved_ = false;
  }

 private:
  // A piece at a time, so that whoever asks for an end need not wait for a large file.
  void write_to(int descriptor, const std::string& bytes) const {
    struct stat old;
    if (stat(place_.c_str(), &old) == 0 && fchmod(descriptor, old.st_mode & 07777) != 0) cannot_write(place_);
    for (size_t written = 0; written < bytes.size();) {
      throw_if_interrupted();
      const size_t piece = std::min(bytes.size() - written, size_t(1) << 20);
      const ssize_t count = write(descriptor, bytes.data() + written, piece);
      if (count < 0 && errno != EINTR) cannot_write(place_);
      written += size_t(std::max<ssize_t>(count, 0));
    }
  }

  fs::path place_, temporary_, old_;
  bool moved_ = false;
};

// A folder and those that it lies in, made where they were not there; removed again if they are not kept.
class MadeFolders {
 public:
  explicit MadeFolders(const fs::path& folder) {
    std::error_code failed;
    std::vector<fs::path> missing;
    for (fs::path path = folder; path != "." && !fs::exists(fs::symlink_status(path, failed)); path = folder_of(path))
      missing.push_back(path);
    for (auto path = missing.rbegin(); path != missing.rend(); ++path) {
      if (fs::create_directory(*path, failed)) made_.push_back(*path);
      if (!failed) continue;
      remove_made();
      cannot_make(folder, failed.message());
    }
    if (!fs::is_directory(folder, failed)) throw Error(folder.string() + ": is no folder; give the name of a folder");
  }
  MadeFolders(const MadeFolders&) = delete;
  ~MadeFolders() { remove_made(); }

  void keep() { made_.clear(); }

 private:
  void remove_made() {
    for (; !made_.empty(); made_.pop_back()) discard(made_.back());
  }

  std::vector<fs::path> made_;
};

}  // namespace

void require_writable(const std::vector<fs::path>& files) {
  std::set<fs::path> places;
  for (const fs::path& file : files) {
    const fs::path place = place_of(file);
    const auto [descriptor, trial] = new_file_beside(place);
    close(descriptor);
    discard(trial);
    std::error_code unknown;
    if (fs::symlink_status(place, unknown).type() == fs::file_type::none) cannot_write(place);  // no name for a file
    if (!may_replace(place)) throw Error(place.string() + ": belongs to another user; choose another name or folder");
    if (!places.insert(fs::weakly_canonical(place, unknown)).second)
      throw Error(file.string() + ": is the same file as another result; give each a file of its own");
  }
}

void require_writable_in(const fs::path& folder, const std::vector<std::string>& names) {
  // What is missing of the folder is not made on trial: another run may be making it.
  std::error_code failed;
  if (fs::symlink_status(folder, failed).type() == fs::file_type::none) cannot_make(folder, failed.message());
  fs::path there = folder;
  while (there != "." && !fs::exists(fs::symlink_status(there, failed))) there = folder_of(there);
  const bool is_folder = fs::is_directory(there, failed);
  if (there == folder && !is_folder) throw Error(folder.string() + ": is no folder; give the name of a folder");
  if (!is_folder) cannot_make(folder, std::make_error_code(std::errc::not_a_directory).message());
  if (there != folder) {
    try {
      return require_writable({there / "trial"});
    } catch (const Error&) {
      cannot_make(folder, there.string() + " is not writable");
    }
  }
  std::vector<fs::path> files;
  for (const std::string& name : names) files.push_back(folder / name);
  require_writable(files);
}

void write_files(const std::vector<OutputFile>& files, const fs::path& folder) {
  std::optional<MadeFolders> folders;
  if (!folder.empty()) folders.emplace(folder);
  std::deque<Pending> pending;
  for (const OutputFile& file : files) pending.emplace_back(file);
  throw_if_interrupted();  // the last chance: what follows takes a moment
  for (Pending& file : pending) file.move_to_place(&file != &pending.back());
  for (Pending& file : pending) file.keep();
  if (folders) folders->keep();
}

}  // namespace flash::cli
