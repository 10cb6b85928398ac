// What the file that holds this code, a program or a shared library, says about it: names of kernels and shared
// variables, lines of source. "The program" below means either.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace simt {

// What to take from an address in memory to get the address in the program's file.
size_t load_address();
std::string program_file();

// Whether the program still has its symbol table: strip takes it away, and with it what the rest of this file knows.
bool has_symbols();

// "scores<64>" for the address of a kernel.
const std::string& kernel_name(const void* kernel);

// A static variable with thread storage: that is what a __shared__ variable becomes. Its place is counted from the
// start of a thread's copy of the program's thread-local storage.
struct SharedVariable {
  size_t begin, end;
  std::string name;      // without scope
  std::string function;  // that it stands in, mangled
  int file;              // which translation unit, to tell apart the two builds of a kernel file
};

// The variable at this place; null if there is none.
const SharedVariable* shared_variable_at(size_t place);

// Whether at this place there is a variable of the program that is not local to a function, or a flag of the
// compiler's.
bool is_other_variable(size_t place);

// Those that stand in the body of this kernel.
const std::vector<SharedVariable>& shared_variables_of(const void* kernel);

// Whether a variable is surely none of this kernel's: it stands in another kernel, known from an earlier launch or as
// another instance of the same template. One in a function that the kernel calls cannot be told from the name.
bool is_of_another_kernel(const SharedVariable& variable, const void* kernel);

// The calling thread's copy of the program's thread-local storage.
struct ThreadStorage {
  unsigned char* begin = nullptr;
  size_t bytes = 0;
};
ThreadStorage thread_storage();

}  // namespace simt
