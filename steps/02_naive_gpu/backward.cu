// 02 naive GPU kernels, backward: the gradient from the stored P, one kernel an operation.
//
//     values   dV = P'ᵀ dO                 dO, dQ [B, H, Nq, D]    dK, dV [B, H, Nk, D]    P, P', dP [B, H, Nq, Nk]
//     weights  dP' = dO Vᵀ
//     dropout  dP = dP' · kept / (1 − p)
//     softmax  dS = P ∘ (dP − rowsum(P ∘ dP))
//     queries  dQ = scale · dS K
//     keys     dK = scale · dSᵀ Q
//
// New since the forward pass: P has waited in HBM since then, two matrices of N² numbers with dropout. dP is another,
// and dS takes its place.
//
// Page: docs/02_naive_gpu.md.
#include "element.h"
#include "harness/kernel.h"
#include "harness/mask.h"
#include "harness/philox.h"

namespace {
using namespace flash;

// dV[row, col]: the thread adds up a column of dO under the weights of one column of P', over the queries that see it.
__global__ void values_gradient(Problem p, const float* P_dropped, const float* dO, float* dV) {
  const Element e = my_element(p.D);
  if (e.col >= p.D) return;
  const int head = e.row / p.Nk, key = e.row % p.Nk;
  P_dropped += size_t(head) * p.Nq * p.Nk;
  dO += size_t(head) * p.Nq * p.D;
  float sum = 0.0f;
  for (int i = first_query(p, key); i < p.Nq; i++) {
    const float weight = P_dropped[size_t(i) * p.Nk + key], term = weight * dO[size_t(i) * p.D + e.col];
    if (!is_dropped(weight)) sum += term;  // where it was dropped, a NaN in dO must not come through
  }
  dV[size_t(e.row) * p.D + e.col] = sum;
}

// dP'[row, col]: a dot product of one row of dO and one row of V.
__global__ void weights_gradient(Problem p, const float* dO, const float* V, float* dP) {
  const Element e = my_element(p.Nk);
  if (e.col >= p.Nk) return;
  const float* grad = dO + size_t(e.row) * p.D;
  const float* v = V + (size_t(e.row / p.Nq) * p.Nk + e.col) * p.D;
  float dot = 0.0f;
  for (int d = 0; d < p.D; d++) dot += grad[d] * v[d];
  dP[size_t(e.row) * p.Nk + e.col] = dot;
}

// What was dropped had no part in O and gets no gradient. The mask is drawn again from the seed.
__global__ void dropout_gradient(Problem p, Dropout drop, float* dP) {
  const Element e = my_element(p.Nk);
  if (e.col >= p.Nk) return;
  const size_t at = size_t(e.row) * p.Nk + e.col;
  dP[at] = drop.keeps(e.row / p.Nq, e.row % p.Nq, e.col) ? dP[at] * drop.kept_scale : 0.0f;
}

// dS = P ∘ (dP − rowsum(P ∘ dP)), written over dP: the thread walks over one whole row, twice.
__global__ void softmax_gradient(Problem p, int rows, const float* P, float* dP) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  P += size_t(row) * p.Nk;
  dP += size_t(row) * p.Nk;
  const int seen = keys_seen(p, row % p.Nq);
  float D = 0.0f;
  for (int j = 0; j < seen; j++) D += P[j] * dP[j];
  for (int j = 0; j < p.Nk; j++) dP[j] = j < seen ? P[j] * (dP[j] - D) : 0.0f;
}

// dQ[row, col]: one row of dS times one column of K.
__global__ void queries_gradient(Problem p, const float* dS, const float* K, float* dQ) {
  const Element e = my_element(p.D);
  if (e.col >= p.D) return;
  dS += size_t(e.row) * p.Nk;
  K += size_t(e.row / p.Nq) * p.Nk * p.D;
  const int seen = keys_seen(p, e.row % p.Nq);
  float sum = 0.0f;
  for (int j = 0; j < seen; j++) sum += dS[j] * K[size_t(j) * p.D + e.col];
  dQ[size_t(e.row) * p.D + e.col] = float(p.scale) * sum;
}

// dK[row, col]: one column of dS times one column of Q.
__global__ void keys_gradient(Problem p, const float* dS, const float* Q, float* dK) {
  const Element e = my_element(p.D);
  if (e.col >= p.D) return;
  const int head = e.row / p.Nk, key = e.row % p.Nk;
  dS += size_t(head) * p.Nq * p.Nk;
  Q += size_t(head) * p.Nq * p.D;
  float sum = 0.0f;
  for (int i = first_query(p, key); i < p.Nq; i++) sum += dS[size_t(i) * p.Nk + key] * Q[size_t(i) * p.D + e.col];
  dK[size_t(e.row) * p.D + e.col] = float(p.scale) * sum;
}

void backward(const Problem& p, const Tensors& t, Stream stream) {
  const auto *Q = static_cast<const float*>(t.Q), *K = static_cast<const float*>(t.K);
  const auto *V = static_cast<const float*>(t.V), *dO = static_cast<const float*>(t.dO);
  const float* P = t.scratch<float>("P");
  const float* P_dropped = p.dropout > 0 ? t.scratch<float>("P_dropped") : P;
  float* dP = t.scratch<float>("dP");
  const size_t rows = p.query_rows();
  const ElementLaunch matrix(rows, p.Nk), queries(rows, p.D), keys(p.key_rows(), p.D);

  launch(values_gradient, keys.grid, keys.block, 0, stream, p, P_dropped, dO, static_cast<float*>(t.dV));
  launch(weights_gradient, matrix.grid, matrix.block, 0, stream, p, dO, V, dP);
  if (p.dropout > 0) launch(dropout_gradient, matrix.grid, matrix.block, 0, stream, p, Dropout(p), dP);
  launch(softmax_gradient, grid_of(ceil_div(rows, 128u)), 128, 0, stream, p, int(rows), P, dP);
  float* dS = dP;
  launch(queries_gradient, queries.grid, queries.block, 0, stream, p, dS, K, static_cast<float*>(t.dQ));
  launch(keys_gradient, keys.grid, keys.block, 0, stream, p, dS, Q, static_cast<float*>(t.dK));
}

std::vector<Workspace> workspace(const Problem& p) { return {{"dP", p.scores() * sizeof(float)}}; }

const Registration step = register_step(__FILE__, {.idea = "the gradient from the stored N x N weights",
                                                   .rung = 2,
                                                   .dtypes = {DType::fp32},
                                                   .head_dims = head_dims_up_to(256),
                                                   .dropout = true,
                                                   .min_sm = 75,
                                                   .workspace = workspace,
                                                   .reads_saved = {"P"},
                                                   .backward = backward});

}  // namespace
