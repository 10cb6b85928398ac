// What the fuzzers feed with anything at all, and what must hold whatever it was. Throws std::logic_error if it does
// not.
#pragma once
#include <cstdint>
#include <string>

namespace flash::tests {

// The bytes of a .npy file: they are refused with an Error, or read as an array that can be written and read again.
void read_any_npy(const std::string& bytes);

// A command line, an argument a line: refused with an Error or CLI11's own, or it makes a problem that is valid.
void parse_any_options(const std::string& bytes);

}  // namespace flash::tests
