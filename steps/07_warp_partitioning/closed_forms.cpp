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

}  // namespace
}  // namespace flash
