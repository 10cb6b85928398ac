#include "cli/npy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "harness/error.h"

namespace flash::cli {
namespace {

constexpr char kMagic[] = "\x93NUMPY";

struct Header {
  std::string type;  // as NumPy writes it: "<f4"
  bool fortran_order = false;
  std::vector<size_t> shape;
  size_t data_begin = 0;
};

std::string read_bytes(const std::string& path) {
  std::error_code unknown;
  if (std::filesystem::exists(path, unknown) && !std::filesystem::is_regular_file(path, unknown))
    throw Error(path + ": is no regular file; give the path of a .npy file");
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error("'" + path + "' cannot be opened; give the path of a .npy file that you may read");
  std::string bytes, piece(size_t(1) << 20, '\0');
  while (file.read(piece.data(), std::streamsize(piece.size())) || file.gcount() > 0)
    bytes.append(piece, 0, size_t(file.gcount()));
  if (file.bad()) throw Error(path + ": cannot be read; give the path of a .npy file");
  return bytes;
}

// Reads the header's text, a Python dictionary: {'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 3, 4), }.
// Written out by hand, since std::regex calls itself once a character, and a header may have 65,536.
class Dictionary {
 public:
  explicit Dictionary(const std::string& text) : text_(text) {}

  // False if it is not such a dictionary.
  bool read(Header& header) {
    std::set<std::string> keys;
    if (!take('{')) return false;
    while (!take('}')) {
      std::string key;
      if (!quoted(key) || !take(':') || !keys.insert(key).second) return false;
      const bool known = key == "descr"           ? quoted(header.type)
                         : key == "fortran_order" ? truth(header.fortran_order)
                         : key == "shape"         ? tuple(header.shape)
                                                  : false;
      if (!known || (!take(',') && !ahead('}'))) return false;
    }
    return keys.size() == 3 && at_end() && !header.type.empty();
  }

 private:
  void skip_space() {
    while (at_ < text_.size() && std::strchr(" \t\n\r", text_[at_]) && text_[at_] != '\0') at_++;
  }
  bool at_end() {
    skip_space();
    return at_ == text_.size();
  }
  bool ahead(char c) {
    skip_space();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool take(char c) {
    if (!ahead(c)) return false;
    at_++;
    return true;
  }
  bool quoted(std::string& value) {
    const char mark = ahead('\'') ? '\'' : '"';
    if (!take(mark)) return false;
    const size_t end = text_.find(mark, at_);
    if (end == std::string::npos) return false;
    value = text_.substr(at_, end - at_);
    at_ = end + 1;
    return true;
  }
  bool truth(bool& value) {
    skip_space();
    value = text_.compare(at_, 4, "True") == 0;
    if (!value && text_.compare(at_, 5, "False") != 0) return false;
    at_ += value ? 4 : 5;
    return true;
  }
  bool tuple(std::vector<size_t>& sizes) {
    if (!take('(')) return false;
    while (!take(')')) {
      skip_space();
      size_t digits = 0, size = 0;
      for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; at_++, digits++) {
        if (digits == 18) return false;  // no array is that long, and 20 digits are no size_t
        size = size * 10 + size_t(text_[at_] - '0');
      }
      if (digits == 0 || (!take(',') && !ahead(')'))) return false;
      sizes.push_back(size);
    }
    return true;
  }

