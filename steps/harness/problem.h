// One attention problem: its sizes and its options, as every chapter, the oracle and the command line see it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace flash {

enum class DType { fp64, fp32, fp16, bf16, e4m3 };

std::string name_of(DType type);
DType dtype_named(const std::string& name);  // throws Error, listing the names there are
size_t bytes_of(DType type);                 // of one element

enum class Pass { forward, backward };

// How a step whose dtype is e4m3 makes 8-bit numbers of the Q, K and V that it is given.
struct Quantisation {
  DType from = DType::bf16;  // what Q, K and V are given in: bf16 or fp32
  bool tile_scales = true;   // a scale for each tile of Q, K and V; else one for each of the three
  bool rotation = true;      // the rows of Q and K are rotated, which spreads outliers over the row
};

// Q, O, dQ, dO are [B, Hq, Nq, D]; K, V, dK, dV are [B, Hkv, Nk, D]; LSE is [B, Hq, Nq]. All row-major and contiguous.
//
//     S = scale · Q Kᵀ      P = softmax(S) over the keys that the query sees      O = dropout(P) V
//
// Query head h reads key/value head h / (Hq / Hkv). With `causal`, query i sees the keys j ≤ i + (Nk − Nq): the last
// query sees all. A query that sees no key has O = 0, LSE = −∞ and no gradient.
struct Problem {
  int B = 1;
  int Hq = 1;
  int Hkv = 1;
  int Nq = 1;
  int Nk = 1;
  int D = 64;
  double scale = 0.125;  // any number that fp32 can hold times log₂ e (fp64: any finite); usually default_scale(D)
  bool causal = false;
  double dropout = 0.0;  // the probability p that a weight is dropped, 0 ≤ p < 1; kept weights grow by 1 / (1 − p)
  uint64_t seed = 0;     // of the dropout mask
  uint32_t offset = 0;   // which of the seed's masks: another number, another mask
  DType dtype = DType::fp32;
  Quantisation quantisation;   // for e4m3 alone
  bool deterministic = false;  // gradients have the same bits in every run; steps without atomics always do

  size_t query_heads() const { return size_t(B) * Hq; }
  size_t kv_heads() const { return size_t(B) * Hkv; }
  size_t query_rows() const { return query_heads() * Nq; }
  size_t key_rows() const { return kv_heads() * Nk; }
  size_t q_elements() const { return query_rows() * D; }
  size_t kv_elements() const { return key_rows() * D; }
  size_t scores() const;  // elements of S, of P; throws Error where their bytes could not be counted
};

// What else to do where S, P and the like find no room.
constexpr char kLinearSteps[] = "a step whose memory grows with N, not N x N (05 and later, backward 06 and later)";

// What a step's tensors lie in memory as: the problem's dtype, but for e4m3, which is given Q, K and V in a wider type
// and returns O in bf16.
DType input_dtype(const Problem& problem);
DType output_dtype(const Problem& problem);

// 1/√D, what the papers use.
double default_scale(int D);

// Throws Error when a size or an option is out of range, or when Hq is no multiple of Hkv.
void validate(const Problem& problem);

// For messages: "B 1, heads 2, seq 128, head dim 64, fp32, causal".
std::string describe(const Problem& problem);

// Floating-point operations as the papers count them: forward 4·B·H·Nq·Nk·D (the visible part of it when causal),
// backward 2.5 times that.
double flops(const Problem& problem, Pass pass);

}  // namespace flash
