#include "harness/problem.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <sstream>

#include "harness/error.h"

namespace flash {
namespace {

struct NamedType {
  DType type;
  const char* name;
  size_t bytes;
};
constexpr std::array<NamedType, 5> kTypes = {{{DType::fp64, "fp64", 8},
                                              {DType::fp32, "fp32", 4},
                                              {DType::fp16, "fp16", 2},
                                              {DType::bf16, "bf16", 2},
                                              {DType::e4m3, "e4m3", 1}}};

const NamedType& entry(DType type) {
  for (const NamedType& t : kTypes)
    if (t.type == type) return t;
  throw Error("dtype: not a value of DType");
}

void require_size(const char* name, int value, int smallest) {
  if (value >= smallest) return;
  throw Error(std::string(name) + ": " + std::to_string(value) + " is too small; at least " + std::to_string(smallest) +
              " is needed");
}

// Pairs (query, key) of one head that are computed with: all of them, or those that the causal mask leaves.
double visible_pairs(const Problem& p) {
  if (!p.causal) return double(p.Nq) * p.Nk;
  // Query i sees max(0, min(Nk, i + 1 + Nk − Nq)) keys: a triangle that ends full.
  const double rows = std::min(p.Nq, p.Nk);
  const double longest = p.Nk, shortest = p.Nk - rows + 1;
  return rows * (longest + shortest) / 2;
}

}  // namespace

std::string name_of(DType type) { return entry(type).name; }

size_t bytes_of(DType type) { return entry(type).bytes; }

DType dtype_named(const std::string& name) {
  std::string known;
  for (const NamedType& t : kTypes) {
    if (name == t.name) return t.type;
    known += (known.empty() ? "" : ", ") + std::string(t.name);
  }
  throw Error("--dtype: there is no '" + name + "'; choose one of " + known);
}

DType input_dtype(const Problem& p) { return p.dtype == DType::e4m3 ? p.quantisation.from : p.dtype; }

DType output_dtype(const Problem& p) { return p.dtype == DType::e4m3 ? DType::bf16 : p.dtype; }

double default_scale(int D) { return 1.0 / std::sqrt(double(D)); }

void validate(const Problem& p) {
  require_size("--batch", p.B, 0);
  require_size("--heads", p.Hq, 0);
  require_size("--kv-heads", p.Hkv, 0);
  require_size("--seq", p.Nq, 0);
  require_size("--seq-k", p.Nk, 0);
  require_size("--head-dim", p.D, 1);
  const bool grouped = p.Hkv > 0 ? p.Hq % p.Hkv == 0 : p.Hq == 0;  // no query heads: a group of none for each
  if (!grouped)
    throw Error("--kv-heads: " + std::to_string(p.Hkv) + " does not divide the " + std::to_string(p.Hq) +
                " query heads; give a divisor of --heads");
  if (!std::isfinite(p.scale)) throw Error("--scale: must be a finite number");
  // Kernels that compute 2^x for e^x multiply the scale by log2 e.
  if (p.dtype != DType::fp64 && std::fabs(p.scale) * 1.4426950408889634 > std::numeric_limits<float>::max())
    throw Error(
        "--scale: is too large: scores are computed in fp32, some with the scale times log2(e) as exponents of "
        "2; at most 2.35e38 either side of 0 (fp64: any finite number)");
  const Quantisation& q = p.quantisation;
  if (q.from != DType::bf16 && q.from != DType::fp32)
    throw Error("--from: a step quantises bf16 or fp32, not " + name_of(q.from));
  if (p.dtype != DType::e4m3 && !(q.from == DType::bf16 && q.tile_scales && q.rotation))
    throw Error("--from, --tensor-scales, --no-rotation: are for --dtype e4m3, not " + name_of(p.dtype));
  if (!(p.dropout >= 0.0 && p.dropout < 1.0))
    throw Error("--dropout: must be at least 0 and less than 1 (the probability that a weight is dropped)");
  // Heads are numbered by 32-bit integers (in the dropout counter too), and sizes in bytes by 64-bit ones.
  if (double(p.B) * std::max(p.Hq, p.Hkv) > std::numeric_limits<int>::max())
    throw Error("--batch, --heads: batch times heads must be at most 2147483647");
  constexpr double kMostElements = double(uint64_t(1) << 50);
  for (double rows : {double(p.query_heads()) * p.Nq, double(p.kv_heads()) * p.Nk})
    if (rows * p.D > kMostElements) throw Error("--seq, --batch, --heads: a tensor may have at most 2^50 elements");
}

size_t Problem::scores() const {
  constexpr double kMostScores = double(uint64_t(1) << 59);  // some matrices of them then have less than 2^64 bytes
  if (double(query_rows()) * Nk > kMostScores)
    throw Error(std::string("--seq, --seq-k: S and P may have at most 2^59 elements; choose a smaller problem, or ") +
                kLinearSteps);
  return query_rows() * size_t(Nk);
}

std::string describe(const Problem& p) {
  std::ostringstream text;
  text << "B " << p.B << ", heads " << p.Hq;
  if (p.Hkv != p.Hq) text << " (kv " << p.Hkv << ")";
  text << ", seq " << p.Nq;
  if (p.Nk != p.Nq) text << " x " << p.Nk;
  text << ", head dim " << p.D << ", " << name_of(p.dtype);
  if (p.quantisation.from != DType::bf16) text << " from " << name_of(p.quantisation.from);
  if (!p.quantisation.tile_scales) text << ", tensor scales";
  if (!p.quantisation.rotation) text << ", no rotation";
  if (p.causal) text << ", causal";
  if (p.scale != default_scale(p.D)) text << ", scale " << p.scale;
  if (p.deterministic) text << ", deterministic";
  if (p.dropout > 0) text << ", dropout " << p.dropout << " (seed " << p.seed << ")";
  return text.str();
}

double flops(const Problem& p, Pass pass) {
  const double forward = 4.0 * double(p.query_heads()) * visible_pairs(p) * p.D;
  return pass == Pass::forward ? forward : 2.5 * forward;
}

}  // namespace flash
