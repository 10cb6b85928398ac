// Public face of the CPU executor: how to run kernels, what was found, what was counted, and device memory.
//
// A kernel file compiled for the executor calls simt::run_grid through launch() of simt/cuda.h. Each CUDA thread
// becomes a fiber, each block runs on one OS thread at a time. Code compiled with SIMT_OBSERVED reports every memory
// access, so that mistakes are found and traffic is counted.
//
// Host calls (launches, memory, counters) are made by one thread at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace simt {

// ---- How to run

// In which order warps, and lanes within a warp, get their turn. A right kernel gives the same result in both.
enum class Order { forward, backward };

struct Options {
  int workers = 0;  // OS threads; 0: one a core
  Order order = Order::forward;
  size_t shared_bytes = 227 << 10;  // what a block may have at most, as on an H100; a T4 has 64 KB
};

Options& options();
int worker_count();  // what options().workers comes down to on this machine

// ---- What was found

enum class Kind {
  deadlock,         // no thread can go on
  early_exit,       // threads wait for others that have returned
  divergence,       // threads that should meet are in different barriers or collectives
  mask,             // a lane outside its own mask, or masks that overlap without being equal
  absent_lane,      // a shuffle from a lane that takes no part in it
  race,             // two accesses, one of them a write, that nothing orders
  out_of_bounds,    // outside every array
  misaligned,       // an address that is no multiple of the access's size
  uninitialised,    // a read of memory that nobody has written
  missing_fence,    // use by TMA or wgmma of what a fence should have made visible to it
  unfinished_copy,  // use of memory that an asynchronous copy has still to fill
  barrier_misuse,   // a barrier used otherwise than it was made for
  bad_index,        // an index outside an array of fixed size, be it inside a larger one
  exception,        // a C++ exception in a kernel
  limit,            // more than the observer can tell apart
};

const char* name_of(Kind kind);

struct Finding {
  Kind kind;
  std::string text;  // with kernel, file:line, block, thread
};

// Those of the last launch. When there are any, launch() has thrown flash::KernelFault.
const std::vector<Finding>& findings();

// ---- What was counted

// Memory traffic of kernels as a GPU would see it: the accesses of a warp's lanes at one instruction are one request.
struct Traffic {
  uint64_t read_bytes = 0;
  uint64_t write_bytes = 0;  // atomics count as writes
  uint64_t requests = 0;
  uint64_t transactions = 0;        // global memory: 32-byte sectors; shared memory: wavefronts (passes over the banks)
  uint64_t ideal_transactions = 0;  // as few as these bytes could need

  Traffic& operator+=(const Traffic& other);
};

// The traffic of one instruction of a kernel.
struct SiteTraffic {
  const void* code = nullptr;  // its return address; see source_line()
  bool shared = false;
  bool write = false;
  Traffic traffic;
};

struct Counters {
  uint64_t launches = 0;
  Traffic global;
  Traffic shared;
  uint64_t block_barriers = 0;  // __syncthreads and its kin, once a block
  uint64_t warp_barriers = 0;   // __syncwarp, once a warp (or part of one)
  uint64_t named_barriers = 0;  // once each time that all have come
  uint64_t barrier_warps = 0;   // block and named barriers, once for each warp that came: instructions of a GPU
  uint64_t mbarrier_waits = 0;  // once a thread
  uint64_t shuffles = 0;        // once a warp
  uint64_t votes = 0;           // once a warp
  uint64_t atomics = 0;         // once a thread
  uint64_t async_copies = 0;    // cp.async of 16 bytes, once a thread
  uint64_t bulk_copies = 0;     // boxes that TMA moves, and bulk copies
  uint64_t matrix_flops = 0;    // of tensor cores: two a multiplication and addition
  size_t shared_memory = 0;     // bytes that a block had, at most
  std::vector<SiteTraffic> sites;

  Counters& operator+=(const Counters& other);
};

// Sums over all launches of observed kernels since the last reset; by_kernel: under names such as "scores<64>".
const Counters& counters();
const std::map<std::string, Counters>& counters_by_kernel();
void reset_counters();

// The same traffic by line of source, in order of lines.
struct LineTraffic {
  std::string line;  // "forward.cu:88"
  std::string file;  // where that file lay when it was compiled; empty if the line is not known
  int number = 0;    // of the line
  bool shared = false;
  bool write = false;
  Traffic traffic;
};
std::vector<LineTraffic> traffic_by_line(const Counters& counters);

// "forward.cu:88" for a return address in the program, "?" if that cannot be found out.
std::string source_line(const void* code);

// ---- Device memory

constexpr size_t kGuardBytes = 64 << 10;

// Memory aligned to 1024 bytes between two guard zones, poisoned. Throws std::bad_alloc.
void* allocate(size_t bytes);
// What such an array takes of the machine's memory: guard zones, a byte beside each that says whether it is written,
// and, once observed kernels have run, what they keep of it. As a double, since asking may go past all memory.
double memory_of_array(double bytes, bool observed);
void free(void* memory) noexcept;
void write(void* to, const void* from, size_t bytes);
void read(void* to, const void* from, size_t bytes);

// Fills with 0xff, which is NaN in every floating-point type, and counts as not yet written.
void poison(void* memory, size_t bytes);

// Whether the guard zones around an array still hold their pattern.
bool guards_intact(const void* memory);

// The memory that the system could give to this program now.
size_t available_bytes();

}  // namespace simt
