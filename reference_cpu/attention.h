// The oracle: exact attention, forward and backward, on Eigen. Memory grows with N, not N²; heads run on all cores.
#pragma once
#include <cstdint>
#include <vector>

#include "harness/problem.h"
#include "harness/tensors.h"

namespace flash::reference {

// Q, K, V and dO; dO may be empty when no gradient is asked for. The other members are not looked at.
using Inputs = HostTensors;

// Which rows are computed. Rows of O, LSE, dQ are numbered (b·Hq + h)·Nq + i, rows of dK, dV (b·Hkv + h)·Nk + j.
struct Selection {
  bool everything = true;
  std::vector<int64_t> query_rows, key_rows;  // when not everything: sorted, each once
};

// Draws about `rows` query rows and key rows, spread over the tensor, first and last ones included; key rows from at
// most `heads` key/value heads, since a key's gradient needs every query of its head.
Selection sample(const Problem& problem, int rows, int heads, uint64_t seed);

// One result: the selected rows, in the order of the selection.
//
// `noise` says how far one unit of relative rounding error in each product and sum would move the elements, taken as
// independent: a scale for tolerances that stays right where terms cancel (a gradient that is zero but for rounding).
// Left at 0 when Scalar is float, which is nobody's oracle.
template <class Scalar>
struct Output {
  std::vector<Scalar> values;
  double noise_norm = 0;  // Frobenius norm of it
  double noise_max = 0;   // largest element of it
  // A gradient where scores are so large that P = exp(S − LSE), made from an fp32 LSE, has no accuracy to speak of. The
  // noise then counts an error of P of 1/64 (see kMostDrift) and no more, whatever a kernel could do better.
  bool beyond_claim = false;
};

template <class Scalar>
struct Results {
  Output<Scalar> O, LSE, dQ, dK, dV;  // the gradients are empty when dO was (but for a problem without queries)
};

// Attention in the arithmetic of Scalar (float, double or long double), from inputs of the given values.
//
// `stored` makes it the same-precision baseline: P, O, dS and the gradients are rounded to that type where an unfused
// implementation would store them (for e4m3: O to bf16). fp64 rounds nothing.
//
// `threads` is how many threads work on it, 0 for one a core; the results are the same to the last bit.
//
// `grid` is for the baseline, from 1 to 2: Q, V and dO are worked with that many times as large, P that many times as
// small, and the results are put right. Only rounding notices, for all numbers on the way now lie elsewhere between two
// that can be stored: another draw from the errors that the same arithmetic might make. O and the gradients themselves
// are stored at their own size.
//
// NaN and ∞ in the inputs go where IEEE arithmetic takes them, but never through a position that the mask or dropout
// leaves out. A row whose scores are all −∞ is as one that sees no key: O = 0, LSE = −∞.
template <class Scalar>
Results<Scalar> attention(const Problem& problem, const Inputs& inputs, const Selection& selection = {},
                          DType stored = DType::fp64, int threads = 0, double grid = 1);

// About how many bytes it takes while it works, beside inputs and results: a block of queries with all its keys for
// each of the threads.
double working_bytes(const Problem& problem, int threads = 0);

extern template Results<float> attention(const Problem&, const Inputs&, const Selection&, DType, int, double);
extern template Results<double> attention(const Problem&, const Inputs&, const Selection&, DType, int, double);
extern template Results<long double> attention(const Problem&, const Inputs&, const Selection&, DType, int, double);

}  // namespace flash::reference
