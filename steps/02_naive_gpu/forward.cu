// 02 naive GPU kernels, forward: the standard way, one kernel an operation, all of it through HBM.
//
//     scores   S = scale · Q Kᵀ            Q, O [B, H, Nq, D]    K, V [B, H, Nk, D]    S, P [B, H, Nq, Nk]    fp32
//     mask     S = −∞ where the query does not see the key
//     softmax  P = softmax(S), LSE
//     dropout  P' = P · kept / (1 − p)
//     weighted sum  O = P' V
//
// New since 01: thousands of threads, one for each element of the result. No thread knows of another; whatever the
// next kernel needs is written to memory. Each kernel is simple, and together they sweep over N² numbers nine times
// (six without mask and dropout).
//
// Page: docs/02_naive_gpu.md.
#include "element.h"
#include "harness/kernel.h"
#include "harness/mask.h"
#include "harness/philox.h"

namespace {
using namespace flash;

// S[row, col]: the thread takes the dot product of one row of Q and one row of K.
__global__ void scores(Problem p, const float* Q, const float* K, float* S) {
  const Element e = my_element(p.Nk);
  if (e.col >= p.Nk) return;
  const float* q = Q + size_t(e.row) * p.D;
  const float* k = K + (size_t(e.row / p.Nq) * p.Nk + e.col) * p.D;
  float dot = 0.0f;
  for (int d = 0; d < p.D; d++) dot += q[d] * k[d];
  S[size_t(e.row) * p.Nk + e.col] = float(p.scale) * dot;
}

// Scores that the query does not see become −∞, whose exponential is exactly 0.
__global__ void mask(Problem p, float* S) {
  const Element e = my_element(p.Nk);
  if (e.col >= p.Nk) return;
  if (e.col >= keys_seen(p, e.row % p.Nq)) S[size_t(e.row) * p.Nk + e.col] = -INFINITY;
}

// P = softmax(S) and LSE: the thread walks over one whole row, three times.
__global__ void softmax(Problem p, int rows, const float* S, float* P, float* LSE) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  S += size_t(row) * p.Nk;
  P += size_t(row) * p.Nk;

  // Subtracting the largest score keeps exp from overflowing and changes nothing else. It starts at −∞, not at some
  // small number: no score is so low that it should lose against nothing.
  float m = -INFINITY;
  for (int j = 0; j < p.Nk; j++) m = fmaxf(m, S[j]);
  if (m == -INFINITY) m = 0.0f;  // no key is seen; −∞ − (−∞) would not be a number

  float l = 0.0f;
  for (int j = 0; j < p.Nk; j++) l += expf(S[j] - m);

  for (int j = 0; j < p.Nk; j++) P[j] = l == 0.0f ? 0.0f : expf(S[j] - m) / l;
  LSE[row] = l == 0.0f ? -INFINITY : m + logf(l);
}

// P' = P where the mask keeps it, scaled so that its mean stays; −0 where not.
__global__ void dropout(Problem p, Dropout drop, const float* P, float* P_dropped) {
  const Element e = my_element(p.Nk);
  if (e.col >= p.Nk) return;
  const size_t at = size_t(e.row) * p.Nk + e.col;
  P_dropped[at] = drop.keeps(e.row / p.Nq, e.row % p.Nq, e.col) ? P[at] * drop.kept_scale : kDropped;
}

// O[row, col]: the thread adds up one column of V under the weights of one row of P.
__global__ void weighted_sum(Problem p, const float* P, const float* V, float* O) {
  const Element e = my_element(p.D);
  if (e.col >= p.D) return;
  P += size_t(e.row) * p.Nk;
  V += size_t(e.row / p.Nq) * p.Nk * p.D;
  const int seen = keys_seen(p, e.row % p.Nq);  // a NaN in V must not reach a query that does not see it: 0 · NaN = NaN
  float sum = 0.0f;
  for (int j = 0; j < seen; j++) {
    const float weight = P[j], term = weight * V[size_t(j) * p.D + e.col];
    if (!is_dropped(weight)) sum += term;  // nor one whose weight for it was dropped
  }
  O[size_t(e.row) * p.D + e.col] = sum;
}

void forward(const Problem& p, const Tensors& t, Stream stream) {
  const auto *Q = static_cast<const float*>(t.Q), *K = static_cast<const float*>(t.K);
  const auto* V = static_cast<const float*>(t.V);
  float *S = t.scratch<float>("S"), *P = t.scratch<float>("P");
  const size_t rows = p.query_rows();
  const ElementLaunch matrix(rows, p.Nk), output(rows, p.D);

  launch(scores, matrix.grid, matrix.block, 0, stream, p, Q, K, S);
  if (p.causal) launch(mask, matrix.grid, matrix.block, 0, stream, p, S);
  launch(softmax, grid_of(ceil_div(rows, 128u)), 128, 0, stream, p, int(rows), S, P, static_cast<float*>(t.LSE));
  if (p.dropout > 0) {
    float* P_dropped = t.scratch<float>("P_dropped");
    launch(dropout, matrix.grid, matrix.block, 0, stream, p, Dropout(p), P, P_dropped);
    P = P_dropped;
  }
  launch(weighted_sum, output.grid, output.block, 0, stream, p, P, V, static_cast<float*>(t.O));
}

// S is gone after the forward pass; P, and P' where there is dropout, are kept for the backward pass.
std::vector<Workspace> workspace(const Problem& p) {
  const size_t bytes = p.scores() * sizeof(float);
  std::vector<Workspace> matrices = {{"S", bytes}, {"P", bytes, true}};
  if (p.dropout > 0) matrices.push_back({"P_dropped", bytes, true});
  return matrices;
}

const Registration step = register_step(__FILE__, {.idea = "one kernel an operation, every N x N matrix through HBM",
                                                   .dtypes = {DType::fp32},
                                                   .head_dims = head_dims_up_to(256),
                                                   .dropout = true,
                                                   .min_sm = 75,
                                                   .workspace = workspace,
                                                   .forward = forward});

}  // namespace
