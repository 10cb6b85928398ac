// Attention as it is defined, with no trick but blocking: forward and backward for one block of rows at a time.
//
// Two passes over the scores. The first takes blocks of queries, each with all the keys it sees, and yields O, LSE and
// dQ: these are sums over keys. The second takes blocks of keys, each with all the queries that see it, and yields dK
// and dV: sums over queries. Whoever owns a block adds up its sums alone and in order, so that nothing depends on the
// number of threads. The second pass computes P once more, from the row maxima and sums that the first one keeps.
#include "reference_cpu/attention.h"

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <thread>
#include <type_traits>

#include "harness/error.h"
#include "harness/interrupt.h"
#include "harness/round.h"
#include "reference_cpu/dropout.h"
#include "reference_cpu/noise.h"
#include "reference_cpu/parallel.h"

namespace flash::reference {
namespace {

constexpr int kKeysInBlock = 64;              // second pass: keys of a block, …
constexpr int kQueriesInTile = 256;           // … and how many queries meet them at a time
constexpr int kScoresInQueryBlock = 1 << 20;  // first pass: 16 to 64 queries, so that a block's S has about this size

constexpr Eigen::Index kAtOnce = 1 << 15;  // columns and terms of a product in one piece

int queries_in_block(const Problem& p) { return std::clamp(kScoresInQueryBlock / std::max(1, p.Nk), 16, 64); }

template <class Scalar>
using Matrix = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Some rows of one head: queries of head b·Hq + h, or keys of head b·Hkv + h. One thread computes them.
struct Block {
  int64_t head;
  std::vector<int> rows;  // ascending
  int64_t slot;           // where the first one's results go in the output, in rows; kNoResults: only its statistics
};
constexpr int64_t kNoResults = -1;

// The most by which rounding of the scores may change P, as a part of it, in one unit of noise. What is more is no
// rounding error any longer: exp is not its first derivative there, and a tolerance made of it would pass anything.
constexpr double kMostDrift = 1.0 / 64;

// What the first pass keeps of a query's row of S and P.
template <class Scalar>
struct RowStatistics {
  Scalar m = 0;         // the row's maximum
  Scalar l = 0;         // Σ exp(S − m)
  Scalar D = 0;         // Σ dO∘O, which is also Σ P∘dP
  Scalar D_noise2 = 0;  // see noise.h; for rows without results of their own, that of O is left out
};

// Some queries against some keys of their head: everything there is about these scores.
template <class Scalar>
struct Tile {
  int64_t query_head;
  bool with_noise;                 // whether anyone asks for the noise of its results
  std::vector<int> queries, keys;  // ascending
  std::vector<int> seen;           // how many of `keys` each query sees: always the first ones
  Matrix<Scalar> Q, K, V, dO;
  Matrix<Scalar> S, P;     // [queries, keys]; P is 0 where a key is not seen
  Matrix<Scalar> keep;     // 1/(1−p) where dropout keeps a weight, else 0; empty when there is no dropout
  Matrix<Scalar> weights;  // P after dropout: what V is multiplied by
  Matrix<Scalar> dS;
  Matrix<Scalar> S_noise2, P_noise2, weights_noise2, dS_noise2;
  bool beyond_claim = false;  // see Output

