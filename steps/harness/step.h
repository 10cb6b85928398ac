// What a chapter's kernel file tells the rest of the project about itself, and how it is called.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "harness/error.h"
#include "harness/problem.h"

struct CUstream_st;  // CUDA's own name for what a cudaStream_t points to

namespace flash {

using Stream = CUstream_st*;

// A named piece of device memory that a step needs besides its inputs and outputs. Contents are undefined at the start.
struct Workspace {
  std::string name;
  size_t bytes = 0;
  bool saved = false;  // what a forward pass leaves for the backward pass of its chapter
};

// Device addresses for one call. The elements of all but LSE are of the problem's dtype (input_dtype, output_dtype);
// LSE is fp32 (fp64 when the dtype is fp64). A forward pass reads Q, K, V and writes O, LSE. A backward pass reads Q,
// K, V, O, LSE, dO and writes dQ, dK, dV. Every element of an output must be written.
struct Tensors {
  const void* Q = nullptr;
  const void* K = nullptr;
  const void* V = nullptr;
  void* O = nullptr;
  void* LSE = nullptr;
  const void* dO = nullptr;
  void* dQ = nullptr;
  void* dK = nullptr;
  void* dV = nullptr;
  std::map<std::string, void*> workspace;

  // The workspace asked for under this name. Throws LaunchError if it was not.
  template <class T>
  T* scratch(const char* name) const {
    return static_cast<T*>(address_of(name));
  }

 private:
  void* address_of(const char* name) const;
};

// The number of blocks of a one-dimensional grid. Throws Error past what a GPU takes.
unsigned checked_grid_length(size_t blocks);

using RunPass = void (*)(const Problem&, const Tensors&, Stream);

// A step: one kernel file. What it does not support it must not list here; the harness refuses it by name.
struct Step {
  std::string idea;            // one line, shown by `flashsteps list`
  int rung = 1;                // its place in the chapter's ladder, where there are several
  std::vector<DType> dtypes;   // of Q, K, V, O and their gradients; e4m3: of the products
  std::vector<int> head_dims;  // see also head_dims_up_to()
  bool causal = true;
  bool dropout = false;
  bool kv_heads = false;  // Hkv < Hq: grouped key/value heads
  int min_sm = 0;         // oldest GPU that has its instructions, e.g. 75; read by the build too. 0: no GPU code
  bool spreads_nonfinite = false;  // backward: a NaN or ∞ may reach rows of its tile that do not see it (0 · NaN)
  std::vector<Workspace> (*workspace)(const Problem&) = nullptr;
  std::vector<std::string> reads_saved = {};  // a backward pass: what it needs of its chapter's forward workspace
  RunPass quantise = nullptr;                 // for e4m3: comes before `forward`, and is timed apart
  RunPass forward = nullptr;                  // at least one of the two
  RunPass backward = nullptr;
};

// 1, 2, …, largest: for a step that takes any head dim.
std::vector<int> head_dims_up_to(int largest);

// Where a step's code runs. The same kernel file is compiled for the last three.
enum class Target {
  host,          // plain C++, no kernels
  gpu,           // by nvcc
  cpu,           // by a C++ compiler, for the executor of steps/simt
  cpu_observed,  // the same, with every memory access reported to the executor
};

// Enters a step into the registry. Its id is made from the file's folder and name: "02_naive_gpu/forward".
struct Registration {
  Registration(const char* file, Target target, Step step);
};

}  // namespace flash
