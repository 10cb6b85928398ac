// When a kernel brings the program down: what the processor ends a program for, told as a line about the kernel.
#pragma once
#include <string>

namespace simt {

// From now on, if a kernel on this OS thread divides an integer by zero or touches memory that is nobody's, one line on
// stderr says which kernel, block and thread it was, and the program ends with exit code 1. A GPU goes on after such a
// division, with any result, and ends the kernel after such an access. To be called by each thread that runs blocks.
void report_crashes(const std::string& kernel);

}  // namespace simt
