// Ctrl-C in the middle of long work, or `kill`, or a terminal that is closed: the work ends itself at its next chance,
// and everything it holds is given back.
#pragma once
#include <atomic>
#include <csignal>
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

}  // namespace flash
