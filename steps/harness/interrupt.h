// Ctrl-C in the middle of long work: the work ends itself at its next chance, and everything it holds is given back.
#pragma once
#include <atomic>
#include <stdexcept>

namespace flash {

// Thrown where work ends because it was asked to. The command ends with exit code 130, as shells have it.
class Interrupted : public std::runtime_error {
 public:
  Interrupted() : std::runtime_error("interrupted") {}
};

// Set by the signal handler of the command, and by nobody else.
inline std::atomic<bool> interrupt_requested{false};

inline void throw_if_interrupted() {
  if (interrupt_requested) throw Interrupted();
}

}  // namespace flash