  bool sees(Eigen::Index query, Eigen::Index key) const { return key < seen[size_t(query)]; }
  bool keeps(Eigen::Index query, Eigen::Index key) const {
    return sees(query, key) && (keep.size() == 0 || keep(query, key) != 0);
  }
};

// The given rows of a head whose first row in the tensor is `first_row`, times a factor.
template <class Scalar>
Matrix<Scalar> gather(const std::vector<double>& tensor, int64_t first_row, const std::vector<int>& rows, int D,
                      double factor = 1) {
  Matrix<Scalar> gathered(rows.size(), D);
  for (size_t r = 0; r < rows.size(); ++r) {
    throw_if_interrupted();
    const double* row = tensor.data() + (first_row + rows[r]) * D;
    std::transform(row, row + D, gathered.row(r).data(), [factor](double x) { return Scalar(x * factor); });
  }
  return gathered;
}

// Sets what lies beyond each row's seen keys to 0, whatever it was.
template <class Scalar>
void clear_unseen(Matrix<Scalar>& matrix, const std::vector<int>& seen) {
  for (size_t r = 0; r < seen.size(); ++r) matrix.row(r).tail(matrix.cols() - seen[r]).setZero();
}

// sum += A · B. The baseline (float) adds up each element's products one after the other, as a thread of an unfused
// kernel does; Eigen would spread them over several partial sums, which rounds less than any such kernel can. Long
// products are made in pieces, between which Ctrl-C is answered.
template <class Scalar, class Left, class Right>
void add_product(Matrix<Scalar>& sum, const Left& A, const Right& B) {
  for (Eigen::Index column = 0; column < B.cols(); column += kAtOnce) {
    for (Eigen::Index term = 0; term < A.cols(); term += kAtOnce) {
      throw_if_interrupted();
      const Eigen::Index columns = std::min(kAtOnce, B.cols() - column), terms = std::min(kAtOnce, A.cols() - term);
      const auto piece = B.block(term, column, terms, columns);
      auto into = sum.middleCols(column, columns);
      if constexpr (!std::is_same_v<Scalar, float>) {
        into.noalias() += A.middleCols(term, terms) * piece;
      } else {
        const Matrix<Scalar> rows = piece;  // row by row in memory
        for (Eigen::Index r = 0; r < A.rows(); ++r) {
          for (Eigen::Index t = 0; t < terms; ++t) into.row(r) += A(r, term + t) * rows.row(t);
        }
      }
    }
  }
}

// The squares of all elements.
template <class Scalar>
Matrix<Scalar> squares(const Matrix<Scalar>& X) {
  Matrix<Scalar> result(X.rows(), X.cols());
  for (Eigen::Index r = 0; r < X.rows(); ++r) {
    throw_if_interrupted();
    result.row(r) = X.row(r).cwiseAbs2();
  }
  return result;
}

template <class Scalar, class Left, class Right>
Matrix<Scalar> product(const Left& A, const Right& B) {
  Matrix<Scalar> sum = Matrix<Scalar>::Zero(A.rows(), B.cols());
  add_product(sum, A, B);
  return sum;
}

// The sum of a row's elements, for the baseline again one after the other.
template <class Scalar, class Row>
Scalar sum_of(const Row& row) {
  if constexpr (!std::is_same_v<Scalar, float>) return row.sum();
  Scalar sum = 0;
  for (Eigen::Index i = 0; i < row.size(); ++i) sum += row(i);
  return sum;
}

// sum += weights · values, over the terms that count. The weights of the others are 0, and that is enough unless a
// value is NaN or ∞: 0 · NaN is NaN.
template <class Scalar, class Weights, class Counts>
void add_terms(Matrix<Scalar>& sum, const Weights& weights, const Matrix<Scalar>& values, Counts counts) {
  if (values.allFinite()) return add_product(sum, weights, values);
  for (Eigen::Index r = 0; r < weights.rows(); ++r) {
    for (Eigen::Index t = 0; t < weights.cols(); ++t) {
      if (counts(r, t)) sum.row(r) += weights(r, t) * values.row(t);
    }
  }
}

template <class Scalar, class Weights, class Counts>
Matrix<Scalar> sum_of_terms(const Weights& weights, const Matrix<Scalar>& values, Counts counts) {
  Matrix<Scalar> sum = Matrix<Scalar>::Zero(weights.rows(), values.cols());
  add_terms(sum, weights, values, counts);
  return sum;
}

template <class Scalar>
class Attention {
 public:
  Attention(const Problem& problem, const Inputs& inputs, DType stored, double grid)
      : problem_(problem),
        inputs_(inputs),
        stored_(stored),
        grid_(Scalar(grid)),
        scale_(Scalar(problem.scale / grid)),
        mask_(problem),
        statistics_(problem.query_rows()) {}

  Results<Scalar> compute(const Selection& selection, int threads);

 private:
  struct BlockNoise {
    NoiseSum O, LSE, dQ, dK, dV;
    bool beyond_claim = false;  // of the gradients
  };

  // The oracle is asked for the noise, the float baseline is not.
  static constexpr bool kWithNoise = !std::is_same_v<Scalar, float>;

