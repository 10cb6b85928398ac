// What can go wrong, as two kinds: the user's question cannot be answered, or a step misbehaved.
#pragma once
#include <stdexcept>
#include <string>

namespace flash {

// Cannot be run as asked: bad input, an unsupported combination, no GPU, no memory. The message is one line that says
// what was wrong, what is allowed and what to do. The command ends with exit code 2.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A kernel did something that no kernel may do: a race, a write past an array, a deadlock. Exit code 1.
class KernelFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A step asks for a launch that the GPU in use (on the executor: any) cannot make: no threads or too many, too much
// shared memory, too many blocks along an axis, or a workspace that it has not declared.
class LaunchError : public KernelFault {
 public:
  using KernelFault::KernelFault;
};

// A message as it is shown: one line, whatever was quoted in it.
inline std::string one_line(std::string message) {
  for (char& c : message)
    if (c == '\n' || c == '\r') c = ' ';
  return message;
}

}  // namespace flash
