// Ctrl-C in the middle of long work, or `kill`, or a terminal that is closed: the work ends itself at its next chance,
// and everything it holds is given back.
#pragma once
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <stdexcept>

namespace flash {

// Thrown where work ends because it was asked to. The command ends with exit code 128 + the signal's number, as shells
// have it.
class Interrupted : public std::runtime_error {
 public:
  Interrupted() : std::runtime_error("interrupted") {}
};

// Set by the signal handler of the command, and by nobody else.
inline std::atomic<bool> interrupt_requested{false};
inline std::atomic<int> interrupting_signal{SIGINT};

inline void throw_if_interrupted() {
  if (interrupt_requested) throw Interrupted();
}

// Long loops look at every so many of their elements, which takes them some milliseconds.
constexpr size_t kElementsAtOnce = 1 << 16;

// The same from within a loop over single elements, of which this is number i.
inline void throw_if_interrupted_at(size_t i) {
  if (i % kElementsAtOnce == 0) throw_if_interrupted();
}

// x.resize(count), in pieces: the system's first touch of so much memory takes its time.
template <class Container>
void resize_in_pieces(Container& x, size_t count) {
  constexpr size_t kBytesAtOnce = 32 << 20;
  x.reserve(count);
  while (x.size() < count) {
    throw_if_interrupted();
    x.resize(std::min(count, x.size() + kBytesAtOnce / sizeof(typename Container::value_type)));
  }
  x.resize(count);
}

}  // namespace flash
