#include "cli/random_problems.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/draws.h"
#include "harness/interrupt.h"

namespace flash::cli {
namespace {

constexpr double kMostWork = 3e6;  // multiplications of one of the products: what a case may cost

template <class T>
T pick(Draws& draws, const std::vector<T>& from) {
  return from[size_t(draws.below(int(from.size())))];
}

// A sequence length: none, one, a few, at the edges of tiles, any.
int draw_length(Draws& draws) {
  const int kind = draws.below(100), small = 2 + draws.below(32), any = 1 + draws.below(300);
  const int tile = pick(draws, std::vector<int>{16, 32, 48, 64, 80, 96, 128, 160, 192, 256}), off = draws.below(3) - 1;
  return kind < 3 ? 0 : kind < 10 ? 1 : kind < 40 ? small : kind < 75 ? tile + off : any;
}

// Now and then a length past those from which on steps have other tiles (512, 1,024, 2,048 in chapter 08), beside as
// many of the other as the work allows.
void make_long(Problem& p, Draws& draws) {
  if (!draws.chance(6) || p.Nq == 0 || p.Nk == 0) return;
  const int length = pick(draws, std::vector<int>{512, 512, 1024, 2048}) - 1 + draws.below(130);
  const int other = 1 + draws.below(std::clamp(int(kMostWork / length / p.D), 1, 160));
  const bool queries = draws.chance(50);
  p.Nq = queries ? length : other, p.Nk = queries ? other : length;
}

// Of many head dims mostly those that the chapters have, and now and then any other.
int draw_head_dim(Draws& draws, const std::vector<int>& dims) {
  const int usual = pick(draws, std::vector<int>{32, 64, 64, 128}), any = pick(draws, dims);
  const bool many = dims.size() > 8;
  return many && draws.chance(60) ? usual : any;
}

Values draw_values(Draws& draws) {
  const std::vector<Values>& all = all_values();
  const Values other = pick(draws, all);
  return draws.chance(40) ? Values::normal : other;
}

// A factor of the scores that leaves them where P can be made from a fp32 LSE (page 06, Huge scores), for numbers of
// this kind.
double draw_scale(Draws& draws, const Problem& p, Values values) {
  const int kind = draws.below(100), power = draws.below(6);
  const bool negative = draws.chance(20);
  const double usual = default_scale(p.D) * (negative ? -1 : 1);
  if (values == Values::huge) return usual / huge_gain(input_dtype(p)) / huge_gain(input_dtype(p));
  // A weight too small for a float makes NaN of an ∞, where an exact one leaves ∞, and the rule is laxer there.
  if (values == Values::inf || kind < 50) return default_scale(p.D);
  if (kind < 65) return usual * std::ldexp(1.0, power - 3);
  if (kind < 75) return usual * std::ldexp(1.0, values == Values::outliers ? 1 : power);
  if (kind < 85) return negative ? -1 : 1;
  if (kind < 95) return 0;
  return kind < 97 ? 1e-30 : kind < 99 ? 1e-40 : 1e-60;  // the last is 0 as a float
}

double work(const Problem& p) { return double(p.query_heads()) * std::max(1, p.Nq) * std::max(1, p.Nk) * p.D; }

// Fewer of everything, largest first, until the case is cheap.
void make_cheap(Problem& p) {
  while (work(p) > kMostWork) {
    if (p.B > 1) {
      p.B = 1;
    } else if (p.Hq > p.Hkv) {
      p.Hq = p.Hkv;
    } else if (p.Hkv > 1) {
      p.Hq = p.Hkv = 1;
    } else if (p.Nq >= p.Nk) {
      p.Nq = p.Nq * 2 / 3;
    } else {
      p.Nk = p.Nk * 2 / 3;
    }
  }
}

// Everything that makes an item smaller or plainer by one step, boldest first.
std::vector<Item> smaller_ones(const Item& item) {
  std::vector<Item> smaller;
  const auto add = [&](const auto& change) {
    smaller.push_back(item);
    change(smaller.back().problem);
  };
  const Problem& p = item.problem;
  const auto lengths = [](int n) {
    std::vector<int> shorter;
    for (const int m : {1, n / 2, n * 3 / 4, n - 8, n - 1})
      if (m > 0 && m < n) shorter.push_back(m);
    return shorter;
  };
  if (p.B > 1) add([](Problem& q) { q.B = 1; });
  if (p.Hq > 1) add([](Problem& q) { q.Hq = q.Hkv = 1; });
  if (p.Hq > p.Hkv) add([](Problem& q) { q.Hq = q.Hkv; });
  if (p.Hkv > 1) add([](Problem& q) { q.Hq = q.Hq / q.Hkv, q.Hkv = 1; });
  for (const int m : lengths(p.Nq)) add([m](Problem& q) { q.Nq = m; });
  for (const int m : lengths(p.Nk)) add([m](Problem& q) { q.Nk = m; });
  if (p.Nq == p.Nk)
    for (const int m : lengths(p.Nq)) add([m](Problem& q) { q.Nq = q.Nk = m; });
  if (p.dropout > 0) add([](Problem& q) { q.dropout = 0; });
  if (p.causal) add([](Problem& q) { q.causal = false; });
  if (p.deterministic) add([](Problem& q) { q.deterministic = false; });
  if (item.values == Values::normal && p.scale != default_scale(p.D))
    add([](Problem& q) { q.scale = default_scale(q.D); });
  for (const int D : item.step->info().head_dims)
    if (D < p.D) {
      add([D](Problem& q) { q.scale *= default_scale(D) / default_scale(q.D), q.D = D; });
      break;
    }
  if (item.values != Values::normal) {
    add([](Problem& q) { q.scale = default_scale(q.D); });
    smaller.back().values = Values::normal;
  }
  if (p.seed > 9)
    for (uint64_t seed = 0; seed < 3; seed++) add([seed](Problem& q) { q.seed = seed; });
  return smaller;
}

}  // namespace

RandomCase random_case(const Step& step, Pass pass, uint64_t seed, uint32_t number, const ProblemOptions& given,
                       std::optional<Values> given_values) {
  Draws draws(seed, number, 2);
  Problem p;
  p.dtype = pick(draws, step.dtypes);
  if (given.dtype) p.dtype = dtype_named(*given.dtype);
  p.D = draw_head_dim(draws, step.head_dims);
  p.D = given.head_dim.value_or(p.D);
  const int heads = pick(draws, std::vector<int>{1, 1, 1, 2, 2, 3, 5}),
            group = pick(draws, std::vector<int>{1, 2, 3, 4});
  const bool grouped = draws.chance(30) && step.kv_heads;
  p.Hkv = heads;
  p.Hq = heads * (grouped ? group : 1);
  p.B = pick(draws, std::vector<int>{1, 1, 1, 1, 2, 3});
  if (draws.chance(1)) p.B = 0;
  p.Nq = draw_length(draws);
  p.Nk = draw_length(draws);
  if (draws.chance(30)) p.Nk = p.Nq;
  p.causal = draws.chance(50) && step.causal;
  const double some_p = double(draws.below(1000)) / 1000, usual_p = pick(draws, std::vector<double>{.1, .5, .9});
  const bool drops = draws.chance(40), usual = draws.chance(50);
  if (drops && step.dropout) p.dropout = usual ? usual_p : some_p;
  p.deterministic = draws.chance(30) && pass == Pass::backward;
  const Values values = draw_values(draws);
  p.scale = draw_scale(draws, p, given_values.value_or(values));
  const uint64_t case_seed = 1 + draws.word() / 2;
  make_long(p, draws);
  make_cheap(p);

  if (given.kv_heads && !given.heads) {  // a multiple of those that were given
    const int64_t multiple = std::max(0, *given.kv_heads) * int64_t(p.Hq / p.Hkv);
    p.Hq = int(multiple <= std::numeric_limits<int>::max() ? multiple : *given.kv_heads);
  }
  ProblemOptions rest = given;
  rest.head_dim.reset();  // which would set the scale, too
  p = rest.apply(p);
  p.seed = case_seed;
  return {p, given_values.value_or(values)};
}

Item smallest_failing(Item item, const std::function<bool(const Item&)>& fails, int questions) {
  for (bool shrinking = true; shrinking && questions > 0;) {
    shrinking = false;
    for (const Item& smaller : smaller_ones(item)) {
      if (why_unsupported(*smaller.step, smaller.problem, smaller.pass)) continue;
      throw_if_interrupted();
      if (questions-- <= 0) break;
      if (!fails(smaller)) continue;
      item = smaller;
      shrinking = true;
      break;
    }
  }
  return item;
}

}  // namespace flash::cli
