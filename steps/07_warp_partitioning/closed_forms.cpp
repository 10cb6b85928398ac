// What the page derives for this chapter's kernels, for `flashsteps profile`: docs/07_warp_partitioning.md.
#include "harness/closed_forms.h"

namespace flash {
namespace {

// Q, O and LSE once, and K and V once for every block that walks over them: `keys` in all.
std::vector<KernelBytes> forward(const char* kernel, const Problem& p, double keys) {
  const double heads = double(p.query_heads()), row = double(p.D) * double(bytes_of(p.dtype));
  return {{kernel, heads * (p.Nq * row + 2 * keys * row), heads * (p.Nq * row + p.Nq * 4.0)}};
}

const ClosedFormRegistration split_k_form(__FILE__, "split_k", Pass::forward, [](const Problem& p) {
  return forward("split_k_forward", p, keys_walked(p, 64, 64));
});
const ClosedFormRegistration split_q_form(__FILE__, "split_q", Pass::forward, [](const Problem& p) {
  return forward("split_q_forward", p, keys_walked(p, 64, 64));
});
// Of its last tile only the keys that are seen are read.
const ClosedFormRegistration pipelined_form(__FILE__, "pipelined", Pass::forward, [](const Problem& p) {
  return forward("pipelined_forward", p, keys_walked(p, p.dropout > 0 ? 64 : 128, 1));
});

// A block keeps 128 keys: K and V once, and for each query head of the group the queries from the first that sees one
// of them, in tiles of 64: Q, dO, and LSE and D for whole tiles. Each tile of dQ is added to the sum in fp32.
std::vector<KernelBytes> backward(const Problem& p) {
  const double heads = double(p.query_heads()), element = double(bytes_of(p.dtype)), row = p.D * element;
  const double q = double(p.q_elements()), kv = double(p.kv_elements());
  const double rows = heads * ((p.Nq + 63) / 64 * 64);  // in whole tiles
  const double tiles = heads * query_tiles_walked(p, 128, 64);
  const double walked = heads * queries_walked(p, 128, 64) * 2 * row + tiles * 64 * 8;
  const double sum = p.deterministic ? 0 : 4 * p.D;  // bytes of a row of dQ in fp32
  std::vector<KernelBytes> kernels = {
      {"row_dots", 2 * q * element + 4 * double(p.query_rows()), rows * (8 + sum)},
      {"keys_gradient", 2 * kv * element + walked, 2 * kv * element + tiles * 64 * sum}};
  if (p.deterministic)
    kernels.push_back(
        {"queries_gradient",
         2 * q * element + 8 * double(p.query_rows()) + heads * keys_walked(p, 128, p.D == 64 ? 64 : 32) * 2 * row,
         q * element});
  else
    kernels.push_back({"round_dQ", 4 * q, q * element});
  return kernels;
}
const ClosedFormRegistration backward_form(__FILE__, "backward", Pass::backward, backward);

}  // namespace
}  // namespace flash
