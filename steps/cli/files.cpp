#include "cli/files.h"

#include <fstream>

#include "harness/error.h"

namespace flash::cli {
namespace {

namespace fs = std::filesystem;

fs::path temporary_of(const OutputFile& file) { return file.path.string() + ".part"; }

bool write_temporary(const OutputFile& file) {
  std::ofstream out(temporary_of(file), std::ios::binary);
  out << file.bytes;
  out.close();
  return bool(out);
}

}  // namespace

void write_files(const std::vector<OutputFile>& files) {
  std::error_code failed;
  const auto give_up = [&](const OutputFile& culprit) {
    for (const OutputFile& file : files) {
      std::error_code ignored;
      fs::remove(temporary_of(file), ignored);
    }
    throw Error(culprit.path.string() + ": cannot be written; check that its folder exists, is writable and not full");
  };
  for (const OutputFile& file : files)
    if (fs::is_directory(file.path, failed) || !write_temporary(file)) give_up(file);
  for (const OutputFile& file : files) {
    fs::rename(temporary_of(file), file.path, failed);
    if (failed) give_up(file);
  }
}

}  // namespace flash::cli
