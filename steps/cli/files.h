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

// Writes all files, each into a temporary beside its place first; only when every one is complete are they renamed.
// Throws Error, and leaves nothing behind, if one cannot be written.
void write_files(const std::vector<OutputFile>& files);

}  // namespace flash::cli
