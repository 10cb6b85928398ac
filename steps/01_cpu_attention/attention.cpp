// 01 CPU attention: what attention computes, and what must be kept for its gradient.
//
//     S = scale · Q Kᵀ      P = softmax(S)      O = P V           one head: Q, O [Nq, D]   K, V [Nk, D]   S, P [Nq, Nk]
//
// A row of S says how well one query fits each key; softmax turns it into weights that sum to 1; O is the average of
// the rows of V under those weights. Everything later in the course computes exactly this, in another order.
//
// Page: docs/01_cpu_attention.md.  Source: Vaswani et al. 2017, section 3.2.1.
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

#include "harness/step.h"

namespace {
using namespace flash;

template <class T>
using Matrix = Eigen::Map<Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;
template <class T>
using ConstMatrix = Eigen::Map<const Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>;
template <class T>
using Row = Eigen::Matrix<T, 1, Eigen::Dynamic>;

// Query i sees the keys 0 … seen − 1: all, or with a causal mask those up to its own place counted from the end.
int keys_seen(const Problem& p, int i) { return p.causal ? std::max(0, i + 1 - p.Nq + p.Nk) : p.Nk; }

// One row of safe softmax: exp(s − max) cannot overflow, and the factor exp(max) cancels in the division. Turns the
// scores into weights and returns LSE = log Σ exp(s).
template <class T>
T softmax(Eigen::Ref<Row<T>> s) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  const T largest = s.size() ? s.template maxCoeff<Eigen::PropagateNaN>() : -kInfinity;
  if (largest == -kInfinity) {  // nothing to average: all weights are 0
    s.setZero();
    return -kInfinity;
  }
  s = (s.array() - largest).exp();
  const T sum = s.sum();
  s /= sum;
  return largest + std::log(sum);
}

// Forward pass of one head. P is the one thing kept for the gradient that nobody asked for, and it is Nq × Nk.
template <class T>
void forward_head(const Problem& p, ConstMatrix<T> Q, ConstMatrix<T> K, ConstMatrix<T> V, Matrix<T> P, Matrix<T> O,
                  T* LSE) {
  for (int i = 0; i < p.Nq; i++) {
    const int seen = keys_seen(p, i);
    Row<T> s = T(p.scale) * (Q.row(i) * K.topRows(seen).transpose());
    LSE[i] = softmax<T>(s);
    O.row(i) = s * V.topRows(seen);
    P.row(i).head(seen) = s;
    P.row(i).tail(p.Nk - seen).setZero();
  }
}

// Backward pass of one head, from the stored P. With D = rowsum(dO ∘ O):
//
//     dV = Pᵀ dO      dP = dO Vᵀ      dS = P ∘ (dP − D)      dQ = scale · dS K      dK = scale · dSᵀ Q
template <class T>
void backward_head(const Problem& p, ConstMatrix<T> Q, ConstMatrix<T> K, ConstMatrix<T> V, ConstMatrix<T> P,
                   ConstMatrix<T> O, ConstMatrix<T> dO, Matrix<T> dQ, Matrix<T> dK, Matrix<T> dV) {
  dK.setZero();
  dV.setZero();
  for (int i = 0; i < p.Nq; i++) {
    const int seen = keys_seen(p, i);
    const Row<T> weights = P.row(i).head(seen);
    const Row<T> dP = dO.row(i) * V.topRows(seen).transpose();
    const T D = dO.row(i).dot(O.row(i));
    const Row<T> dS = weights.array() * (dP.array() - D);
    dQ.row(i) = T(p.scale) * (dS * K.topRows(seen));
    dK.topRows(seen) += T(p.scale) * dS.transpose() * Q.row(i);
    dV.topRows(seen) += weights.transpose() * dO.row(i);
  }
}

template <class T>
void forward(const Problem& p, const Tensors& t) {
  for (size_t head = 0; head < p.query_heads(); head++) {
    const size_t q = head * p.Nq * p.D, k = head * p.Nk * p.D;
    const auto matrix = [&](const void* base, size_t offset, int rows) {
      return ConstMatrix<T>(static_cast<const T*>(base) + offset, rows, p.D);
    };
    forward_head<T>(p, matrix(t.Q, q, p.Nq), matrix(t.K, k, p.Nk), matrix(t.V, k, p.Nk),
                    Matrix<T>(t.scratch<T>("P") + head * p.Nq * p.Nk, p.Nq, p.Nk),
                    Matrix<T>(static_cast<T*>(t.O) + q, p.Nq, p.D), static_cast<T*>(t.LSE) + head * p.Nq);
  }
}

template <class T>
void backward(const Problem& p, const Tensors& t) {
  for (size_t head = 0; head < p.query_heads(); head++) {
    const size_t q = head * p.Nq * p.D, k = head * p.Nk * p.D;
    const auto matrix = [&](const void* base, size_t offset, int rows) {
      return ConstMatrix<T>(static_cast<const T*>(base) + offset, rows, p.D);
    };
    const auto result = [&](void* base, size_t offset, int rows) {
      return Matrix<T>(static_cast<T*>(base) + offset, rows, p.D);
    };
    backward_head<T>(p, matrix(t.Q, q, p.Nq), matrix(t.K, k, p.Nk), matrix(t.V, k, p.Nk),
                     ConstMatrix<T>(t.scratch<T>("P") + head * p.Nq * p.Nk, p.Nq, p.Nk), matrix(t.O, q, p.Nq),
                     matrix(t.dO, q, p.Nq), result(t.dQ, q, p.Nq), result(t.dK, k, p.Nk), result(t.dV, k, p.Nk));
  }
}

const Registration step(
    __FILE__, Target::host,
    {.idea = "the definition, in Eigen; P is stored for the gradient",
     .dtypes = {DType::fp32, DType::fp64},
     .head_dims = head_dims_up_to(512),
     .workspace = [](const Problem& p) -> std::vector<Workspace> {
       return {{"P", p.scores() * bytes_of(p.dtype), true}};
     },
     .forward = [](const Problem& p, const Tensors& t,
                   Stream) { p.dtype == DType::fp64 ? forward<double>(p, t) : forward<float>(p, t); },
     .backward = [](const Problem& p, const Tensors& t,
                    Stream) { p.dtype == DType::fp64 ? backward<double>(p, t) : backward<float>(p, t); }});

}  // namespace