  bool has_gradient() const { return inputs_.dO.size() == problem_.q_elements(); }
  int group() const { return problem_.Hq / problem_.Hkv; }  // query heads that share a key/value head
  int64_t key_head_of(int64_t query_head) const {
    return query_head / problem_.Hq * problem_.Hkv + query_head % problem_.Hq / group();
  }

  int keys_seen_by(int query) const {
    if (!problem_.causal) return problem_.Nk;
    return int(std::clamp<int64_t>(int64_t{query} + 1 + problem_.Nk - problem_.Nq, 0, problem_.Nk));
  }
  int first_query_that_sees(int key) const {
    if (!problem_.causal) return 0;
    return int(std::clamp<int64_t>(int64_t{key} - problem_.Nk + problem_.Nq, 0, problem_.Nq));
  }
  RowStatistics<Scalar>& statistics(int64_t query_head, int query) {
    return statistics_[query_head * problem_.Nq + query];
  }

  // One unit of rounding, as noise.h counts them, and a row of O as the problem's dtype holds it.
  Scalar unit() const { return problem_.dtype == DType::fp64 ? Scalar(0x1p-53) : Scalar(0x1p-24); }
  Scalar smallest() const {
    return problem_.dtype == DType::fp64 ? Scalar(std::numeric_limits<double>::min())
                                         : Scalar(std::numeric_limits<float>::min());
  }
  Scalar most_drift2() const { return Scalar(kMostDrift / double(unit()) * kMostDrift / double(unit())); }
  Matrix<Scalar> stored_output(const Matrix<Scalar>& O) const {
    const DType type = output_dtype(problem_);
    return O.unaryExpr([type](Scalar x) { return type == DType::fp64 ? x : Scalar(rounded_to(type, double(x))); });
  }

  // What is left of a number, or of every element, when it is stored in memory.
  Scalar store(Scalar x) const {
    if (stored_ == DType::fp64 || (stored_ == DType::fp32 && std::is_same_v<Scalar, float>)) return x;
    return Scalar(rounded_to(stored_, double(x)));
  }
  Matrix<Scalar> store(const Matrix<Scalar>& X) const {
    return X.unaryExpr([this](Scalar x) { return store(x); });
  }
  Matrix<Scalar> store_output(const Matrix<Scalar>& O) const {
    return stored_ == DType::e4m3 ? stored_output(O) : store(O);
  }

  Tile<Scalar> open_tile(int64_t query_head, std::vector<int> queries, std::vector<int> keys, bool with_noise) const;
  void find_row_maximum_and_sum(const Tile<Scalar>& tile);
  void compute_weights(Tile<Scalar>& tile);
  void add_recomputation_noise(Tile<Scalar>& tile);
  void compute_dS(Tile<Scalar>& tile);
  void query_block(const Block& block, Results<Scalar>& results, BlockNoise& noise);
  void key_block(const Block& block, Results<Scalar>& results, BlockNoise& noise);

  std::vector<Block> blocks(int64_t heads, int rows_per_head, const Selection& selection,
                            const std::vector<int64_t>& selected, int rows_in_block) const;
  void add_blocks_for_statistics(const std::vector<Block>& key_blocks, std::vector<Block>& query_blocks) const;
  int queries_in_block() const { return reference::queries_in_block(problem_); }

