// NumPy's .npy files: one array of numbers each. Format: numpy.lib.format, versions 1.0 to 3.0.
#pragma once
#include <array>
#include <cstddef>
#include <string>
#include <vector>

namespace flash::cli {

struct Array4 {
  std::array<size_t, 4> shape{};
  std::vector<double> values;  // row-major, whatever the file's order
};

// Reads a 4-D array of float32 or float64, of either byte order and either memory order. Throws Error, in one line that
// begins with the path, for anything else.
Array4 read_npy(const std::string& path);
// The same from the bytes of a file; `path` is for messages.
Array4 parse_npy(const std::string& path, const std::string& bytes);
// Its shape alone, by a look at the head of the file.
std::array<size_t, 4> npy_shape(const std::string& path);

// The bytes of a float32 file, row-major.
std::string npy_bytes(const std::vector<size_t>& shape, const std::vector<double>& values);

}  // namespace flash::cli
