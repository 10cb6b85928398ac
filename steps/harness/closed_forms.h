// What a chapter's page says that its kernels must move: bytes asked of global memory, no cache assumed. `flashsteps
// profile` shows them beside what the CPU executor counts.
#pragma once
#include <string>
#include <vector>

#include "harness/problem.h"
#include "harness/registry.h"

namespace flash {

// Bytes that all launches of one kernel in one pass read and write.
struct KernelBytes {
  std::string kernel;  // its name, without template arguments
  double read = 0;
  double written = 0;
  bool beside_flags = false;  // flags and counters between blocks, a few bytes, come on top
};

using ClosedForm = std::vector<KernelBytes> (*)(const Problem&);

// Enters a closed form for a step of the chapter in whose folder `file` lies: the kernel file `step`.cu, one pass. It
// holds for a GPU whose blocks may have 227 KB of shared memory; with dropout, on the average over masks.
struct ClosedFormRegistration {
  ClosedFormRegistration(const char* file, const char* step, Pass pass, ClosedForm form);
};

// The closed form for a step at a problem; empty if its chapter gives none.
std::vector<KernelBytes> closed_form(const RegisteredStep& step, Pass pass, const Problem& problem);

// ---- Sums that the closed forms share. A query sees the keys before `keys_seen_by`; all are for one head.

// How many keys query `query` sees.
double keys_seen_by(const Problem& p, int query);
// Queries that see no key.
double empty_rows(const Problem& p);
// S by tiles of Br queries and Bc keys: rows of Q and of K, together, of all tiles in which some query sees some key.
double rows_of_seen_tiles(const Problem& p, int Br, int Bc);
// Elements of S that are seen.
double seen_elements(const Problem& p);
// A block owns Br queries and walks over tiles of Bc keys up to the last that one of its queries sees: the keys of all
// walks together. `ahead`: so many tiles more are fetched, where there are keys.
double keys_walked(const Problem& p, int Br, int Bc, int ahead = 0);
// The same walks, each key counted for every query of its block.
double elements_walked(const Problem& p, int Br, int Bc);
// A block owns Bc keys and walks over tiles of Br queries from the first that sees one of them.
double queries_walked(const Problem& p, int Bc, int Br);
// The same with every tile counted as whole: how many tiles of Br queries are visited.
double query_tiles_walked(const Problem& p, int Bc, int Br);

}  // namespace flash
