// Tensors in host memory, as the oracle and the runner of steps take them.
#pragma once
#include <vector>

namespace flash {

// Row-major tensors in the layout of Problem, widened to double; empty where not there. Inputs must be representable in
// the problem's input_dtype (see rounded_to in harness/round.h), so that a step and the oracle see the same numbers.
struct HostTensors {
  std::vector<double> Q{}, K{}, V{};     // inputs of both passes
  std::vector<double> dO{};              // input of a backward pass
  std::vector<double> O{}, LSE{};        // results of a forward pass; inputs of a backward pass
  std::vector<double> dQ{}, dK{}, dV{};  // results of a backward pass
};

}  // namespace flash