  const Problem& problem_;
  const Inputs& inputs_;
  const DType stored_;
  const Scalar grid_;   // how much larger Q, V and dO are than they should be
  const Scalar scale_;  // of the scores made from that Q
  const DropoutMask mask_;
  std::vector<RowStatistics<Scalar>> statistics_;  // [B, Hq, Nq]
};

// ---------------------------------------------------------------------------------------------------------------------
// One tile: S, P and dS

// Gathers a tile's rows of Q, K, V, dO and computes S = scale · QKᵀ. Scores of unseen keys are there but mean nothing.
template <class Scalar>
Tile<Scalar> Attention<Scalar>::open_tile(int64_t query_head, std::vector<int> queries, std::vector<int> keys,
                                          bool with_noise) const {
  const int64_t first_query = query_head * problem_.Nq, first_key = key_head_of(query_head) * problem_.Nk;
  Tile<Scalar> tile;
  tile.query_head = query_head;
  tile.Q = gather<Scalar>(inputs_.Q, first_query, queries, problem_.D, double(grid_));
  tile.K = gather<Scalar>(inputs_.K, first_key, keys, problem_.D);
  tile.V = gather<Scalar>(inputs_.V, first_key, keys, problem_.D, double(grid_));
  if (has_gradient()) tile.dO = gather<Scalar>(inputs_.dO, first_query, queries, problem_.D, double(grid_));
  for (const int query : queries) {
    tile.seen.push_back(int(std::lower_bound(keys.begin(), keys.end(), keys_seen_by(query)) - keys.begin()));
  }
  tile.queries = std::move(queries);
  tile.keys = std::move(keys);

  tile.S = scale_ * product<Scalar>(tile.Q, tile.K.transpose());
  tile.with_noise = kWithNoise && with_noise;
  if (tile.with_noise) tile.S_noise2 = dot_products_noise2(tile.Q, tile.K, tile.S, scale_);
  return tile;
}

// The two numbers that make a row of S a row of P, for a tile that has all keys its queries see.
template <class Scalar>
void Attention<Scalar>::find_row_maximum_and_sum(const Tile<Scalar>& tile) {
  for (size_t r = 0; r < tile.queries.size(); ++r) {
    throw_if_interrupted();
    const auto S = tile.S.row(r).head(tile.seen[r]);

    // A NaN is never the maximum here, but it is in the sum, and so reaches the whole row. A row whose scores are all
    // −∞ is a row that sees no key; −∞ − (−∞) would not be a number.
    Scalar m = -std::numeric_limits<Scalar>::infinity();
    for (const Scalar s : S) m = s > m ? s : m;
    if (m == -std::numeric_limits<Scalar>::infinity()) m = 0;
    const Eigen::RowVector<Scalar, Eigen::Dynamic> exps = S.unaryExpr([m](Scalar s) { return std::exp(s - m); });
    statistics(tile.query_head, tile.queries[r]) = {.m = m, .l = sum_of<Scalar>(exps)};
  }
}

// The noise of what dropout keeps of P, or of dP. What it drops has none, not even where the number was NaN.
template <class Scalar>
Matrix<Scalar> kept_noise2(const Matrix<Scalar>& noise2, const Matrix<Scalar>& keep) {
  if (keep.size() == 0) return noise2;
  return (keep.array() == 0).select(Scalar(0), noise2.array() * keep.array().square()).matrix();
}

// P = exp(S − m) / l, and the weights: P with some of them dropped and the others grown.
template <class Scalar>
void Attention<Scalar>::compute_weights(Tile<Scalar>& tile) {
  tile.P.setZero(tile.S.rows(), tile.S.cols());
  for (size_t r = 0; r < tile.queries.size(); ++r) {
    throw_if_interrupted();
    const RowStatistics<Scalar>& row = statistics(tile.query_head, tile.queries[r]);
    if (row.l == 0) continue;  // no key is seen: all weights stay 0
    // Eight bits are too few for weights of 1/N. FP8 implementations store multiples of a power of two below the
    // row's largest weight, here so that this one becomes 256.
    const Scalar unit = stored_ == DType::e4m3 ? grid_ / (256 * row.l) : grid_;
    const auto P = [&](Scalar s) {
      const Scalar weight = std::exp(s - row.m) / row.l;
      return weight == 1 ? weight : unit * store(weight / unit);  // a row's only weight is exact wherever it is stored
    };
    tile.P.row(r).head(tile.seen[r]) = tile.S.row(r).head(tile.seen[r]).unaryExpr(P);
  }

  tile.weights = tile.P;
  if (problem_.dropout > 0) {
    const Scalar grown = 1 / (1 - Scalar(problem_.dropout));
    tile.keep.setZero(tile.P.rows(), tile.P.cols());
    for (Eigen::Index r = 0; r < tile.P.rows(); ++r) {
      throw_if_interrupted();
      for (int c = 0; c < tile.seen[r]; ++c) {
        if (!mask_.keeps(tile.query_head, tile.queries[r], tile.keys[c])) {
          tile.weights(r, c) = 0;
          continue;
        }
        tile.keep(r, c) = grown;
        tile.weights(r, c) = grid_ * store(tile.P(r, c) * grown / grid_);
      }
    }
  }

  throw_if_interrupted();
  if (tile.with_noise) {
    tile.P_noise2 = softmax_noise2<Matrix<Scalar>>(tile.P, tile.S_noise2.cwiseMin(most_drift2()));
    clear_unseen(tile.P_noise2, tile.seen);
    tile.weights_noise2 = kept_noise2(tile.P_noise2, tile.keep);
  }
}

// A backward pass that stores no P makes it anew, as exp(S − LSE): with the errors of its own S and of the rounded LSE
// that it is given, which no division takes out again.
template <class Scalar>
void Attention<Scalar>::add_recomputation_noise(Tile<Scalar>& tile) {
  for (size_t r = 0; r < tile.queries.size(); ++r) {
    const RowStatistics<Scalar>& row = statistics(tile.query_head, tile.queries[r]);
    if (row.l == 0) continue;
    const Scalar LSE = row.m + std::log(row.l);
    const auto P = tile.P.row(r).head(tile.seen[r]).array();
    const auto drift2 = tile.S_noise2.row(r).head(tile.seen[r]).array() + LSE * LSE;
    tile.P_noise2.row(r).head(tile.seen[r]).array() += P.square() * drift2.min(most_drift2());
    tile.beyond_claim = tile.beyond_claim || (drift2 > most_drift2() && P > 0).any();
  }
  tile.weights_noise2 = kept_noise2(tile.P_noise2, tile.keep);
}

// dS = P∘(dP − D) with dP = dO·Vᵀ, dropped and grown like the weights. P is the one before dropout, since the softmax
// does not know of it.
template <class Scalar>
void Attention<Scalar>::compute_dS(Tile<Scalar>& tile) {
  Matrix<Scalar> dP = product<Scalar>(tile.dO, tile.V.transpose());
  Matrix<Scalar> dP_noise2;
  if constexpr (kWithNoise) dP_noise2 = dot_products_noise2(tile.dO, tile.V, dP, Scalar(1));
  if (tile.keep.size() > 0) {
    const auto dropped = tile.keep.array() == 0;
    dP = dropped.select(Scalar(0), dP.array() * tile.keep.array()).matrix().eval();
    if constexpr (kWithNoise) dP_noise2 = kept_noise2(dP_noise2, tile.keep);
  }

  if constexpr (kWithNoise) add_recomputation_noise(tile);
  tile.dS.resize(tile.P.rows(), tile.P.cols());
  if constexpr (kWithNoise) tile.dS_noise2.resize(tile.P.rows(), tile.P.cols());
  for (size_t r = 0; r < tile.queries.size(); ++r) {
    const RowStatistics<Scalar>& row = statistics(tile.query_head, tile.queries[r]);
    const auto P = tile.P.row(r).array();
    const auto dP_less_D = dP.row(r).array() - row.D;
    tile.dS.row(r) = P * dP_less_D;
    if constexpr (kWithNoise) {
      tile.dS_noise2.row(r) =
          P.square() * (dP_noise2.row(r).array() + row.D_noise2) + tile.P_noise2.row(r).array() * dP_less_D.square();
    }
  }
  clear_unseen(tile.dS, tile.seen);
  if constexpr (kWithNoise) clear_unseen(tile.dS_noise2, tile.seen);
  tile.dS = store(tile.dS);
}

// ---------------------------------------------------------------------------------------------------------------------
// The two passes

// Writes a block's rows to their place in the output.
template <class Scalar>
void write(const Matrix<Scalar>& rows, int64_t slot, Output<Scalar>& output) {
  std::copy(rows.data(), rows.data() + rows.size(), output.values.begin() + slot * rows.cols());
}

template <class Scalar>
void count_noise(const Matrix<Scalar>& noise2, NoiseSum& sum) {
  for (const Scalar x : noise2.reshaped()) sum.add(double(x));
}

// First pass: O = weights · V, LSE and dQ = scale · dS · K for a block of queries, against all the keys they see.
template <class Scalar>
void Attention<Scalar>::query_block(const Block& block, Results<Scalar>& results, BlockNoise& noise) {
  std::vector<int> keys(size_t(keys_seen_by(block.rows.back())));  // the last query sees most
  std::iota(keys.begin(), keys.end(), 0);
  const bool has_results = block.slot != kNoResults;
  Tile<Scalar> tile = open_tile(block.head, block.rows, std::move(keys), has_results);
  const auto sees = [&tile](auto query, auto key) { return tile.sees(query, key); };
  const auto keeps = [&tile](auto query, auto key) { return tile.keeps(query, key); };

  find_row_maximum_and_sum(tile);
  compute_weights(tile);
  const Matrix<Scalar> O = store_output(sum_of_terms(tile.weights, tile.V, keeps) / grid_);
  Matrix<Scalar> O_noise2 = Matrix<Scalar>::Zero(O.rows(), O.cols());
  if (tile.with_noise) {
    const int64_t terms = int64_t(tile.keys.size());
    const Matrix<Scalar> noise2 = terms_noise2(tile.weights_noise2, tile.weights, terms);
    O_noise2 = sum_of_terms<Scalar>(noise2, squares(tile.V), keeps) + sum_itself_noise2(O, terms, smallest());
  }

  if (has_results) {
    write(O, block.slot, results.O);
    count_noise(O_noise2, noise.O);
    for (size_t r = 0; r < block.rows.size(); ++r) {
      const RowStatistics<Scalar>& row = statistics(block.head, block.rows[r]);
      const int seen = tile.seen[r];
      const Scalar LSE = row.m + std::log(row.l);  // −∞ for a row that sees no key: log 0
      results.LSE.values[block.slot + r] = LSE;
      if constexpr (kWithNoise) {
        noise.LSE.add(double(lse_noise2(tile.P.row(r).head(seen), tile.S_noise2.row(r).head(seen), row.m, LSE)));
      }
    }
  }
  if (!has_gradient()) return;

  for (size_t r = 0; r < block.rows.size(); ++r) {
    RowStatistics<Scalar>& row = statistics(block.head, block.rows[r]);
    row.D = grid_ * sum_of<Scalar>(tile.dO.row(r).cwiseProduct(O.row(r)));
    if constexpr (kWithNoise) {
      const auto dO2 = tile.dO.row(r).cwiseAbs2();
      row.D_noise2 = Scalar(1 + walk_of_terms(problem_.D)) * dO2.dot(O.row(r).cwiseAbs2()) +
                     Scalar(walk_to_sum(problem_.D)) * row.D * row.D + dO2.dot(O_noise2.row(r));
      // A backward pass is given O as it is stored, and its D is off by what that rounding makes of it.
      const Scalar shift = tile.dO.row(r).dot(O.row(r) - stored_output(O.row(r))) / unit();
      if (std::isfinite(shift)) row.D_noise2 += shift * shift;
    }
  }
  if (!has_results) return;

  compute_dS(tile);
  noise.beyond_claim = tile.beyond_claim;
  const Matrix<Scalar> dQ = scale_ / grid_ * sum_of_terms(tile.dS, tile.K, sees);
  write<Scalar>(store(dQ), block.slot, results.dQ);
  if constexpr (kWithNoise) {
    const int64_t terms = int64_t(tile.keys.size());
    const Matrix<Scalar> K2 = squares(tile.K), noise2 = terms_noise2(tile.dS_noise2, tile.dS, terms);
    count_noise<Scalar>(scale_ * scale_ * sum_of_terms(noise2, K2, sees) + sum_itself_noise2(dQ, terms, smallest()),
                        noise.dQ);
  }
}

// Second pass: dV = weightsᵀ · dO and dK = scale · dSᵀ · Q for a block of keys, summed over all the queries that see
// them in all the query heads that share them.
template <class Scalar>
void Attention<Scalar>::key_block(const Block& block, Results<Scalar>& results, BlockNoise& noise) {
  const Matrix<Scalar> zero = Matrix<Scalar>::Zero(block.rows.size(), problem_.D);
  Matrix<Scalar> dK = zero, dV = zero, dK_noise2 = zero, dV_noise2 = zero;
  const int64_t terms = int64_t(problem_.Nq) * group();

  const int64_t batch = block.head / problem_.Hkv;
  const int64_t first_head = batch * problem_.Hq + block.head % problem_.Hkv * group();
  for (int64_t head = first_head; head < first_head + group(); ++head) {
    for (int first = first_query_that_sees(block.rows.front()); first < problem_.Nq; first += kQueriesInTile) {
      throw_if_interrupted();
      std::vector<int> queries(size_t(std::min(kQueriesInTile, problem_.Nq - first)));
      std::iota(queries.begin(), queries.end(), first);
      Tile<Scalar> tile = open_tile(head, std::move(queries), block.rows, true);
      const auto sees = [&tile](auto key, auto query) { return tile.sees(query, key); };
      const auto keeps = [&tile](auto key, auto query) { return tile.keeps(query, key); };

      compute_weights(tile);
      compute_dS(tile);
      noise.beyond_claim = noise.beyond_claim || tile.beyond_claim;
      add_terms(dV, tile.weights.transpose(), tile.dO, keeps);
      add_terms(dK, tile.dS.transpose(), tile.Q, sees);
      if constexpr (kWithNoise) {
        const Matrix<Scalar> weights_noise2 = terms_noise2(tile.weights_noise2, tile.weights, terms);
        const Matrix<Scalar> dS_noise2 = terms_noise2(tile.dS_noise2, tile.dS, terms);
        dV_noise2 += sum_of_terms<Scalar>(weights_noise2.transpose(), tile.dO.cwiseAbs2(), keeps);
        dK_noise2 += sum_of_terms<Scalar>(dS_noise2.transpose(), tile.Q.cwiseAbs2(), sees);
      }
    }
  }

  dK *= scale_ / (grid_ * grid_);
  dV /= grid_;
  write<Scalar>(store(dK), block.slot, results.dK);
  write<Scalar>(store(dV), block.slot, results.dV);
  if constexpr (kWithNoise) {
    count_noise<Scalar>(scale_ * scale_ * dK_noise2 + sum_itself_noise2(dK, terms, smallest()), noise.dK);
    count_noise<Scalar>(dV_noise2 + sum_itself_noise2(dV, terms, smallest()), noise.dV);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// All blocks

// Cuts the selected rows of [heads, rows_per_head] into blocks that stay within a head.
template <class Scalar>
std::vector<Block> Attention<Scalar>::blocks(int64_t heads, int rows_per_head, const Selection& selection,
                                             const std::vector<int64_t>& selected, int rows_in_block) const {
  std::vector<Block> blocks;
  const int64_t count = selection.everything ? heads * rows_per_head : int64_t(selected.size());
  for (int64_t slot = 0; slot < count; ++slot) {
    const int64_t row = selection.everything ? slot : selected[slot];
    const int64_t head = row / rows_per_head;
    if (blocks.empty() || blocks.back().head != head || int(blocks.back().rows.size()) == rows_in_block) {
      blocks.push_back({head, {}, slot});
    }
    blocks.back().rows.push_back(int(row % rows_per_head));
  }
  return blocks;
}

// The second pass needs the statistics of every query that may see a selected key: adds blocks for the queries that
// have none yet.
template <class Scalar>
void Attention<Scalar>::add_blocks_for_statistics(const std::vector<Block>& key_blocks,
                                                  std::vector<Block>& query_blocks) const {
  std::vector<bool> covered(problem_.query_rows());
  for (const Block& block : query_blocks) {
    for (const int query : block.rows) covered[block.head * problem_.Nq + query] = true;
  }
  std::vector<bool> needed(problem_.kv_heads());
  for (const Block& block : key_blocks) needed[block.head] = true;

  for (int64_t head = 0; head < int64_t(problem_.query_heads()); ++head) {
    if (!needed[key_head_of(head)]) continue;
    std::vector<int> rows;
    for (int query = 0; query < problem_.Nq; ++query) {
      if (!covered[head * problem_.Nq + query]) rows.push_back(query);
      if (int(rows.size()) == queries_in_block() || (query + 1 == problem_.Nq && !rows.empty())) {
        query_blocks.push_back({head, std::move(rows), kNoResults});
        rows.clear();
      }
    }
  }
}

template <class Scalar>
void finish(const NoiseSum& noise, Output<Scalar>& output) {
  output.noise_norm = noise.norm();
  output.noise_max = noise.max();
}

// Both passes over everything that was selected.
template <class Scalar>
Results<Scalar> Attention<Scalar>::compute(const Selection& selection, int threads) {
  std::vector<Block> query_blocks =
      blocks(int64_t(problem_.query_heads()), problem_.Nq, selection, selection.query_rows, queries_in_block());
  std::vector<Block> key_blocks;
  if (has_gradient()) {
    key_blocks = blocks(int64_t(problem_.kv_heads()), problem_.Nk, selection, selection.key_rows, kKeysInBlock);
    add_blocks_for_statistics(key_blocks, query_blocks);
  }

  Results<Scalar> results;
  const size_t query_rows = selection.everything ? problem_.query_rows() : selection.query_rows.size();
  const size_t key_rows = selection.everything ? problem_.key_rows() : selection.key_rows.size();
  resize_in_pieces(results.O.values, query_rows * problem_.D);
  results.LSE.values.resize(query_rows);
  if (has_gradient()) {
    resize_in_pieces(results.dQ.values, query_rows * problem_.D);
    resize_in_pieces(results.dK.values, key_rows * problem_.D);
    resize_in_pieces(results.dV.values, key_rows * problem_.D);
  }

  std::vector<BlockNoise> query_noise(query_blocks.size()), key_noise(key_blocks.size());
  parallel_for(query_blocks.size(), threads, [&](size_t i) { query_block(query_blocks[i], results, query_noise[i]); });
  parallel_for(key_blocks.size(), threads, [&](size_t i) { key_block(key_blocks[i], results, key_noise[i]); });

  // Added up in the order of the blocks, not in the order in which threads came by.
  BlockNoise total;
  for (const BlockNoise& noise : query_noise) {
    total.O.add(noise.O);
    total.LSE.add(noise.LSE);
    total.dQ.add(noise.dQ);
    results.dQ.beyond_claim = results.dQ.beyond_claim || noise.beyond_claim;
  }
  for (const BlockNoise& noise : key_noise) {
    total.dK.add(noise.dK);
    total.dV.add(noise.dV);
    results.dK.beyond_claim = results.dV.beyond_claim = results.dK.beyond_claim || noise.beyond_claim;
  }
  finish(total.O, results.O);
  finish(total.LSE, results.LSE);
  finish(total.dQ, results.dQ);
  finish(total.dK, results.dK);
  finish(total.dV, results.dV);
  return results;
}

// Throws Error when an array's length is not that of the problem's tensor.
void check_size(const char* name, size_t have, size_t want) {
  if (have == want) return;
  throw Error("reference attention: " + std::string(name) + " has " + std::to_string(have) +
              " elements; the problem's has " + std::to_string(want));
}

// Throws Error when the selected rows are not ascending numbers below `count`.
void check_rows(const char* name, const std::vector<int64_t>& rows, size_t count) {
  const bool ascending = std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) == rows.end();
  if (ascending && (rows.empty() || (rows.front() >= 0 && rows.back() < int64_t(count)))) return;
  throw Error("reference attention: selected " + std::string(name) + " must be sorted, each once, from 0 to " +
              std::to_string(int64_t(count) - 1));
}

}  // namespace

template <class Scalar>
Results<Scalar> attention(const Problem& problem, const Inputs& inputs, const Selection& selection, DType stored,
                          int threads, double grid) {
  check_size("Q", inputs.Q.size(), problem.q_elements());
  check_size("K", inputs.K.size(), problem.kv_elements());
  check_size("V", inputs.V.size(), problem.kv_elements());
  if (!inputs.dO.empty()) check_size("dO", inputs.dO.size(), problem.q_elements());
  if (!selection.everything) {
    check_rows("query rows", selection.query_rows, problem.query_rows());
    check_rows("key rows", selection.key_rows, problem.key_rows());
  }
  return Attention<Scalar>(problem, inputs, stored, grid).compute(selection, threads);
}

double working_bytes(const Problem& p, int threads) {
  const double blocks = double(p.query_heads()) * (p.Nq / queries_in_block(p) + 1);
  const double workers = threads > 0 ? threads : std::max(1u, std::thread::hardware_concurrency());
  const double rows = 3 * p.D;                    // of K, V and their squares
  const double scores = 9 * queries_in_block(p);  // of S, P, weights, dS, their noise, and what lies between
  return std::min(blocks, workers) * p.Nk * (rows + scores) * (p.dtype == DType::fp64 ? 16 : 8);
}

template Results<float> attention(const Problem&, const Inputs&, const Selection&, DType, int, double);
template Results<double> attention(const Problem&, const Inputs&, const Selection&, DType, int, double);
template Results<long double> attention(const Problem&, const Inputs&, const Selection&, DType, int, double);

}  // namespace flash::reference
