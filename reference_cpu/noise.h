// How far rounding moves attention's results: the mean square error of each of them when every product and every sum
// carries an independent relative error of one unit. First order, elementwise; `x_noise2` is the square of x's error.
//
// A tolerance needs this scale because results can be much smaller than what they are made of: with one key,
// dS = P∘(dP − D) is exactly zero, and what a correct kernel computes is the rounding error of dP and D.
#pragma once
#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "harness/interrupt.h"

namespace flash::reference {

// Collects the elements' squared errors into a norm and a maximum. Elements that are not finite do not count.
class NoiseSum {
 public:
  void add(double noise2) {
    if (!std::isfinite(noise2)) return;
    sum_ += noise2;
    largest_ = std::max(largest_, noise2);
  }
  void add(const NoiseSum& other) {
    sum_ += other.sum_;
    largest_ = std::max(largest_, other.largest_);
  }
  double norm() const { return std::sqrt(sum_); }
  double max() const { return std::sqrt(largest_); }

 private:
  double sum_ = 0, largest_ = 0;
};

// Adding up n products in any order rounds each partial sum. These are a random walk of which one knows where it ends:
// the mean of the partial sum after a part t of the products is t · sum, its variance t(1 − t) times the products'
// squares. Over all t, the squares of the partial sums come to n/6 times the products' squares and n/3 times the sum's.
inline double walk_of_terms(int64_t n) { return double(n) / 6; }
inline double walk_to_sum(int64_t n) { return double(n) / 3; }

// Of result = factor · A·Bᵀ: its products, their partial sums, and the factor.
template <class Matrix, class Scalar>
Matrix dot_products_noise2(const Matrix& A, const Matrix& B, const Matrix& result, Scalar factor) {
  const int64_t n = A.cols();
  const Matrix A2 = A.cwiseAbs2();
  Matrix noise2(A.rows(), B.rows());
  constexpr int64_t kAtOnce = 1 << 15;
  for (int64_t row = 0; row < B.rows(); row += kAtOnce) {
    throw_if_interrupted();
    const int64_t rows = std::min<int64_t>(kAtOnce, B.rows() - row);
    noise2.middleCols(row, rows) =
        Scalar(1 + walk_of_terms(n)) * factor * factor * (A2 * B.middleRows(row, rows).cwiseAbs2().transpose()) +
        Scalar(1 + walk_to_sum(n)) * result.middleCols(row, rows).cwiseAbs2();
  }
  return noise2;
}

// What to multiply with the squared rows of V for the noise of a sum Σ w·V of n terms: the noise of the weights, and
// their part in the partial sums. The sum's own part comes to it, see sum_itself_noise2.
template <class Matrix>
Matrix terms_noise2(const Matrix& weights_noise2, const Matrix& weights, int64_t n) {
  return weights_noise2 + typename Matrix::Scalar(walk_of_terms(n)) * weights.cwiseAbs2();
}
// `smallest` is the smallest normal number: what is smaller is rounded as coarsely as that, each product of the n.
template <class Matrix, class Scalar>
Matrix sum_itself_noise2(const Matrix& sum, int64_t n, Scalar smallest) {
  return (Scalar(1 + walk_to_sum(n)) * sum.array().square() + Scalar(n) * smallest * smallest).matrix();
}

// Of P = softmax(S). One score's error moves its own weight by P(1 − P); exp and the division round once.
template <class Matrix>
Matrix softmax_noise2(const Matrix& P, const Matrix& S_noise2) {
  return (P.array().square() * (1 + S_noise2.array() * (1 - P.array()).square())).matrix();
}

// Of LSE = m + log Σ exp(S − m), for one row: the scores by their weights, log's argument, the two terms and their sum.
template <class Row, class Scalar>
Scalar lse_noise2(const Row& P, const Row& S_noise2, Scalar m, Scalar LSE) {
  return (P.array().square() * S_noise2.array()).sum() + 1 + m * m + LSE * LSE;
}

}  // namespace flash::reference
