// Order by flags, also between blocks: by a word in memory one thread tells another what it knows.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "simt/happens_before.h"

namespace simt {

// What threads know, of any blocks.
class KnownBlocks {
 public:
  void add(const std::shared_ptr<const View>& view);
  void add(const KnownBlocks& other);
  bool covers(Moment earlier) const;

 private:
  std::vector<std::shared_ptr<const View>> views_;  // the last of each thread, by block and thread
};
using SharedKnowledge = std::shared_ptr<const KnownBlocks>;

// A thread has taken over what a flag told.
struct Acquired {
  int thread;
  unsigned clock;  // its moment then
  SharedKnowledge blocks;
};

// What the flags of a launch tell under observation. All workers use them: a flag and what it tells are looked at, and
// changed, together, while this mutex is held.
std::mutex& flags_mutex();
SharedKnowledge& told_by_flag(const void* address);
bool any_flag_tells();
void forget_flags();

// Threads of one block may wait for flags that another one sets. Here workers tell each other that something has
// changed, and find out that nothing will.
namespace grid_progress {
void begin(int workers);
void worker_ends();
void changed();
uint64_t changes();  // how often
// Waits until there are more changes than `seen`. Returns false if there will be none, since all workers wait, or the
// grid is to stop.
bool wait(uint64_t seen);
}  // namespace grid_progress

}  // namespace simt
