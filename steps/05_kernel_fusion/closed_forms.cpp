// What docs/05_kernel_fusion.md counts: bytes of global memory that each kernel asks for.
#include "harness/closed_forms.h"

namespace {
using namespace flash;

// O, m and l begin in HBM; for each key tile the queries that see it come with them, and go back changed.
std::vector<KernelBytes> algorithm1(const Problem& p) {
  constexpr int kTile = 32;
  const double heads = double(p.query_heads()), rows = double(p.query_rows()), D = p.D;
  double loaded = 0, changed = 0;  // rows of Q, m and l in all tiles; rows of O, m and l that a key tile changes
  for (int key0 = 0; key0 < p.Nk; key0 += kTile) {
    int first = 0;
    while (first < p.Nq && keys_seen_by(p, first) <= key0) first++;
    changed += p.Nq - first;
    if (first < p.Nq) loaded += p.Nq - first / kTile * kTile;
  }
  const double keys = 2 * D * p.Nk;  // a head reads K and V once, then Q for each key tile
  double last_reads = 0;             // LSE from l, and from m where a key was seen
  for (int i = 0; i < p.Nq; i++) last_reads += keys_seen_by(p, i) > 0 ? 2 : 1;
  return {{"algorithm1", 4 * heads * (keys + loaded * (D + 2) + changed * D + last_reads),
           4 * (rows * (D + 2) + heads * changed * (D + 2) + rows)}};
}

// A block reads its queries once, and K and V up to the last key that one of them sees; O and LSE are written once.
std::vector<KernelBytes> forward(const Problem& p) {
  const double heads = double(p.query_heads()), q = double(p.q_elements());
  return {{"fused_forward", 4 * (q + 2 * p.D * heads * keys_walked(p, 32, 32)), 4 * (q + double(p.query_rows()))}};
}

// The same by larger tiles. K is fetched a tile ahead, also behind the last one that is needed.
std::vector<KernelBytes> register_tiled(const Problem& p) {
  const int Br = p.D < 128 ? 128 : 64, Bc = 32;
  const double heads = double(p.query_heads()), q = double(p.q_elements());
  const double keys = keys_walked(p, Br, Bc, 1) + keys_walked(p, Br, Bc);
  return {{"fused_forward", 4 * (q + p.D * heads * keys), 4 * (q + double(p.query_rows()))}};
}

const ClosedFormRegistration forms[] = {{__FILE__, "algorithm1", Pass::forward, algorithm1},
                                        {__FILE__, "forward", Pass::forward, forward},
                                        {__FILE__, "register_tiled", Pass::forward, register_tiled}};

}  // namespace
