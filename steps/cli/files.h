// Writing results: whole or not at all.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace flash::cli {

struct OutputFile {
  std::filesystem::path path;
  std::string bytes;
};

// To be asked before the work whose results are to be written: throw Error if that is not possible, or two
// of them are the same. They try, and leave
// nothing behind.
void require_writable(const std::vector<std::filesystem::path>& files);
// Of files in a folder that may yet have to be made.
void require_writable_in(const std::filesystem::path& folder, const std::vector<std::string>& names);

// Writes all files, each into a temporary beside its place first; only when every one is complete are they renamed, and
// if one cannot be, those before it are what they were. A new file has the permissions that the umask leaves, one that
// takes another's place has that one's. `folder`, if given, is made first where it is not there.
// Throws Error if one cannot be written and Interrupted if asked to end, and leaves nothing behind then.
void write_files(const std::vector<OutputFile>& files, const std::filesystem::path& folder = {});

}  // namespace flash::cli