  const std::string& text_;
  size_t at_ = 0;
};

Header parse_header(const std::string& path, const std::string& bytes) {
  const auto bad = [&](const std::string& what) {
    return Error(path + ": " + what + "; save the array with numpy.save");
  };
  if (bytes.size() < 10 || bytes.compare(0, 6, kMagic, 6) != 0) throw bad("is no .npy file");
  const auto byte = [&](size_t i) { return size_t(uint8_t(bytes[i])); };
  const size_t version = byte(6);
  if (version < 1 || version > 3) throw bad("has .npy version " + std::to_string(version) + ", known are 1 to 3");
  const size_t begin = version == 1 ? 10 : 12;
  if (bytes.size() < begin) throw bad("is cut off in its header");
  const size_t length =
      version == 1 ? byte(8) | byte(9) << 8 : byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24;
  if (length > 65536 || bytes.size() < begin + length) throw bad("is cut off in its header");

  const std::string dictionary = bytes.substr(begin, length);
  Header header;
  header.data_begin = begin + length;
  if (!Dictionary(dictionary).read(header)) throw bad("has a header that cannot be understood");
  return header;
}

// Elements of an array of this shape, if its bytes can be counted in 62 bits.
size_t count_elements(const std::string& path, const std::vector<size_t>& shape) {
  double estimate = 1;
  size_t count = 1;
  for (size_t n : shape) {
    estimate *= double(n);
    if (estimate > 4e17) throw Error(path + ": has a shape larger than any file");
    count *= n;
  }
  return count;
}

// Element `from` (a number of `width` bytes), with its bytes turned round if asked.
double number_at(const char* from, size_t width, bool swap) {
  char bytes[8];
  std::memcpy(bytes, from, width);
  if (swap) std::reverse(bytes, bytes + width);
  if (width == 8) {
    double x;
    std::memcpy(&x, bytes, 8);
    return x;
  }
  float x;
  std::memcpy(&x, bytes, 4);
  return double(x);
}

}  // namespace

Array4 read_npy(const std::string& path) { return parse_npy(path, read_bytes(path)); }

Array4 parse_npy(const std::string& path, const std::string& bytes) {
  const Header header = parse_header(path, bytes);
  const std::string kind = header.type.substr(1);
  const char order = header.type[0];
  if ((kind != "f4" && kind != "f8") || (order != '<' && order != '>' && order != '='))
    throw Error(path + ": has elements of type '" + header.type +
                "'; only float32 and float64 are read: save it with array.astype('float32')");
  if (header.shape.size() != 4)
    throw Error(path + ": has " + std::to_string(header.shape.size()) +
                " dimensions; 4 are needed: [batch, heads, sequence, head dim]");
  const size_t width = kind == "f4" ? 4 : 8;
  const size_t count = count_elements(path, header.shape);
  if (bytes.size() - header.data_begin != count * width)
    throw Error(path + ": has " + std::to_string(bytes.size() - header.data_begin) +
                " bytes of data, its header promises " + std::to_string(count * width) + "; the file is damaged");

  Array4 array;
  std::copy_n(header.shape.begin(), 4, array.shape.begin());
  array.values.resize(count);
  if (count == 0) return array;  // the other sizes may be anything
  const auto& n = array.shape;
  const char* data = bytes.data() + header.data_begin;
  size_t i = 0;
  for (size_t a = 0; a < n[0]; a++)
    for (size_t b = 0; b < n[1]; b++)
      for (size_t c = 0; c < n[2]; c++)
        for (size_t d = 0; d < n[3]; d++, i++) {
          const size_t place = header.fortran_order ? a + n[0] * (b + n[1] * (c + n[2] * d)) : i;
          array.values[i] = number_at(data + place * width, width, order == '>');
        }
  return array;
}

std::string npy_bytes(const std::vector<size_t>& shape, const std::vector<double>& values) {
  std::string dictionary = "{'descr': '<f4', 'fortran_order': False, 'shape': (";
  for (size_t n : shape) dictionary += std::to_string(n) + ", ";
  dictionary += "), }";
  // The data begins at a multiple of 64 bytes; the header ends in a newline.
  const size_t length = (10 + dictionary.size() + 1 + 63) / 64 * 64 - 10;
  dictionary.resize(length - 1, ' ');
  std::string bytes(kMagic, 6);
  bytes += {'\x01', '\x00', char(length & 0xff), char(length >> 8)};
  bytes += dictionary + '\n';
  const size_t begin = bytes.size();
  bytes.resize(begin + values.size() * sizeof(float));
  for (size_t i = 0; i < values.size(); i++) {
    const auto x = float(values[i]);
    std::memcpy(bytes.data() + begin + i * sizeof x, &x, sizeof x);
  }
  return bytes;
}

}  // namespace flash::cli
