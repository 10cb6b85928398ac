// What docs/04_online_softmax.md counts: bytes of global memory that each kernel asks for.
#include "harness/closed_forms.h"

namespace {
using namespace flash;

// Chapter 03's: where a query of a tile sees a key of it, its rows of Q and of K; and all of S.
KernelBytes scores(const Problem& p) {
  return {"scores", 4 * p.D * double(p.query_heads()) * rows_of_seen_tiles(p, 128, 64), 4 * double(p.scores())};
}

// P, or S in its place, once, and V once for each tile of rows of O; `statistics`: bytes that a row brings besides.
KernelBytes weighted_sum(const Problem& p, double statistics) {
  const int Br = p.D < 128 ? 128 : 64;
  const double heads = double(p.query_heads());
  return {"weighted_sum",
          4 * heads * (elements_walked(p, Br, 32) + p.D * keys_walked(p, Br, 32)) + statistics * double(p.query_rows()),
          4 * double(p.q_elements())};
}

std::vector<KernelBytes> three_pass(const Problem& p) {
  const double elements = double(p.scores()), rows = double(p.query_rows());
  return {scores(p), {"softmax", 4 * 3 * elements, 4 * (elements + rows)}, weighted_sum(p, 0)};
}

std::vector<KernelBytes> online(const Problem& p) {
  return {scores(p), {"row_statistics", 4 * double(p.scores()), 12 * double(p.query_rows())}, weighted_sum(p, 8)};
}

const ClosedFormRegistration forms[] = {{__FILE__, "three_pass", Pass::forward, three_pass},
                                        {__FILE__, "online", Pass::forward, online}};

}  // namespace
