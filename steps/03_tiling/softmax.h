// The softmax and the workspace of both files of this chapter: still those of chapter 02.
#pragma once
#include "harness/kernel.h"
#include "harness/mask.h"

namespace {
using namespace flash;

// P = softmax(S) and LSE: the thread walks over one whole row, three times. Chapter 04 takes this apart.
__global__ void softmax(Problem p, size_t rows, const float* S, float* P, float* LSE) {
  const size_t row = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  S += row * p.Nk, P += row * p.Nk;

  float m = -INFINITY;
  for (int j = 0; j < p.Nk; j++) m = fmaxf(m, S[j]);
  if (m == -INFINITY) m = 0.0f;  // no key is seen; −∞ − (−∞) would not be a number
  float l = 0.0f;
  for (int j = 0; j < p.Nk; j++) l += expf(S[j] - m);
  for (int j = 0; j < p.Nk; j++) P[j] = l == 0.0f ? 0.0f : expf(S[j] - m) / l;
  LSE[row] = l == 0.0f ? -INFINITY : m + logf(l);
}

inline void launch_softmax(const Problem& p, const float* S, float* P, float* LSE, Stream stream) {
  const size_t rows = p.query_rows();
  launch(softmax, grid_of(ceil_div(rows, 128u)), 128, 0, stream, p, rows, S, P, LSE);
}

// S and P are still whole matrices in HBM.
inline std::vector<Workspace> workspace(const Problem& p) {
  const size_t bytes = p.scores() * sizeof(float);
  return {{"S", bytes}, {"P", bytes}};
}

}  // namespace
